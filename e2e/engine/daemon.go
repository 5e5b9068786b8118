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
	"strconv"
	"strings"
	"syscall"
	"time"
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

// run starts the daemon and waits until it answers.
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
		result <- errors.New("it gave no reason")
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
		fmt.Fprintln(d.log, "engine: this machine lends no CAP_SYS_RESOURCE, so containers ask for none")
	}
	text, err := json.MarshalIndent(settings, "", "  ")
	if err != nil {
		return fmt.Errorf("write the engine's settings: %w", err)
	}
	if err := os.WriteFile(d.configFile(), text, 0o600); err != nil {
		return fmt.Errorf("write the engine's settings: %w", err)
	}
	return nil
}

// wrapper builds the program that runs instead of runc.
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

// tidy ends a daemon of ours that runs but does not answer. It also removes pid files of processes
// that are no longer ours, because dockerd would wait for those processes.
func (d *daemon) tidy(ctx context.Context) error {
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		return fmt.Errorf("make the engine's directory: %w", err)
	}
	if len(d.socket()) > socketPathMax {
		return fmt.Errorf("the engine's socket %s has %d characters, and the kernel takes %d: "+
			"set XDG_CACHE_HOME to a shorter directory", d.socket(), len(d.socket()), socketPathMax)
	}
	if err := d.stop(ctx); err != nil {
		return err
	}
	// containerd is a child of dockerd and may outlive it; the next dockerd takes it over. Keep the
	// other files in its directory: it needs them to find the containers that outlived it.
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

// livingPID returns the process in the pid file if it runs and is ours, and zero otherwise. It is
// ours if its command line names a file of ours.
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
		fmt.Fprintf(e.log, "engine: %s lies on a filesystem that only the storage driver vfs works on: "+
			"everything will be slow and large; set XDG_CACHE_HOME to a directory on ext4 or xfs\n",
			e.daemon.dir)
	}
	return nil
}
