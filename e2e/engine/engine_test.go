//go:build linux

package engine

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/moby/sys/mountinfo"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestTheEnginesPIDFileIsIgnoredIfItNamesAnotherProcess(t *testing.T) {
	dir := t.TempDir()
	ours := filepath.Join(dir, "daemon.json")
	child := exec.CommandContext(t.Context(), "sh", "-c", "echo; read line", ours)
	hold, err := child.StdinPipe()
	says, errSays := child.StdoutPipe()
	must(t, errors.Join(err, errSays, child.Start()))
	// Wait for sh's output: until the child executes sh, it still has this test's command line.
	if _, err := says.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	pidFile := filepath.Join(dir, "pid")
	pid := func(text string) int {
		must(t, os.WriteFile(pidFile, []byte(text), 0o600))
		return livingPID(pidFile, ours)
	}
	if got := pid(fmt.Sprintln(child.Process.Pid)); got != child.Process.Pid {
		t.Errorf("the pid of our process is read as %d, want %d", got, child.Process.Pid)
	}
	// After the machine has restarted, the process ID belongs to another program: here, to this test.
	if got := pid(fmt.Sprint(os.Getpid())); got != 0 {
		t.Errorf("the process of another is read as ours: %d", got)
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

func TestADockerHostThatDoesNotAnswerIsAnError(t *testing.T) {
	t.Setenv("DOCKER_HOST", "unix://"+filepath.Join(t.TempDir(), "none.sock"))
	found, err := Find(t.Context())
	if err == nil || !strings.Contains(err.Error(), "DOCKER_HOST") {
		t.Errorf("Find = %v, %v, want an error that names DOCKER_HOST", found, err)
	}
}

func TestOnlyTheFirewallRulesOfAnEngineAreUndone(t *testing.T) {
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

func TestTheNetworkStateOfAnEarlierRunIsNotOverwritten(t *testing.T) {
	e := newOwn(Options{Cache: t.TempDir(), Log: &strings.Builder{}})
	must(t, os.MkdirAll(e.dir, 0o700))
	const first = `{"Rules":{"iptables nat":["-P INPUT ACCEPT"]},"Forward":"0"}`
	must(t, os.WriteFile(e.file("network.json"), []byte(first), 0o600))
	must(t, e.remember(t.Context()))
	got, err := os.ReadFile(e.file("network.json"))
	if err != nil || string(got) != first {
		t.Errorf("a second engine wrote %s, %v over what the first had written", got, err)
	}
}

func TestBothMountsAtOnePathAreUnmounted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can mount: run the tests as root, as make test does")
	}
	dir := t.TempDir()
	inner := filepath.Join(dir, "outer", "inner")
	// Mount twice at one path: two engines that were killed can leave such mounts.
	for _, path := range []string{filepath.Dir(inner), inner, inner} {
		must(t, os.MkdirAll(path, 0o755))
		must(t, syscall.Mount("none", path, "tmpfs", 0, ""))
	}
	must(t, unmountBelow(t.Context(), dir))
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil || len(left) != 0 {
		t.Errorf("after unmountBelow there are %d mounts, %v", len(left), err)
	}
}
