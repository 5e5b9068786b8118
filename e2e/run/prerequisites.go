package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

// The resources that three nodes, a rack and the builds need.
const (
	memoryNeeded = 6 << 30
	diskNeeded   = 15 << 30
)

// machine contains the facts about a machine that decide whether the suite can run.
type machine struct {
	root bool
	// docker reports whether an engine answers. dockerProblem explains why the engine of DOCKER_HOST
	// does not answer.
	docker        bool
	dockerProblem error
	// dockerHost is the value of DOCKER_HOST.
	dockerHost string
	// programs reports which of the needed programs exist.
	programs map[string]bool
	// memory and disk are free bytes, and loop is the control device of the loop driver.
	memory, disk int64
	loop         bool
	// cache is the directory in which disk was measured.
	cache   string
	offline bool
}

// missing lists what the machine lacks, one sentence each: what was expected, what was found, what
// to do. The run can begin if the list is empty.
func (m machine) missing() []string {
	var list []string
	add := func(is bool, format string, args ...any) {
		if is {
			list = append(list, fmt.Sprintf(format, args...))
		}
	}
	add(!m.programs["go"], "expected the Go toolchain in the PATH, and found no go: "+
		"install the version that go.mod names")
	add(!m.root, "expected to run as root, and this is another user: the nodes are privileged "+
		"containers, and the rack makes loop devices; run it with sudo --preserve-env=PATH,HOME")
	switch scheme, _, _ := strings.Cut(m.dockerHost, "://"); {
	case m.dockerHost != "" && scheme != "unix":
		list = append(list, fmt.Sprintf("expected an engine on this machine, whose directories and "+
			"devices the nodes get, and found DOCKER_HOST=%s: unset it, or name a unix socket",
			m.dockerHost))
	case m.dockerProblem != nil:
		list = append(list, m.dockerProblem.Error())
	default:
		dockerd := m.programs["docker"] && m.programs["dockerd"]
		add(!m.docker && !dockerd && !m.programs["apt-get"],
			"expected a Docker engine that answers, dockerd to run one, or apt-get to install one, "+
				"and found none of them: install Docker, or set DOCKER_HOST")
	}
	add(m.offline && !m.programs["apt-get"], "expected apt-get, since -offline makes root file "+
		"systems of Debian's packages, and found none: run it on a Debian or an Ubuntu, or without "+
		"-offline")
	add(m.memory < memoryNeeded, "expected %s of available memory for three nodes and their "+
		"builds, and found %s: end something, or take a larger machine",
		gib(memoryNeeded), gib(m.memory))
	add(m.disk < diskNeeded, "expected %s free in %s, and found %s: make room, or set "+
		"XDG_CACHE_HOME to a directory with more", gib(diskNeeded), m.cache, gib(m.disk))
	add(!m.loop, "expected the loop driver, which the rack's disks are made with, and found no "+
		"/dev/loop-control: load it with modprobe loop, or take a kernel that has it")
	return list
}

// gib formats a size for people.
func gib(bytes int64) string {
	return strconv.FormatFloat(float64(bytes)/(1<<30), 'f', 1, 64) + " GiB"
}

// look collects the facts about this machine.
func look(ctx context.Context, o options) (machine, error) {
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

// available returns the memory that is available without swapping, from /proc/meminfo.
func available(meminfo string) (int64, error) {
	lines := bufio.NewScanner(strings.NewReader(meminfo))
	for lines.Scan() {
		if words := strings.Fields(lines.Text()); len(words) == 3 && words[0] == "MemAvailable:" {
			kib, err := strconv.ParseInt(words[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read how much memory there is: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, errors.New("read how much memory there is: /proc/meminfo has no line MemAvailable")
}
