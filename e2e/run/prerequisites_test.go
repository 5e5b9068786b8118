package main

import (
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// well returns a machine that lacks nothing.
func well() machine {
	return machine{
		root: true, docker: true, loop: true, offline: true, cache: "/cache",
		memory: 16 << 30, disk: 40 << 30,
		programs: map[string]bool{"go": true, "docker": true, "dockerd": true, "apt-get": true},
	}
}

func TestEverythingAMachineLacksIsReportedInOneSentence(t *testing.T) {
	without := func(m *machine, names ...string) {
		for _, name := range names {
			delete(m.programs, name)
		}
	}
	for name, test := range map[string]struct {
		change func(*machine)
		// want contains words of each sentence, in order.
		want [][]string
	}{
		"a machine that lacks nothing": {change: func(*machine) {}},
		"another user than root": {
			change: func(m *machine) { m.root = false },
			want:   [][]string{{"expected to run as root", "sudo"}},
		},
		"no Go": {
			change: func(m *machine) { without(m, "go") },
			want:   [][]string{{"expected the Go toolchain", "install"}},
		},
		"no engine, but one can be run": {
			change: func(m *machine) { m.docker = false; m.offline = false; without(m, "apt-get") },
		},
		"no engine, but one can be installed": {
			change: func(m *machine) { m.docker = false; without(m, "docker", "dockerd") },
		},
		"no engine, and no way to one": {
			change: func(m *machine) {
				m.docker, m.offline = false, false
				without(m, "dockerd", "apt-get")
			},
			want: [][]string{{"expected a Docker engine that answers", "DOCKER_HOST"}},
		},
		"an engine that is named and does not answer": {
			change: func(m *machine) { m.docker = false; m.dockerProblem = errors.New("none answers") },
			want:   [][]string{{"none answers"}},
		},
		"an engine on another machine": {
			change: func(m *machine) { m.dockerHost = "tcp://elsewhere:2375" },
			want:   [][]string{{"expected an engine on this machine", "tcp://elsewhere:2375", "unset"}},
		},
		"an engine that is named by its socket": {
			change: func(m *machine) { m.dockerHost = "unix:///run/docker.sock" },
		},
		"offline without apt": {
			change: func(m *machine) { without(m, "apt-get") },
			want:   [][]string{{"expected apt-get", "without -offline"}},
		},
		"published images without apt": {
			change: func(m *machine) { m.offline = false; without(m, "apt-get") },
		},
		"little memory": {
			change: func(m *machine) { m.memory = 6<<30 - 1<<28 },
			want:   [][]string{{"expected 6.0 GiB of available memory", "found 5.8 GiB"}},
		},
		"just enough memory and disk": {
			change: func(m *machine) { m.memory, m.disk = memoryNeeded, diskNeeded },
		},
		"little disk": {
			change: func(m *machine) { m.disk = 1 << 30 },
			want:   [][]string{{"expected 15.0 GiB free in /cache", "found 1.0 GiB", "XDG_CACHE_HOME"}},
		},
		"no loop driver": {
			change: func(m *machine) { m.loop = false },
			want:   [][]string{{"expected the loop driver", "modprobe loop"}},
		},
		"all of it at once is said at once": {
			change: func(m *machine) { *m = machine{} },
			want: [][]string{{"Go toolchain"}, {"as root"}, {"Docker engine"}, {"memory"}, {"free in"},
				{"loop driver"}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			m := well()
			test.change(&m)
			got := m.missing()
			if len(got) != len(test.want) {
				t.Fatalf("missing() = %q, want %d sentences", got, len(test.want))
			}
			for i, words := range test.want {
				for _, word := range words {
					if !strings.Contains(got[i], word) {
						t.Errorf("missing()[%d] = %q, want %q in it", i, got[i], word)
					}
				}
			}
		})
	}
}

func TestAvailableMemoryIsReadFromTheKernelsTable(t *testing.T) {
	got, err := available("MemTotal: 100 kB\nMemFree: 1 kB\nMemAvailable:   2048 kB\n")
	if err != nil || got != 2<<20 {
		t.Errorf("available = %d, %v, want %d", got, err, 2<<20)
	}
	for _, table := range []string{"", "MemFree: 1 kB\n", "MemAvailable: much kB\n"} {
		if _, err := available(table); err == nil {
			t.Errorf("available(%q) found memory", table)
		}
	}
}

func TestFreeDiskSpaceIsMeasuredWhereTheCacheWillBe(t *testing.T) {
	dir := t.TempDir()
	there, err := free(dir)
	if err != nil || there <= 0 || there == math.MaxInt64 {
		t.Fatalf("free(%s) = %d, %v", dir, there, err)
	}
	if notYet, err := free(filepath.Join(dir, "not", "yet")); err != nil || notYet <= 0 {
		t.Errorf("free of a directory that is not there yet = %d, %v, want its parent's", notYet, err)
	}
	file := filepath.Join(dir, "file")
	csitest.Must(t, os.WriteFile(file, nil, 0o600))
	if _, err := free(filepath.Join(file, "below")); err == nil {
		t.Error("free of a path below a file succeeded")
	}
}

func TestTheFactsAboutThisMachineCanBeRead(t *testing.T) {
	m, err := look(t.Context(), options{cache: t.TempDir()})
	if err != nil || !m.programs["go"] || m.memory == 0 || m.disk == 0 {
		t.Errorf("look = %+v, %v, want a machine with Go, memory and disk", m, err)
	}
}
