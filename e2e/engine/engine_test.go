package engine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestTheBoundingSetOfCapabilitiesIsRead(t *testing.T) {
	const restricted = "Name:\tcat\nCapEff:\t000001ffffffffff\nCapBnd:\t000001fffeffffff\nCapAmb:\t0\n"
	for name, test := range map[string]struct {
		status string
		want   bool
	}{
		"a machine that lends everything": {"CapBnd:\t000001ffffffffff\n", true},
		"a machine that lacks one":        {restricted, false},
	} {
		t.Run(name, func(t *testing.T) {
			set, err := boundingSet(test.status)
			if got := set&(1<<capSysResource) != 0; err != nil || got != test.want {
				t.Errorf("boundingSet(%q) = %x, %v: CAP_SYS_RESOURCE %v, want %v", test.status, set,
					err, got, test.want)
			}
		})
	}
	for _, none := range []string{"", "CapEff:\t1\n", "CapBnd:\tmany\n"} {
		if _, err := boundingSet(none); err == nil {
			t.Errorf("boundingSet(%q) found a set", none)
		}
	}
	if _, err := WithoutSysResource(); err != nil {
		t.Errorf("WithoutSysResource on this machine: %v", err)
	}
}

func TestTheLimitOfWatchersIsRaisedOnlyIfItIsTooLow(t *testing.T) {
	for _, test := range []struct {
		before, after string
		says          bool
	}{
		{"128\n", "512", true}, {"512\n", "512\n", false}, {"8192\n", "8192\n", false},
	} {
		file := filepath.Join(t.TempDir(), "max_user_instances")
		if err := os.WriteFile(file, []byte(test.before), 0o600); err != nil {
			t.Fatal(err)
		}
		var log strings.Builder
		if err := raiseWatchers(&log, file); err != nil {
			t.Fatal(err)
		}
		after, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if said := log.Len() > 0; string(after) != test.after || said != test.says {
			t.Errorf("from %q it became %q and said %q, want %q", test.before, after, log.String(),
				test.after)
		}
	}
}

func TestAPidFileCountsOnlyIfItsProcessIsOurs(t *testing.T) {
	dir := t.TempDir()
	ours := filepath.Join(dir, "daemon.json")
	child := exec.CommandContext(t.Context(), "sh", "-c", "echo; read line", ours)
	hold, err := child.StdinPipe()
	says, errSays := child.StdoutPipe()
	if err := errors.Join(err, errSays, child.Start()); err != nil {
		t.Fatal(err)
	}
	// The kernel shows a command line shortly after the process has begun.
	if _, err := says.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(dir, "pid")
	pid := func(text string) int {
		if err := os.WriteFile(pidFile, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return livingPID(pidFile, ours)
	}
	if got := pid(fmt.Sprintln(child.Process.Pid)); got != child.Process.Pid {
		t.Errorf("the pid of our process is read as %d, want %d", got, child.Process.Pid)
	}
	// After a restart of the machine the number belongs to another process, here to this test.
	if got := pid(fmt.Sprint(os.Getpid())); got != 0 {
		t.Errorf("a process that is not ours is taken for ours: %d", got)
	}
	for _, nonsense := range []string{"", "x", "-1", "1"} {
		if got := pid(nonsense); got != 0 {
			t.Errorf("a pid file with %q is read as %d, want none", nonsense, got)
		}
	}
	_ = hold.Close()
	_ = child.Wait()
	if got := pid(fmt.Sprint(child.Process.Pid)); got != 0 {
		t.Errorf("a process that has ended is taken for ours: %d", got)
	}
	if got := livingPID(filepath.Join(dir, "none"), ours); got != 0 {
		t.Errorf("without a pid file there is %d", got)
	}
}

func TestAStalePidFileIsRemovedBeforeTheStart(t *testing.T) {
	cache := filepath.Join("/tmp", fmt.Sprintf("engine-test-%d", os.Getpid()))
	t.Cleanup(func() { _ = os.RemoveAll(cache) })
	d := newDaemon(Options{Cache: cache, Log: &strings.Builder{}})
	stale := filepath.Join(cache, "engine", "exec", "containerd", "containerd.pid")
	for _, file := range []string{d.pidFile(), stale} {
		if err := os.MkdirAll(filepath.Dir(file), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(fmt.Sprint(os.Getpid())), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.tidy(t.Context()); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{d.pidFile(), stale} {
		if _, err := os.Stat(file); err == nil {
			t.Errorf("%s names a process that is not the engine's, and is still there", file)
		}
	}
}

func TestACachePathTooLongForASocketIsReported(t *testing.T) {
	d := newDaemon(Options{Cache: filepath.Join(t.TempDir(), strings.Repeat("d", 100))})
	err := d.tidy(t.Context())
	if err == nil || !strings.Contains(err.Error(), "XDG_CACHE_HOME") {
		t.Errorf("tidy = %v, want a sentence that says what to set", err)
	}
}

func TestAnEngineInDockerHostThatDoesNotAnswerIsAnError(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix://"+filepath.Join(t.TempDir(), "none.sock"))
	found, err := Find(t.Context())
	if err == nil || !strings.Contains(err.Error(), "DOCKER_HOST") {
		t.Errorf("Find = %v, %v, want an error that names DOCKER_HOST", found, err)
	}
}

func TestOnlyTheRulesOfAnEngineAreRemovedFromATable(t *testing.T) {
	fresh := []string{"-P INPUT ACCEPT", "-P FORWARD ACCEPT", "-P OUTPUT ACCEPT"}
	used := []string{
		"-P INPUT ACCEPT", "-P FORWARD DROP", "-P OUTPUT ACCEPT",
		"-N DOCKER", "-N DOCKER-USER", "-N MINE",
		"-A FORWARD -j DOCKER-USER",
		"-A FORWARD -o br-1 -j DOCKER",
		"-A FORWARD -j MINE",
		"-A OUTPUT ! -d 127.0.0.0/8 -m addrtype --dst-type LOCAL -j DOCKER",
		"-A DOCKER-USER -j RETURN",
	}
	for name, test := range map[string]struct {
		before, now []string
		want        [][]string
	}{
		"rules first, then chains, then the policy": {
			before: fresh, now: used,
			want: [][]string{
				{"-D", "FORWARD", "-j", "DOCKER-USER"},
				{"-D", "FORWARD", "-o", "br-1", "-j", "DOCKER"},
				{"-D", "OUTPUT", "!", "-d", "127.0.0.0/8", "-m", "addrtype", "--dst-type", "LOCAL",
					"-j", "DOCKER"},
				{"-F", "DOCKER"}, {"-F", "DOCKER-USER"},
				{"-X", "DOCKER"}, {"-X", "DOCKER-USER"},
				{"-P", "FORWARD", "ACCEPT"},
			},
		},
		"what was there before stays": {before: used, now: used},
		"nothing was added":           {before: fresh, now: fresh},
		"rules that are not an engine's stay": {
			before: fresh, now: append([]string{"-A FORWARD -j MINE"}, fresh...),
		},
	} {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(test.want, undo(test.before, test.now)); diff != "" {
				t.Errorf("undo (-want +got):\n%s", diff)
			}
		})
	}
}

func TestTheNetworkIsRecordedOnlyOnce(t *testing.T) {
	d := newDaemon(Options{Cache: t.TempDir(), Log: &strings.Builder{}})
	if err := os.MkdirAll(d.dir, 0o700); err != nil {
		t.Fatal(err)
	}
	const first = `{"Rules":{"iptables nat":["-P INPUT ACCEPT"]},"Forward":"0"}`
	if err := os.WriteFile(d.file("network.json"), []byte(first), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.remember(t.Context()); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(d.file("network.json"))
	if err != nil || string(got) != first {
		t.Errorf("a second engine wrote %s, %v over what the first had written", got, err)
	}
}
