package main

import (
	"errors"
	"strings"
	"testing"
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
		"no engine, but one can be run": {
			change: func(m *machine) { m.docker = false; m.offline = false; without(m, "apt-get") },
		},
		"no engine, but one can be installed": {
			change: func(m *machine) { m.docker = false; without(m, "docker", "dockerd") },
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
		"just enough memory and disk": {
			change: func(m *machine) { m.memory, m.disk = memoryNeeded, diskNeeded },
		},
		"all of it at once is said at once": {
			change: func(m *machine) { *m = machine{} },
			want: [][]string{{"Go toolchain", "install"}, {"as root", "sudo"},
				{"Docker engine", "DOCKER_HOST"}, {"6.0 GiB of available memory", "found 0.0 GiB"},
				{"15.0 GiB free in", "XDG_CACHE_HOME"}, {"loop driver", "modprobe loop"}},
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
