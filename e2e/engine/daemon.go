package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

func (e *Engine) file(name string) string { return filepath.Join(e.dir, name) }
func (e *Engine) socket() string          { return e.file("docker.sock") }
func (e *Engine) pidFile() string         { return e.file("pid") }
func (e *Engine) configFile() string      { return e.file("daemon.json") }

// startTime is the time in which a new dockerd has to answer. It is long, because dockerd first
// ends the containers of a dockerd that was killed.
const startTime = 2 * time.Minute

func (e *Engine) run(ctx context.Context) error {
	if err := e.tidy(ctx); err != nil {
		return err
	}
	if err := e.configure(ctx); err != nil {
		return err
	}
	if err := e.remember(ctx); err != nil {
		return err
	}
	ended, err := e.launch()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	for !e.answers(ctx) {
		select {
		case err := <-ended:
			return fmt.Errorf("the Docker engine ended instead of answering: %w; the end of %s:\n%s",
				err, e.file("log"), e.lastLines())
		case <-ctx.Done():
			return errors.Join(fmt.Errorf("the Docker engine does not answer at %s: %w; "+
				"the end of %s:\n%s", e.Host, ctx.Err(), e.file("log"), e.lastLines()),
				e.stop(context.WithoutCancel(ctx)))
		case <-time.After(200 * time.Millisecond):
		}
	}
	if err := e.clear(ctx); err != nil {
		return fmt.Errorf("remove what an earlier run left: %w", err)
	}
	return e.sayDriver(ctx)
}

// launch starts dockerd in its own process session, so that Ctrl-C at the terminal does not reach
// it. This program gets the signal, removes the containers, and then stops dockerd.
func (e *Engine) launch() (ended <-chan error, err error) {
	log, err := os.Create(e.file("log"))
	if err != nil {
		return nil, fmt.Errorf("make the engine's log: %w", err)
	}
	defer log.Close()
	command := exec.Command("dockerd", "--config-file", e.configFile())
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

// configure writes dockerd's settings. They switch off the default bridge, which all engines of a
// machine would share, and which neither kind nor the builds use.
func (e *Engine) configure(ctx context.Context) error {
	settings := map[string]any{
		"data-root": e.file("data"),
		"exec-root": e.file("exec"),
		"pidfile":   e.pidFile(),
		"hosts":     []string{"unix://" + e.socket()},
		"bridge":    "none",
	}
	restricted, err := WithoutSysResource()
	if err != nil {
		return err
	}
	if restricted {
		wrapper, err := e.wrapper(ctx)
		if err != nil {
			return err
		}
		const name = "without-sys-resource"
		settings["default-runtime"] = name
		settings["runtimes"] = map[string]any{name: map[string]string{"path": wrapper}}
		fmt.Fprintln(e.log, "engine: containers run without CAP_SYS_RESOURCE, which this machine lacks")
	}
	text, err := json.MarshalIndent(settings, "", "  ")
	if err == nil {
		err = os.WriteFile(e.configFile(), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write the engine's settings: %w", err)
	}
	return nil
}

func (e *Engine) wrapper(ctx context.Context) (string, error) {
	path := e.file("runc-wrapper")
	command := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", path,
		"./e2e/engine/runc")
	command.Dir = e.root
	command.Env = append(os.Environ(), "CGO_ENABLED=0")
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = time.Minute
	if out, err := command.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the wrapper of runc: %w: %s", err, tail(out))
	}
	return path, nil
}

// tidy stops our dockerd if it runs but does not answer. It also removes a pid file that names
// another program's process: otherwise a new dockerd would wait until that process ends.
func (e *Engine) tidy(ctx context.Context) error {
	if err := os.MkdirAll(e.dir, 0o700); err != nil {
		return fmt.Errorf("make the engine's directory: %w", err)
	}
	if len(e.socket()) > socketPathMax {
		return fmt.Errorf("the engine's socket %s has %d characters, and may have %d: set "+
			"XDG_CACHE_HOME to a shorter directory", e.socket(), len(e.socket()), socketPathMax)
	}
	if err := e.stop(ctx); err != nil {
		return err
	}
	// If the containerd of a killed dockerd still runs, the new dockerd uses it. If not, remove only
	// containerd's pid file: the other files name the containers that still run.
	containerd := e.file("exec/containerd/containerd.pid")
	if pid := livingPID(containerd, e.file("exec/containerd")); pid == 0 {
		if err := os.Remove(containerd); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the pid file of an earlier containerd: %w", err)
		}
	}
	return nil
}

// socketPathMax limits the path of docker.sock, so that the path of containerd's socket, deeper in
// the same directory, has at most the 107 bytes that the kernel allows.
const socketPathMax = 107 - len("exec/containerd/containerd.sock.ttrpc") + len("docker.sock")

func (e *Engine) stop(ctx context.Context) error {
	pid := livingPID(e.pidFile(), e.configFile())
	if pid == 0 {
		if err := os.Remove(e.pidFile()); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("remove the pid file of an earlier engine: %w", err)
		}
		return nil
	}
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("end our engine, process %d: %w", pid, err)
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for names(pid, e.configFile()) {
		select {
		case <-ctx.Done():
			return fmt.Errorf("our engine, process %d, does not end: %w; look at %s and end it by hand",
				pid, ctx.Err(), e.file("log"))
		case <-time.After(100 * time.Millisecond):
		}
	}
	return nil
}

// livingPID returns the process ID in the pid file. It returns zero if that process has ended, or
// if its command line lacks the given path: then another program has the ID.
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

// names reports whether the process's command line contains the path. The command line of a zombie
// is empty.
func names(pid int, path string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(line), path)
}

func (e *Engine) lastLines() string {
	text, err := os.ReadFile(e.file("log"))
	if err != nil {
		return err.Error()
	}
	return tail(text)
}

func (e *Engine) sayDriver(ctx context.Context) error {
	driver, err := e.Output(ctx, "info", "--format", "{{.Driver}}")
	if err != nil {
		return fmt.Errorf("ask the engine for its storage driver: %w", err)
	}
	if driver == "vfs" {
		fmt.Fprintf(e.log, "engine: on the filesystem of %s only the storage driver vfs works, which "+
			"is slow and takes much space; set XDG_CACHE_HOME to a directory on ext4 or xfs\n",
			e.dir)
	}
	return nil
}

const capSysResource = 24

// WithoutSysResource reports whether this process's bounding set lacks CAP_SYS_RESOURCE, so that no
// container on this machine can have it.
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

// watchersNeeded is the number of inotify instances for three nodes. On each node systemd,
// containerd, kubelet and their children use some.
const watchersNeeded = 512

func (e *Engine) prepare() error {
	const file = "/proc/sys/fs/inotify/max_user_instances"
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
	fmt.Fprintf(e.log, "engine: raised fs.inotify.max_user_instances from %d to %d; it stays so\n",
		limit, watchersNeeded)
	return nil
}

const unmountTime = 20 * time.Second

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

// A Docker engine enables packet forwarding and adds filter rules. When it ends, it undoes neither.
// The functions below undo both after our dockerd has ended, if no other engine runs.

type network struct {
	// Rules contains the printed lines of each table. A key is, for example, "iptables nat".
	Rules map[string][]string
	// Forward is the value of net.ipv4.ip_forward.
	Forward string
}

const forwardFile = "/proc/sys/net/ipv4/ip_forward"

// tables lists the tables that an engine changes. An entry is the program that prints the table,
// and the table's name.
var tables = []string{"iptables filter", "iptables nat", "ip6tables filter", "ip6tables nat"}

func (e *Engine) networkFile() string { return e.file("network.json") }

// remember saves the network's state before our dockerd starts. If an earlier dockerd was killed,
// its file still exists. remember keeps that file, because the network now has the rules of the
// killed dockerd.
func (e *Engine) remember(ctx context.Context) error {
	if exists(e.networkFile()) {
		return nil
	}
	text, err := json.MarshalIndent(readNetwork(ctx), "", "  ")
	if err == nil {
		err = os.WriteFile(e.networkFile(), text, 0o600)
	}
	if err != nil {
		return fmt.Errorf("record the network: %w", err)
	}
	return nil
}

func (e *Engine) giveBack(ctx context.Context) error {
	text, err := os.ReadFile(e.networkFile())
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
		fmt.Fprintf(e.log, "engine: another Docker engine runs, process %d: rules of iptables stay\n",
			other)
	} else if err := restore(ctx, before, readNetwork(ctx)); err != nil {
		return err
	}
	return os.Remove(e.networkFile())
}

// otherEngine returns the process ID of a dockerd on this machine, or zero. Our own dockerd has
// ended by now. Even as a zombie it is not found, because a zombie's command line is empty.
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

// readNetwork returns the network's current state, without the tables that iptables cannot print.
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

// undo returns the iptables commands that remove an engine's rules from a table: first the rules
// that jump to the engine's chains, then these chains. The last commands restore the policies.
// Rules that existed before the engine stay, as do rules that do not concern a chain of Docker.
func undo(before, now []string) [][]string {
	var rules, flushed, removed, policies [][]string
	for _, line := range now {
		if slices.Contains(before, line) {
			continue
		}
		// iptables quotes words that contain spaces. The rules of an engine contain no such word.
		words := strings.Fields(line)
		switch {
		case len(words) == 3 && words[0] == "-P":
			for _, old := range before {
				if strings.HasPrefix(old, "-P "+words[1]+" ") {
					policies = append(policies, strings.Fields(old))
				}
			}
		case len(words) == 2 && words[0] == "-N" && isDocker(words[1]):
			flushed = append(flushed, []string{"-F", words[1]})
			removed = append(removed, []string{"-X", words[1]})
		case len(words) > 2 && words[0] == "-A" && !isDocker(words[1]) &&
			strings.Contains(line, " -j DOCKER"):
			rules = append(rules, append([]string{"-D"}, words[1:]...))
		}
	}
	return slices.Concat(rules, flushed, removed, policies)
}

func isDocker(chain string) bool { return strings.HasPrefix(chain, "DOCKER") }
