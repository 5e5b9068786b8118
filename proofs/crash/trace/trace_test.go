//go:build linux

package trace_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

func TestMain(m *testing.M) {
	trace.Main()
	os.Exit(m.Run())
}

// script is a shell, which first waits for a line and then runs commands.
type script struct {
	dir   string
	cmd   *exec.Cmd
	stdin io.WriteCloser
}

func start(t *testing.T, text string) *script {
	t.Helper()
	s := &script{dir: t.TempDir()}
	s.cmd = exec.Command("/bin/sh", "-c", "read line; "+text)
	s.cmd.Dir = s.dir
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	var err error
	if s.stdin, err = s.cmd.StdinPipe(); err == nil {
		err = s.cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *script) watcher(t *testing.T, kill *trace.Point) *trace.Watcher {
	t.Helper()
	w, err := trace.NewWatcher()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	if err := w.Watch(trace.Order{PID: s.cmd.Process.Pid, As: "script", Root: s.dir,
		Kill: kill}); err != nil {
		t.Fatal(err)
	}
	return w
}

func TestAProcessIsPausedBeforeTheChosenSystemCall(t *testing.T) {
	s := start(t, "echo first >first; echo second >second")
	w := s.watcher(t, &trace.Point{Name: "script: openat /second", N: 1, Phase: trace.Before,
		Pause: true})
	during := map[string]bool{}
	report, err := w.ReleaseAtPause(func() {
		_ = s.stdin.Close()
		_ = s.cmd.Wait() // its state shows how it ended
	}, func() { during["first"], during["second"] = s.has("first"), s.has("second") })
	if err != nil {
		t.Fatal(err)
	}
	if !report.Paused || !during["first"] || during["second"] || !s.has("second") {
		t.Fatalf("paused %t, files during the pause %v, second file in the end %t, effects %v",
			report.Paused, during, s.has("second"), report.Effects)
	}
}

func (s *script) watch(t *testing.T, kill *trace.Point) trace.Report {
	t.Helper()
	w := s.watcher(t, kill)
	if err := s.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	_ = s.cmd.Wait() // its state shows how it ended
	report, err := w.Release()
	if err != nil {
		t.Fatal(err)
	}
	return report
}

func (s *script) has(name string) bool {
	_, err := os.Stat(filepath.Join(s.dir, name))
	return !errors.Is(err, fs.ErrNotExist)
}

func TestSystemCallsWithEffectsAreNumberedAndReportedInOrder(t *testing.T) {
	s := start(t, `echo 1 >a; echo 2 >>a; mkdir d; mkdir d; mv a d/b; cat d/b >/dev/null`)
	var names []string
	for _, e := range s.watch(t, nil).Effects {
		name := fmt.Sprintf("%s #%d", e.Name(), e.N)
		if e.Failed {
			name += " failed"
		}
		names = append(names, name)
	}
	want := []string{
		"script: openat /a #1", "script: write /a #1", "script: openat /a #2", "script: write /a #2",
		"script: execve mkdir #1", "mkdir: mkdirat /d #1",
		"script: execve mkdir #2", "mkdir: mkdirat /d #2 failed",
		"script: execve mv #1", "mv: renameat /d/b #1", "script: execve cat #1",
	}
	if !slices.Equal(names, want) {
		t.Errorf("effects:\n%q, want\n%q", names, want)
	}
}

func TestAProcessIsKilledRightBeforeOrRightAfterTheChosenSystemCall(t *testing.T) {
	for _, test := range []struct {
		phase trace.Phase
		name  string
		n     int
		files string // the names of the files that exist at the end
	}{
		{trace.Before, "script: openat /a", 1, ""},
		{trace.After, "script: openat /a", 1, "a"},
		{trace.Before, "script: openat /b", 1, "a"},
		{trace.After, "script: openat /b", 1, "ab"},
		{trace.Before, "script: openat /a", 2, "abc"}, // the script opens a only once
	} {
		s, files := start(t, `: >a; : >b; : >c`), ""
		report := s.watch(t, &trace.Point{Name: test.name, N: test.n, Phase: test.phase})
		for _, name := range []string{"a", "b", "c"} {
			if s.has(name) {
				files += name
			}
		}
		if files != test.files || report.Killed != (files != "abc") ||
			s.cmd.ProcessState.Success() == report.Killed {
			t.Errorf("%s %s #%d: killed %t, %s, the files are %q", test.phase, test.name, test.n,
				report.Killed, s.cmd.ProcessState, files)
		}
	}
}

func TestAChildOfAKilledProcessIsKilledOrReportedAsAnOrphan(t *testing.T) {
	for _, group := range []bool{true, false} {
		s := start(t, `touch a; : >b`)
		report := s.watch(t, &trace.Point{Name: "touch: openat /a", N: 1, Phase: trace.Before,
			Group: group})
		if !report.Killed || s.has("b") {
			t.Errorf("group %t: killed %t, b %t", group, report.Killed, s.has("b"))
		}
		if group {
			if s.has("a") || len(report.Orphans) > 0 {
				t.Errorf("the tool continued: a %t, orphans %q", s.has("a"), report.Orphans)
			}
			continue
		}
		if !slices.Equal(report.Orphans, []string{"touch"}) {
			t.Errorf("orphans %q, want the tool", report.Orphans)
		}
		await(t, func() bool { return s.has("a") })
	}
}

func TestAProcessContinuesAfterItsTracingEnds(t *testing.T) {
	s := start(t, `: >a; read line; : >b`)
	w := s.watcher(t, nil)
	if _, err := io.WriteString(s.stdin, "go\n"); err != nil {
		t.Fatal(err)
	}
	await(t, func() bool { return s.has("a") })
	if report, err := w.Release(); err != nil || len(report.Effects) != 1 {
		t.Errorf("Release = %v, %v, want one effect", report, err)
	}
	if err := s.stdin.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Wait(); err != nil || !s.has("b") {
		t.Errorf("after the release: %v, b %t", err, s.has("b"))
	}
}

func await(t *testing.T, met func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for !met() {
		select {
		case <-ctx.Done():
			t.Fatal("the condition is not met")
		case <-time.After(time.Millisecond):
		}
	}
}
