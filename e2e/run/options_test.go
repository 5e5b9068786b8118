package main

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// setenv clears the variables that parse() reads, sets HOME, and then sets the pairs of name and
// value.
func setenv(t *testing.T, pairs ...string) {
	for _, name := range []string{"XDG_CACHE_HOME", "KEEP", "E2E_REUSE"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", "/home/me")
	for i := 0; i < len(pairs); i += 2 {
		t.Setenv(pairs[i], pairs[i+1])
	}
}

func TestOptionsAreReadFromFlagsAndEnvironment(t *testing.T) {
	setenv(t, "KEEP", "1")
	got, err := parse([]string{"-offline", "-focus", "CP-9", "-label", "!slow"}, io.Discard)
	want := options{
		offline: true, focus: "CP-9", label: "!slow", kubernetes: images.Kubernetes, keep: true,
		timeout: time.Hour, cache: "/home/me/.cache/oxide-csi-e2e", previous: previousRelease,
	}
	if err != nil || got != want {
		t.Errorf("parse = %+v, %v, want %+v", got, err, want)
	}
	setenv(t, "XDG_CACHE_HOME", "/c")
	other, err := parse([]string{"-kubernetes=v1.36.1"}, io.Discard)
	if err != nil || other.kubernetes != "v1.36.1" || other.cache != "/c/oxide-csi-e2e" {
		t.Errorf("parse = %+v, %v, want v1.36.1 and the cache in /c", other, err)
	}
	plain, err := parse(nil, io.Discard)
	if err != nil || plain.kubernetes != published || plain.label != "!long" {
		t.Errorf("parse = %+v, %v, want %s and no long specs", plain, err, published)
	}
	named, err := parse([]string{"-focus=long"}, io.Discard)
	if err != nil || named.label != "" {
		t.Errorf("parse = %+v, %v, want the specs of the focus, including long ones", named, err)
	}
}

func TestInvalidOptionsOfARunAreRefused(t *testing.T) {
	setenv(t)
	for want, args := range map[string][]string{
		"choose a spec with -focus":                 {"CP-9"},
		"expected -kubernetes " + images.Kubernetes: {"-offline", "-kubernetes=v1.36.1"},
		"a version such as v1.35":                   {"-kubernetes=1.36.1"},
		"the suite cleans up":                       {"-timeout=1m"},
		"not defined":                               {"-on"},
	} {
		if _, err := parse(args, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parse(%q) = %v, want an error with %q", args, err, want)
		}
	}
	setenv(t, "XDG_CACHE_HOME", "cache")
	if _, err := parse(nil, io.Discard); err == nil || !strings.Contains(err.Error(), "relative") {
		t.Errorf("parse with a relative cache = %v, want an error", err)
	}
}

func TestWorkDirSkipsFilesystemsMountedWithNodev(t *testing.T) {
	first, second := filepath.Join(t.TempDir(), "first"), filepath.Join(t.TempDir(), "second")
	flags := map[string]int64{first: mountedNoDev | 1, second: 1}
	flagsOf := func(dir string) (int64, error) { return flags[dir], nil }
	dir, err := workDir([]string{first, second}, flagsOf)
	if err != nil || filepath.Dir(dir) != second {
		t.Fatalf("workDir = %s, %v, want one in %s", dir, err, second)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("workDir's %s: %v", dir, err)
	}
	flags[second] = mountedNoDev
	if _, err := workDir([]string{first, second}, flagsOf); err == nil ||
		!strings.Contains(err.Error(), "nodev") {
		t.Errorf("workDir = %v, want an error that names nodev", err)
	}
	if _, err := mountFlags(t.TempDir()); err != nil {
		t.Errorf("mountFlags: %v", err)
	}
}

func complete() machine {
	return machine{
		root: true, docker: true, loop: true, offline: true, cache: "/cache",
		memory: 16 << 30, disk: 40 << 30,
		programs: map[string]bool{"go": true, "docker": true, "dockerd": true, "apt-get": true},
	}
}

func TestEachMissingPrerequisiteIsReportedInOneSentence(t *testing.T) {
	without := func(m *machine, names ...string) {
		for _, name := range names {
			delete(m.programs, name)
		}
	}
	for name, test := range map[string]struct {
		change func(*machine)
		// want[i] lists texts that the sentence at index i of the result has to contain.
		want [][]string
	}{
		"a machine that lacks nothing": {func(*machine) {}, nil},
		"no engine, but one can be run": {func(m *machine) {
			m.docker, m.offline = false, false
			without(m, "apt-get")
		}, nil},
		"no engine, but one can be installed": {func(m *machine) {
			m.docker = false
			without(m, "docker", "dockerd")
		}, nil},
		"an engine that is named and does not answer": {func(m *machine) {
			m.docker, m.dockerProblem = false, errors.New("none answers")
		}, [][]string{{"none answers"}}},
		"an engine on another machine": {func(m *machine) { m.dockerHost = "tcp://elsewhere:2375" },
			[][]string{{"expected an engine on this machine", "tcp://elsewhere:2375", "unset"}}},
		"an engine that is named by its socket": {
			func(m *machine) { m.dockerHost = "unix:///run/docker.sock" }, nil},
		"offline without apt": {func(m *machine) { without(m, "apt-get") },
			[][]string{{"expected apt-get", "without -offline"}}},
		"just enough memory and disk": {
			func(m *machine) { m.memory, m.disk = memoryNeeded, diskNeeded }, nil},
		"everything": {func(m *machine) { *m = machine{} }, [][]string{
			{"Go toolchain", "install"}, {"as root", "sudo"}, {"Docker engine", "DOCKER_HOST"},
			{"6.0 GiB of available memory", "found 0.0 GiB"}, {"15.0 GiB free in", "XDG_CACHE_HOME"},
			{"loop driver", "modprobe loop"}}},
	} {
		t.Run(name, func(t *testing.T) {
			m := complete()
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

func there() (bool, error)    { return true, nil }
func notThere() (bool, error) { return false, nil }

func refused(t *testing.T, err error, words ...string) {
	t.Helper()
	if err == nil {
		t.Fatalf("the run has the cluster, want an error with %q", words)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("the error lacks %q: %v", word, err)
		}
	}
}

func TestRunsWithDifferentCachesDoNotShareACluster(t *testing.T) {
	dir, note := t.TempDir(), filepath.Join(t.TempDir(), "note")
	release, err := claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", notThere, note)
	csitest.Must(t, err)
	_, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", there, note)
	refused(t, err, "the cluster oxide-csi on the Docker engine engine-1", "/a/oxide-csi-e2e",
		"the process "+strconv.Itoa(os.Getpid()), "wait for it to end")
	other, err := claimCluster(dir, "engine-2", "/b/oxide-csi-e2e", notThere, note)
	if err != nil {
		t.Fatalf("another engine has a cluster of its own: %v", err)
	}
	other()
	release()

	t.Log("the first run has kept its cluster")
	_, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", there, note)
	refused(t, err, "was left by another run", "/a/oxide-csi-e2e", "XDG_CACHE_HOME=/a make e2e-down")
	release, err = claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", there, note)
	if err != nil {
		t.Fatalf("a run with the same cache has its cluster: %v", err)
	}
	release()

	t.Log("the cluster was removed")
	release, err = claimCluster(dir, "engine-1", "/b/oxide-csi-e2e", notThere, note)
	csitest.Must(t, err)
	release()
	_, err = claimCluster(dir, "engine-1", "/a/oxide-csi-e2e", there, note)
	refused(t, err, "/b/oxide-csi-e2e")
}

func TestTwoRunsCannotUseACacheAtTheSameTime(t *testing.T) {
	cache := t.TempDir()
	unlock, err := lock(cache)
	csitest.Must(t, err)
	_, err = lock(cache)
	refused(t, err, "the cache "+cache, "the process "+strconv.Itoa(os.Getpid()))
	unlock()
}

func TestARunRefusesAClusterOfUnknownOrigin(t *testing.T) {
	dir, note := t.TempDir(), filepath.Join(t.TempDir(), "note")
	_, err := claimCluster(dir, "engine", "/a/oxide-csi-e2e", there, note)
	refused(t, err, "no run with the cache /a/oxide-csi-e2e has made it")
	csitest.Must(t, os.WriteFile(note, nil, 0o600))
	release, err := claimCluster(dir, "engine", "/a/oxide-csi-e2e", there, note)
	if err != nil {
		t.Fatalf("the note of this cache is of the cluster: %v", err)
	}
	release()
}
