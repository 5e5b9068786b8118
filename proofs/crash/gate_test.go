//go:build linux

package crash_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// gate is a script that replaces a program. It executes the program in its own process. If the
// directory of the process contains a pipe with the name gate, the script first waits for that
// pipe, so that the program can be watched from its first system call.
const gate = `#!/bin/sh
for arg; do
	case $arg in
	*/sim) dir=${arg%%/sim} ;;
	--endpoint=unix://*) dir=${arg#--endpoint=unix://} dir=${dir%%/csi.sock} ;;
	esac
done
if [ -p "$dir/gate" ]; then
	echo $$ >"$dir/gate.pid.new"
	mv "$dir/gate.pid.new" "$dir/gate.pid"
	read line <"$dir/gate"
fi
exec %s "$@"
`

// putGates replaces both programs of the run by gates.
func putGates(t *testing.T, run *harness.Run) {
	t.Helper()
	for program, variable := range map[string]string{
		"oxide-csi-plugin": "OXIDE_CSI_PLUGIN", "oxide-simulator": "OXIDE_SIMULATOR",
	} {
		path, err := run.Binary(t.Context(), program)
		if err != nil {
			t.Fatal(err)
		}
		script := filepath.Join(run.Dir, program+".gate")
		if err := os.WriteFile(script, fmt.Appendf(nil, gate, path), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv(variable, script)
	}
}

// startWatched starts a process that was killed and watches its start. It may kill the process
// once more.
func (env *environment) startWatched(ctx context.Context, name string, kill *trace.Point) (
	report trace.Report, err error) {
	dir := env.Rack.Dir
	if name != rackProcess {
		dir = env.plugins[name].Dir
	}
	pipe, pidFile := filepath.Join(dir, "gate"), filepath.Join(dir, "gate.pid")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		return report, fmt.Errorf("make a gate: %w", err)
	}
	started := make(chan error, 1)
	go func() { started <- env.process(name).Start(ctx) }()
	var pid int
	err = harness.Await(ctx, patience, func() error {
		text, err := os.ReadFile(pidFile)
		if err == nil {
			pid, err = strconv.Atoi(strings.TrimSpace(string(text)))
		}
		return err
	})
	if err != nil {
		return report, fmt.Errorf("wait for what starts: %w", err)
	}
	if err := env.watcher.Watch(env.order(name, pid, kill)); err != nil {
		return report, err
	}
	err = os.WriteFile(pipe, []byte("go\n"), 0)
	failed := <-started
	report, released := env.watcher.Release()
	err = errors.Join(err, released, os.Remove(pipe), os.Remove(pidFile))
	if report.Killed {
		env.noteKilled(name, pid)
		return report, err
	}
	return report, errors.Join(err, failed)
}
