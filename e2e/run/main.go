// Command run prepares a machine for the end-to-end suite, runs the suite, and then removes what it
// has prepared. First it lists what the machine lacks. Then it starts a Docker engine if none
// answers, builds images, runs the suite, and stops an engine that it has started.
//
//	go run ./e2e/run                        with published images
//	go run ./e2e/run -offline               with images that are built here
//	go run ./e2e/run -offline -focus CP-9   only specs with CP-9 in their names
//	KEEP=1 go run ./e2e/run -offline        leaves the cluster running
//	go run ./e2e/run -down                  removes that cluster
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const usage = `Runs the end-to-end suite: prerequisites, a Docker engine, images, specs.

Settings from the environment: KEEP=1 leaves cluster and engine; E2E_REUSE=1 runs specs on a cluster
that was kept; DOCKER_HOST names an engine; XDG_CACHE_HOME is where what is built is kept.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the run cleans up. After the second it ends at once.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "e2e: interrupted:", err)
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) (err error) {
	defer harness.Catch(&err)
	o := harness.Got(parse(args, stdout))
	if missing := harness.Got(inspect(ctx, o)).missing(); len(missing) > 0 && !o.down {
		return fmt.Errorf("this machine cannot run the suite:\n  - %s",
			strings.Join(missing, "\n  - "))
	}
	root := harness.Got(projectRoot(ctx))
	var before images.Previous
	if !o.down {
		found, err := images.FindPrevious(ctx, root, o.previous)
		switch {
		case err != nil && o.previous != previousRelease:
			return err
		case err != nil: // a tree without its git history, such as an archive
			fmt.Fprintf(stdout, "e2e: NO UPGRADE IS TESTED, its spec is skipped: %v\n", err)
		}
		before = found
	}
	unlock := harness.Got(lock(o.cache))
	defer unlock()
	where := engine.Options{Root: root, Cache: o.cache, Log: stdout}
	if o.down {
		return down(ctx, where, stdout)
	}
	docker := harness.Got(engine.Start(ctx, where))
	s := suiteRun{options: o, root: root, before: before, engine: docker, stdout: stdout}
	release := harness.Got(s.claim(ctx))
	defer release()
	err = s.buildAndTest(ctx)
	if o.keep && docker.Own() {
		fmt.Fprintf(stdout, "e2e: kept the engine: export DOCKER_HOST=%s; remove everything with "+
			"go run ./e2e/run -down\n", docker.Host)
		return err
	}
	return errors.Join(err, docker.Stop(context.WithoutCancel(ctx))) // even after an interrupt
}

type options struct {
	offline, down            bool
	focus, label, kubernetes string
	timeout                  time.Duration

	// previous is the tag or commit of the release from which the suite upgrades.
	previous string
	// keep leaves the cluster and the engine running. reuse runs the suite on a cluster that was kept.
	keep, reuse bool
	// cache is the directory in which images and programs are kept for the next run.
	cache string
}

// published is the default Kubernetes version of runs with published images. It has the same minor
// version as offline runs, and kind's release has a node image of it.
const published = "v1.35.8"

// previousRelease is the tag of the last release. As there is none yet, it is a commit that has no
// flight recorder, no doctor, and few of the chart's values.
const previousRelease = "e6877c0dc0dc97bb955365d67faaa05b967e4f0a"

func parse(args []string, output io.Writer) (options, error) {
	o := options{keep: os.Getenv("KEEP") == "1", reuse: os.Getenv("E2E_REUSE") == "1"}
	flags := flag.NewFlagSet("run", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.Usage = func() {
		fmt.Fprint(output, usage)
		flags.PrintDefaults()
	}
	flags.BoolVar(&o.offline, "offline", false,
		"build every image on this machine, from Go modules and Debian's packages")
	flags.StringVar(&o.focus, "focus", "", "run the specs whose text matches this expression")
	flags.StringVar(&o.label, "label", "",
		"run the specs whose labels match this expression (default !long, and every spec with -focus)")
	flags.BoolVar(&o.down, "down", false, "remove what a run with KEEP=1 has left")
	flags.StringVar(&o.kubernetes, "kubernetes", "",
		"version of the nodes (default "+published+", and "+images.Kubernetes+" with -offline)")
	flags.StringVar(&o.previous, "previous", previousRelease,
		"tag or commit of the release that the suite upgrades from, and goes back to")
	flags.DurationVar(&o.timeout, "timeout", time.Hour, "how long the suite may take")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.label == "" && o.focus == "" {
		o.label = "!long"
	}
	if o.kubernetes == "" {
		o.kubernetes = published
		if o.offline {
			o.kubernetes = images.Kubernetes
		}
	}
	switch {
	case flags.NArg() > 0:
		return o, fmt.Errorf("expected only flags, and found %q: choose a spec with -focus",
			flags.Arg(0))
	case o.offline && o.kubernetes != images.Kubernetes:
		return o, fmt.Errorf("expected -kubernetes %s with -offline, and found %s: omit one of the "+
			"flags", images.Kubernetes, o.kubernetes)
	case o.timeout < 2*suiteEnd:
		return o, fmt.Errorf("expected a -timeout of at least %s, since the suite cleans up in the "+
			"last %s, and found %s", 2*suiteEnd, suiteEnd, o.timeout)
	case !strings.HasPrefix(o.kubernetes, "v"):
		return o, fmt.Errorf("expected a version such as %s, and found -kubernetes %s", published,
			o.kubernetes)
	}
	cache, err := os.UserCacheDir() // XDG_CACHE_HOME, or ~/.cache
	o.cache = filepath.Join(cache, "oxide-csi-e2e")
	return o, err
}

// mountedNoDev is the flag of mounts on which device nodes cannot be opened.
const mountedNoDev = 0x4

// workDir creates the rack's directory in the first candidate whose filesystem allows device nodes,
// because the simulated rack creates some there. The filesystem of /tmp often forbids them.
func workDir(candidates []string, flagsOf func(dir string) (int64, error)) (string, error) {
	for _, dir := range candidates {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return "", fmt.Errorf("make the directory for the rack: %w", err)
		}
		flags, err := flagsOf(dir)
		if err != nil {
			return "", err
		}
		if flags&mountedNoDev == 0 {
			return os.MkdirTemp(dir, "oxide-csi-e2e-")
		}
	}
	return "", fmt.Errorf("expected a directory on a filesystem that is mounted without nodev, and "+
		"found none among %s: set TMPDIR to one", strings.Join(candidates, ", "))
}

// Three nodes, a rack and the builds need these resources.
const (
	memoryNeeded = 6 << 30
	diskNeeded   = 15 << 30
)

// machine contains the facts about this machine that decide whether the suite can run.
type machine struct {
	root bool
	// docker reports whether a Docker engine answers. If DOCKER_HOST names an engine that does not
	// answer, dockerProblem is the error.
	docker        bool
	dockerProblem error
	dockerHost    string
	programs      map[string]bool
	// memory is the available memory in bytes. disk is the free space in bytes on the filesystem of
	// the cache. loop reports whether /dev/loop-control exists.
	memory, disk int64
	loop         bool
	cache        string
	offline      bool
}

// missing returns a sentence for each thing that the machine lacks: what the run expected, what it
// found, and what the user can do. An empty list means that the run can begin.
func (m machine) missing() []string {
	var list []string
	add := func(is bool, format string, args ...any) {
		if is {
			list = append(list, fmt.Sprintf(format, args...))
		}
	}
	add(!m.programs["go"], "expected the Go toolchain in the PATH, and found no go: "+
		"install the version that go.mod names")
	add(!m.root, "expected to run as root, and found another user: the nodes are privileged "+
		"containers, and the rack makes loop devices; run it with sudo --preserve-env=PATH,HOME")
	switch scheme, _, _ := strings.Cut(m.dockerHost, "://"); {
	case m.dockerHost != "" && scheme != "unix":
		list = append(list, fmt.Sprintf("expected an engine on this machine, because the nodes get its "+
			"directories and devices, and found DOCKER_HOST=%s: unset it, or name a unix socket",
			m.dockerHost))
	case m.dockerProblem != nil:
		list = append(list, m.dockerProblem.Error())
	default:
		dockerd := m.programs["docker"] && m.programs["dockerd"]
		add(!m.docker && !dockerd && !m.programs["apt-get"],
			"expected a Docker engine that answers, dockerd to run one, or apt-get to install one, "+
				"and found none of them: install Docker, or set DOCKER_HOST")
	}
	add(m.offline && !m.programs["apt-get"], "expected apt-get, because -offline makes root file "+
		"systems of Debian's packages, and found none: run it on Debian or Ubuntu, or without -offline")
	add(m.memory < memoryNeeded, "expected %s of available memory for three nodes and their "+
		"builds, and found %s: end something, or take a larger machine",
		gib(memoryNeeded), gib(m.memory))
	add(m.disk < diskNeeded, "expected %s free in %s, and found %s: make room, or set "+
		"XDG_CACHE_HOME to a directory with more", gib(diskNeeded), m.cache, gib(m.disk))
	add(!m.loop, "expected the loop driver for the rack's disks, and found no /dev/loop-control: "+
		"load it with modprobe loop, or use a kernel that has it")
	return list
}

func gib(bytes int64) string {
	return strconv.FormatFloat(float64(bytes)/(1<<30), 'f', 1, 64) + " GiB"
}

func inspect(ctx context.Context, o options) (machine, error) {
	m := machine{
		root: os.Geteuid() == 0, cache: o.cache, offline: o.offline, programs: map[string]bool{},
		dockerHost: os.Getenv("DOCKER_HOST"),
	}
	for _, name := range []string{"go", "docker", "dockerd", "apt-get"} {
		_, err := exec.LookPath(name)
		m.programs[name] = err == nil
	}
	if m.programs["docker"] {
		found, err := engine.Find(ctx)
		m.docker, m.dockerProblem = found != nil, err
	}
	info, err := os.Stat("/dev/loop-control")
	m.loop = err == nil && info.Mode()&os.ModeCharDevice != 0
	text, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return m, fmt.Errorf("read how much memory there is: %w", err)
	}
	if m.memory, err = available(string(text)); err != nil {
		return m, err
	}
	m.disk, err = free(o.cache)
	return m, err
}

func available(meminfo string) (int64, error) {
	for line := range strings.Lines(meminfo) {
		var kib int64
		if _, err := fmt.Sscanf(line, "MemAvailable: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, errors.New("read how much memory there is: /proc/meminfo has no line MemAvailable")
}
