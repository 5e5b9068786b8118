package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// daemon is our own dockerd. All of its files are in one directory. It reuses or removes what an
// earlier dockerd left there when it was killed.
type daemon struct {
	dir, root string
	log       io.Writer
}

func newDaemon(o Options) *daemon {
	return &daemon{dir: filepath.Join(o.Cache, "engine"), root: o.Root, log: o.Log}
}

func (d *daemon) file(name string) string { return filepath.Join(d.dir, name) }
func (d *daemon) socket() string          { return d.file("docker.sock") }
func (d *daemon) pidFile() string         { return d.file("pid") }
func (d *daemon) configFile() string      { return d.file("daemon.json") }

// startTime is how long an engine may take to answer: it may first have to end the containers of an
// engine that was killed.
const startTime = 2 * time.Minute

func (e *Engine) run(ctx context.Context) error {
	d := e.daemon
	if err := d.tidy(ctx); err != nil {
		return err
	}
	if err := d.configure(ctx); err != nil {
		return err
	}
	if err := d.remember(ctx); err != nil {
		return err
	}
	ended, err := d.launch()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for !e.answers(ctx) {
		select {
		case err := <-ended:
			return fmt.Errorf("the Docker engine ended instead of answering: %w; the end of %s:\n%s",
				err, d.file("log"), d.lastLines())
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the Docker engine does not answer at %s: %w; "+
				"the end of %s:\n%s", e.Host, ctx.Err(), d.file("log"), d.lastLines()),
				d.stop(context.WithoutCancel(ctx)))
		case <-time.After(200 * time.Millisecond):
		}
	}
	if err := e.clear(ctx); err != nil {
		return fmt.Errorf("remove what an earlier run left: %w", err)
	}
	return e.sayDriver(ctx)
}

// launch starts dockerd in a process session of its own, so that an interrupt at the terminal
// reaches only us. We then stop it in order.
func (d *daemon) launch() (ended <-chan error, err error) {
	log, err := os.Create(d.file("log"))
	if err != nil {
		return nil, fmt.Errorf("make the engine's log: %w", err)
	}
	defer log.Close()
	command := exec.Command("dockerd", "--config-file", d.configFile())
	command.Stdout, command.Stderr = log, log
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := command.Start(); err != nil {
		return nil, fmt.Errorf("start dockerd: %w", err)
	}
	result := make(chan error, 1)
	go func() {
		if err := command.Wait(); err != nil {
			result <- err
			return
		}
		result <- errors.New("it exited with status 0")
	}()
	return result, nil
}

// configure writes the daemon's settings. It leaves out the bridge, which all engines of the
// machine would share, and which neither kind nor our builds use.
func (d *daemon) configure(ctx context.Context) error {
	settings := map[string]any{
		"data-root": d.file("data"),
		"exec-root": d.file("exec"),
		"pidfile":   d.pidFile(),
		"hosts":     []string{"unix://" + d.socket()},
		"bridge":    "none",
	}
	restricted, err := WithoutSysResource()
	if err != nil {
		return err
	}
	if restricted {
		wrapper, err := d.wrapper(ctx)
		if err != nil {
			return err
		}
		const name = "without-sys-resource"
		settings["default-runtime"] = name
		settings["runtimes"] = map[string]any{name: map[string]string{"path": wrapper}}
		fmt.Fprintln(d.log, "engine: containers run without CAP_SYS_RESOURCE, which this machine lacks")
	}
	text, err := json.MarshalIndent(settings, "", "  ")
	if err == nil {
		err = os.WriteFile(d.configFile(), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the engine's settings: %w", err)
	}
	return nil
}

func (d *daemon) wrapper(ctx context.Context) (string, error) {
	path := d.file("runc-wrapper")
	command := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", path,
		"./e2e/engine/runc")
	command.Dir = d.root
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = time.Minute
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the wrapper of runc: %w: %s", err, tail(out))
	}
	return path, nil
}

// tidy ends a daemon of ours that runs but does not answer. It also removes pid files that name
// processes of others, because dockerd would wait for those processes.
func (d *daemon) tidy(ctx context.Context) error {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return fmt.Errorf("make the engine's directory: %w", err)
	}
	if len(d.socket()) > socketPathMax {
		return fmt.Errorf("the engine's socket %s has %d characters, and may have %d: set "+
			"XDG_CACHE_HOME to a shorter directory", d.socket(), len(d.socket()), socketPathMax)
	}
	if err := d.stop(ctx); err != nil {
		return err
	}
	// A containerd may outlive the dockerd that started it, and then serves the next one. If none is
	// left, remove only its pid file: with the others the next one finds the containers that run.
	containerd := d.file("exec/containerd/containerd.pid")
	if pid := livingPID(containerd, d.file("exec/containerd")); pid == 0 {
		if err := os.Remove(containerd); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the pid file of an earlier containerd: %w", err)
		}
	}
	return nil
}

// socketPathMax is the longest path of our directory: the kernel limits the path of a socket, and
// containerd's socket is deeper in our directory than docker's.
const socketPathMax = 107 - len("exec/containerd/containerd.sock.ttrpc") + len("docker.sock")

// stop ends the daemon of the pid file and waits for its end. It is no error if there is no daemon.
func (d *daemon) stop(ctx context.Context) error {
	pid := livingPID(d.pidFile(), d.configFile())
	if pid == 0 {
		if err := os.Remove(d.pidFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the pid file of an earlier engine: %w", err)
		}
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("end our engine, process %d: %w", pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for names(pid, d.configFile()) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("our engine, process %d, does not end: %w; look at %s and end it by hand",
				pid, ctx.Err(), d.file("log"))
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// livingPID returns the process in the pid file if it runs and is ours, and zero otherwise. A
// process is ours if its command line names our file.
func livingPID(pidFile, ours string) int {
	text, err := os.ReadFile(pidFile)
	if err != nil {
		return 0
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil || pid <= 1 || !names(pid, ours) {
		return 0
	}
	return pid
}

// names reports whether the process's command line contains the path. A process that has ended, but
// that nobody has waited for, has an empty command line.
func names(pid int, path string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(line), path)
}

func (d *daemon) lastLines() string {
	text, err := os.ReadFile(d.file("log"))
	if err != nil {
		return err.Error()
	}
	return tail(text)
}

// sayDriver warns if the storage driver copies whole images for every container.
func (e *Engine) sayDriver(ctx context.Context) error {
	driver, err := e.Output(ctx, "info", "--format", "{{.Driver}}")
	if err != nil {
		return fmt.Errorf("ask the engine for its storage driver: %w", err)
	}
	if driver == "vfs" {
		fmt.Fprintf(e.log, "engine: on the filesystem of %s only the storage driver vfs works, which "+
			"is slow and takes much space; set XDG_CACHE_HOME to a directory on ext4 or xfs\n",
			e.daemon.dir)
	}
	return nil
}

const capSysResource = 24

// WithoutSysResource reports whether this machine cannot give CAP_SYS_RESOURCE to a container,
// because it is not in this process's bounding set.
func WithoutSysResource() (bool, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false, fmt.Errorf("read our capabilities: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		var bounding uint64
		if _, err := fmt.Sscanf(line, "CapBnd:\t%x", &bounding); err == nil {
			return bounding&(1<<capSysResource) == 0, nil
		}
	}
	return false, fmt.Errorf("read our capabilities: no line CapBnd in %q", status)
}

// watchersNeeded is how many inotify instances three nodes use: each has systemd, containerd, a
// kubelet and their children.
const watchersNeeded = 512

// raiseWatchers raises the kernel's limit of inotify instances if it is too low for a cluster.
func raiseWatchers(log io.Writer, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the limit of inotify instances: %w", err)
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("read the limit of inotify instances: %w", err)
	}
	if limit >= watchersNeeded {
		return nil
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(watchersNeeded)), 0); err != nil {
		return fmt.Errorf("fs.inotify.max_user_instances is %d and three nodes need %d: "+
			"raise it with sysctl: %w", limit, watchersNeeded, err)
	}
	fmt.Fprintf(log, "engine: raised fs.inotify.max_user_instances from %d to %d; it stays so\n",
		limit, watchersNeeded)
	return nil
}

// unmountTime is how long a mount may stay busy after the engine has ended.
const unmountTime = 20 * time.Second

// unmountBelow unmounts what a killed engine has left mounted in its directory, the last mounts
// first.
func unmountBelow(ctx context.Context, dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return fmt.Errorf("look for what the engine left mounted: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, unmountTime)
	defer cancel()
	var problems []error
	for i := len(mounts) - 1; i >= 0; i-- {
		problems = append(problems, unmount(ctx, mounts[i].Mountpoint))
	}
	return errors.Join(problems...)
}

func unmount(ctx context.Context, path string) error {
	for {
		err := unix.Unmount(path, 0)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, syscall.EBUSY):
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("unmount %s: %w", path, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// A Docker engine turns on packet forwarding and adds filter rules, and does not undo that when it
// ends. The functions below restore the network of a machine that had no engine.

// network contains the settings of the machine that an engine changes.
type network struct {
	// Rules contains the rules of each table, as iptables lists them.
	Rules map[string][]string
	// Forward is the value of net.ipv4.ip_forward.
	Forward string
}

const forwardFile = "/proc/sys/net/ipv4/ip_forward"

// tables are the tables of rules: the program that lists each, and its name.
var tables = []string{"iptables filter", "iptables nat", "ip6tables filter", "ip6tables nat"}

// networkFile is the file with the record of the network. It exists from the start of our engine
// until the network is restored.
func (d *daemon) networkFile() string { return d.file("network.json") }

// remember records the network before our engine runs. If an engine of ours was killed, its record
// is still there, and is kept.
func (d *daemon) remember(ctx context.Context) error {
	if exists(d.networkFile()) {
		return nil
	}
	text, err := json.MarshalIndent(readNetwork(ctx), "", "  ")
	if err == nil {
		err = os.WriteFile(d.networkFile(), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("record the network: %w", err)
	}
	return nil
}

// giveBack restores the network, unless another engine runs, which uses the rules.
func (d *daemon) giveBack(ctx context.Context) error {
	text, err := os.ReadFile(d.networkFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	var before network
	if err == nil {
		err = json.Unmarshal(text, &before)
	}
	if err != nil {
		return fmt.Errorf("read the record of the network: %w", err)
	}
	if other := otherEngine(); other != 0 {
		fmt.Fprintf(d.log, "engine: another Docker engine runs, process %d: rules of iptables stay\n",
			other)
	} else if err := restore(ctx, before, readNetwork(ctx)); err != nil {
		return err
	}
	return os.Remove(d.networkFile())
}

// otherEngine returns the process ID of a dockerd on this machine, or zero. It is called when our
// own has ended; even a zombie has no command line.
func otherEngine() int {
	found, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, file := range found {
		line, err := os.ReadFile(file)
		program, _, _ := strings.Cut(string(line), "\x00")
		if err == nil && filepath.Base(program) == "dockerd" {
			pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(file)))
			return pid
		}
	}
	return 0
}

// readNetwork reads the network. It omits tables that cannot be read, which do not exist.
func readNetwork(ctx context.Context) network {
	now := network{Rules: map[string][]string{}}
	if text, err := os.ReadFile(forwardFile); err == nil {
		now.Forward = strings.TrimSpace(string(text))
	}
	for _, t := range tables {
		program, name, _ := strings.Cut(t, " ")
		out, err := exec.CommandContext(ctx, program, "-w", "-t", name, "-S").Output()
		if err == nil {
			now.Rules[t] = strings.Split(strings.TrimSpace(string(out)), "\n")
		}
	}
	return now
}

func restore(ctx context.Context, before, now network) error {
	var problems []error
	for t, rules := range now.Rules {
		old, known := before.Rules[t]
		if !known {
			continue
		}
		program, name, _ := strings.Cut(t, " ")
		for _, change := range undo(old, rules) {
			args := append([]string{"-w", "-t", name}, change...)
			if out, err := exec.CommandContext(ctx, program, args...).CombinedOutput(); err != nil {
				problems = append(problems, fmt.Errorf("%s %s: %w: %s", program,
					strings.Join(args, " "), err, tail(out)))
			}
		}
	}
	if before.Forward == "0" && now.Forward != "0" {
		problems = append(problems, os.WriteFile(forwardFile, []byte("0"), 0))
	}
	return errors.Join(problems...)
}

// undo returns the arguments of iptables that remove an engine's rules from a table: first the
// rules that jump to its chains, then the chains, then the policy that it set. It keeps rules that
// were there before, and rules that do not belong to an engine.
func undo(before, now []string) [][]string {
	var rules, flushed, removed, policies [][]string
	for _, line := range now {
		if slices.Contains(before, line) {
			continue
		}
		// iptables quotes like a shell, but no rule of an engine contains a word with a space.
		words := strings.Fields(line)
		switch {
		case len(words) == 3 && words[0] == "-P":
			if old := policy(before, words[1]); old != nil {
				policies = append(policies, old)
			}
		case len(words) == 2 && words[0] == "-N" && isDocker(words[1]):
			flushed = append(flushed, []string{"-F", words[1]})
			removed = append(removed, []string{"-X", words[1]})
		case len(words) > 2 && words[0] == "-A" && !isDocker(words[1]) && leadsToDocker(words):
			rules = append(rules, append([]string{"-D"}, words[1:]...))
		}
	}
	return slices.Concat(rules, flushed, removed, policies)
}

func isDocker(chain string) bool { return strings.HasPrefix(chain, "DOCKER") }

func leadsToDocker(rule []string) bool {
	i := slices.Index(rule, "-j")
	return i >= 0 && i+1 < len(rule) && isDocker(rule[i+1])
}

func policy(rules []string, chain string) []string {
	for _, line := range rules {
		if words := strings.Fields(line); len(words) == 3 && words[0] == "-P" && words[1] == chain {
			return words
		}
	}
	return nil
}
