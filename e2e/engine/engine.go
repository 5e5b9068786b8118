// Package engine provides a Docker engine for the end-to-end suite. It uses the engine of
// DOCKER_HOST, or one that already runs on the machine, and does not change it. If there is none,
// it runs its own, with its state in the suite's cache, and stops it at the end; what it has built
// stays for the next run. For that it installs Debian's docker.io if it is missing, so the machine
// has to be a Debian or an Ubuntu, and the user root. It uses no registry.
package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

// Engine is a Docker engine that answers.
type Engine struct {
	// Host is the value of DOCKER_HOST for this engine. Empty means docker's default.
	Host string

	// daemon is our own engine; nil means that the engine belongs to somebody else.
	daemon *daemon
	log    io.Writer
}

// Options configures where our own engine keeps its state, and where it logs.
type Options struct {
	// Root is the project's directory. The wrapper of runc is built from it.
	Root string
	// Cache is the suite's directory for what the next run can reuse.
	Cache string
	// Log gets a line for everything that takes long or changes the machine.
	Log io.Writer
}

// Start returns an engine that answers. If it finds none, it runs one.
func Start(ctx context.Context, o Options) (*Engine, error) {
	found, err := Find(ctx)
	if err == nil && found == nil && missing("docker", "dockerd") {
		if err = installDocker(ctx, o.Log); err == nil {
			// If an init system starts services, the engine of the package runs now.
			found, err = Find(ctx)
		}
	}
	if err != nil {
		return nil, err
	}
	if found != nil {
		fmt.Fprintf(o.Log, "engine: using the Docker engine that runs already%s\n", at(found.Host))
		found.log = o.Log
		return found, found.prepare()
	}
	own := newOwn(o)
	if err := own.prepare(); err != nil {
		return nil, err
	}
	if own.answers(ctx) {
		fmt.Fprintf(o.Log, "engine: using our own that an earlier run has kept%s\n", at(own.Host))
		return own, nil
	}
	began := time.Now()
	if err := own.run(ctx); err != nil {
		return nil, err
	}
	fmt.Fprintf(o.Log, "engine: no Docker engine answers, so one of our own runs%s (%s)\n",
		at(own.Host), time.Since(began).Round(time.Second))
	return own, nil
}

// Find returns the engine of DOCKER_HOST or the one that runs on this machine, or nil if there is
// none. It returns an error if the engine of DOCKER_HOST does not answer.
func Find(ctx context.Context) (*Engine, error) {
	e := &Engine{Host: os.Getenv("DOCKER_HOST"), log: io.Discard}
	if e.answers(ctx) {
		return e, nil
	}
	if e.Host != "" {
		return nil, fmt.Errorf("expected a Docker engine at DOCKER_HOST=%s, and none answers there: "+
			"start it, or unset DOCKER_HOST, so that the suite starts its own", e.Host)
	}
	return nil, nil
}

// Kept returns our own engine of an earlier run, or nil if it was stopped. If it was killed, Kept
// starts it again, because only the engine can end the containers that outlived it.
func Kept(ctx context.Context, o Options) (*Engine, error) {
	e := newOwn(o)
	switch {
	case missing("docker", "dockerd"):
		return nil, nil
	case e.answers(ctx):
		return e, nil
	case !exists(e.daemon.networkFile()):
		return nil, nil
	}
	fmt.Fprintln(o.Log, "engine: our own was killed; running it once more to remove what it left")
	return e, e.run(ctx)
}

func newOwn(o Options) *Engine {
	d := newDaemon(o)
	return &Engine{Host: "unix://" + d.socket(), daemon: d, log: o.Log}
}

func at(host string) string {
	if host == "" {
		return ""
	}
	return " at " + host
}

// answerTime is how long a working engine may take to report its version.
const answerTime = 20 * time.Second

func (e *Engine) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	version, err := e.Output(ctx, "version", "--format", "{{.Server.Version}}")
	return err == nil && version != ""
}

// Own reports whether we run the engine ourselves.
func (e *Engine) Own() bool { return e.daemon != nil }

// Environment returns our environment and what a child needs to reach the engine.
func (e *Engine) Environment() []string {
	environment := os.Environ()
	if e.Host != "" {
		environment = append(environment, "DOCKER_HOST="+e.Host)
	}
	return environment
}

// Command returns a docker command for this engine. It uses the builder that every engine contains,
// because buildx is a separate program that may be missing.
func (e *Engine) Command(ctx context.Context, args ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, "docker", args...)
	command.Env = append(e.Environment(), "DOCKER_BUILDKIT=0")
	// A docker client that gets a signal also ends its work in the engine.
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 10 * time.Second
	return command
}

// Output runs a docker command and returns its output. An error contains the error output.
func (e *Engine) Output(ctx context.Context, args ...string) (string, error) {
	var complaints bytes.Buffer
	command := e.Command(ctx, args...)
	command.Stderr = &complaints
	out, err := command.Output()
	if err != nil {
		return "", fmt.Errorf("docker %s: %w: %s", strings.Join(args, " "), err,
			strings.TrimSpace(complaints.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// prepare sets up what an engine with a cluster needs on the machine.
func (e *Engine) prepare() error {
	return raiseWatchers(e.log, "/proc/sys/fs/inotify/max_user_instances")
}

// Stop stops our own engine and everything that runs on it. Another engine stays as it is.
func (e *Engine) Stop(ctx context.Context) error {
	if e.daemon == nil {
		return nil
	}
	err := e.clear(ctx)
	if stopErr := e.daemon.stop(ctx); stopErr != nil {
		return errors.Join(err, stopErr)
	}
	fmt.Fprintln(e.log, "engine: our own is down")
	return errors.Join(err, unmountBelow(ctx, e.daemon.dir), e.daemon.giveBack(ctx))
}

// clear removes every container and network of our own engine, and the containers' volumes. Of the
// images it removes those that newer ones replaced more than a week ago.
func (e *Engine) clear(ctx context.Context) error {
	containers, err := e.Output(ctx, "ps", "--all", "--quiet")
	if err != nil {
		return fmt.Errorf("look for containers: %w", err)
	}
	if list := strings.Fields(containers); len(list) > 0 {
		fmt.Fprintf(e.log, "engine: removing %d containers\n", len(list))
		remove := append([]string{"rm", "--force", "--volumes"}, list...)
		if _, err := e.Output(ctx, remove...); err != nil {
			return fmt.Errorf("remove containers: %w", err)
		}
	}
	for _, what := range [][]string{{"network"}, {"volume"}, {"image", "--filter", "until=168h"}} {
		prune := append([]string{what[0], "prune", "--force"}, what[1:]...)
		if _, err := e.Output(ctx, prune...); err != nil {
			return fmt.Errorf("remove what earlier runs left: %w", err)
		}
	}
	return nil
}

func missing(programs ...string) bool {
	return slices.ContainsFunc(programs, func(name string) bool {
		_, err := exec.LookPath(name)
		return err != nil
	})
}

// installDocker installs the engine, and its client if that is a separate package.
func installDocker(ctx context.Context, log io.Writer) error {
	if err := Install(ctx, log, "docker.io"); err != nil {
		return err
	}
	if missing("docker") {
		return Install(ctx, log, "docker-cli")
	}
	return nil
}

// Install installs Debian packages if apt-get exists.
func Install(ctx context.Context, log io.Writer, packages ...string) error {
	began := time.Now()
	fmt.Fprintf(log, "engine: installing %s\n", strings.Join(packages, ", "))
	// Another program may be installing: a machine updates itself when it starts.
	install := append([]string{"-o", "DPkg::Lock::Timeout=300", "install", "--yes",
		"--no-install-recommends"}, packages...)
	for _, args := range [][]string{{"update"}, install} {
		command := exec.CommandContext(ctx, "apt-get", args...)
		command.Env = append(os.Environ(), "DEBIAN_FRONTEND=noninteractive")
		if out, err := command.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w: %s", strings.Join(args, " "), err, tail(out))
		}
	}
	fmt.Fprintf(log, "engine: installed %s (%s)\n", strings.Join(packages, ", "),
		time.Since(began).Round(time.Second))
	return nil
}

// tail returns the end of a long output, which contains the reason of a failure.
func tail(output []byte) string {
	const enough = 2000
	output = bytes.TrimSpace(output)
	if len(output) > enough {
		output = output[len(output)-enough:]
	}
	return string(output)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}
