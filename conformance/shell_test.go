//go:build linux

package conformance

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// shellOf writes an executable file with a script, and returns its command.
func shellOf(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shell")
	csitest.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
	return path
}

func TestAHangingShellDoesNotDelayAnInterrupt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	const hangs = 15 * time.Second
	began := time.Now()
	// The process that holds the output open is a child of the shell.
	shell := shellOf(t, fmt.Sprintf("sleep %d & wait", hangs/time.Second))
	got := askShell(ctx, "--second-shell", shell, &oxide.Instance{Name: "b"})
	if took := time.Since(began); got.status != report.Fail || took > hangs/2 {
		t.Errorf("%s after %s", got.status, took)
	}
}

func TestAShellDoesNotGetTheToken(t *testing.T) {
	t.Setenv("OXIDE_TOKEN", "oxide-token-of-the-rack")
	shell := shellOf(t, `echo 0; echo "$OXIDE_TOKEN"`)
	got := askShell(t.Context(), "--second-shell", shell, &oxide.Instance{Name: "b", Id: "b"})
	if got.status != report.Fail || !strings.Contains(got.found, `found ["0"]`) {
		t.Errorf("the shell says %s: %s", got.status, got.found)
	}
}

func TestAShellThatReachesAnotherInstanceLaterChecksNoData(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	p := prepare(t, run, rack, set("OXIDE_CONFORMANCE_SECOND_SHELL", shellOf(t, fmt.Sprintf(
		"case $1 in *agent*) exec %s \"$1\";; esac\nexec %s \"$1\"\n", inside(rack, "a"),
		inside(rack, "b")))), "run", "--yes", "--only", partData)
	p.exit(t, ExitUsage)
	if r := p.report(t); !strings.Contains(r.Why, "--second-shell reaches instance") {
		t.Errorf("%s: %s", r.Verdict, r.Why)
	}
}
