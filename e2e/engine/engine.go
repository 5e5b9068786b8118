// Package engine provides a Docker engine for the end-to-end suite. If the engine of DOCKER_HOST or
// of this machine answers, the package uses it as it is. Otherwise it runs a dockerd of its own,
// and stops it at the end. This dockerd's files are in the suite's cache, so the next run finds the
// images. If docker is missing, the package installs Debian's docker.io, which requires root on
// Debian or Ubuntu.
package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Engine is a running Docker engine.
type Engine struct {
	// Host is this engine's value of DOCKER_HOST. If it is empty, docker uses its default socket.
	Host string

	// dir is the directory of the dockerd that this package runs, or "" for an engine that Find found.
	// A new dockerd reuses or removes the files that a killed dockerd has left.
	dir, root string
	log       io.Writer
}

// Options configures the dockerd that this package runs.
type Options struct {
	// Root is the project's directory, which contains the source of the wrapper of runc.
	Root string
	// Cache is the directory in which the suite keeps images and programs for its next run.
	Cache string
	// Log gets a line for each change of the machine and for each step that takes long.
	Log io.Writer
}

// Start returns an engine that answers: one that runs already, or a new one.
func Start(ctx context.Context, o Options) (*Engine, error) {
	found, err := Find(ctx)
	if err == nil && found == nil && missing("docker", "dockerd") {
		if err = installDocker(ctx, o.Log); err == nil {
			// On a machine with an init system, the installation of the package has started an engine.
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

// Find returns the engine of DOCKER_HOST or of this machine. If none answers, Find returns an error
// if DOCKER_HOST is set, and otherwise no engine and no error.
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

// Kept returns our dockerd if an earlier run has left it running, and nil if that run stopped it.
// If the dockerd was killed, Kept starts it again: only dockerd can remove its running containers.
func Kept(ctx context.Context, o Options) (*Engine, error) {
	e := newOwn(o)
	switch {
	case missing("docker", "dockerd"):
		return nil, nil
	case e.answers(ctx):
		return e, nil
	case !exists(e.networkFile()):
		return nil, nil
	}
	fmt.Fprintln(o.Log, "engine: our own was killed; running it once more to remove what it left")
	return e, e.run(ctx)
}

func newOwn(o Options) *Engine {
	e := &Engine{dir: filepath.Join(o.Cache, "engine"), root: o.Root, log: o.Log}
	e.Host = "unix://" + e.socket()
	return e
}

func at(host string) string {
	if host == "" {
		return ""
	}
	return " at " + host
}

const answerTime = 20 * time.Second

func (e *Engine) answers(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, answerTime)
	defer cancel()
	version, err := e.Output(ctx, "version", "--format", "{{.Server.Version}}")
	return err == nil && version != ""
}

// Own reports whether this package runs the engine.
func (e *Engine) Own() bool { return e.dir != "" }

// Environment returns this process's environment with the engine's DOCKER_HOST.
func (e *Engine) Environment() []string {
	environment := os.Environ()
	if e.Host != "" {
		environment = append(environment, "DOCKER_HOST="+e.Host)
	}
	return environment
}

// Command returns a docker command for this engine. Builds use the engine's classic builder,
// because the separate program buildx may be missing.
func (e *Engine) Command(ctx context.Context, args ...string) *exec.Cmd {
	command := exec.CommandContext(ctx, "docker", args...)
	command.Env = append(e.Environment(), "DOCKER_BUILDKIT=0")
	// An interrupted docker command also ends its request in the engine.
	command.Cancel = func() error { return command.Process.Signal(os.Interrupt) }
	command.WaitDelay = 10 * time.Second
	return command
}

// Output runs a docker command and returns its output. An error contains its standard error.
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

// Stop stops the dockerd that this package runs, with its containers, and no other engine.
func (e *Engine) Stop(ctx context.Context) error {
	if !e.Own() {
		return nil
	}
	err := e.clear(ctx)
	if stopErr := e.stop(ctx); stopErr != nil {
		return errors.Join(err, stopErr)
	}
	fmt.Fprintln(e.log, "engine: our own is down")
	return errors.Join(err, unmountBelow(ctx, e.dir), e.giveBack(ctx))
}

// clear removes all containers of our dockerd with their volumes, all networks, and untagged images
// that are more than a week old.
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

func installDocker(ctx context.Context, log io.Writer) error {
	if err := Install(ctx, log, "docker.io"); err != nil {
		return err
	}
	if missing("docker") {
		return Install(ctx, log, "docker-cli")
	}
	return nil
}

// Install installs Debian packages.
func Install(ctx context.Context, log io.Writer, packages ...string) error {
	began := time.Now()
	fmt.Fprintf(log, "engine: installing %s\n", strings.Join(packages, ", "))
	// Wait for another apt-get: a machine may install updates when it starts.
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
