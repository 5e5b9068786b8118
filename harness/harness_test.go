package harness

import (
	"context"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func script(t *testing.T, text string, env ...string) *process {
	t.Helper()
	p, err := startProcess("script", filepath.Join(t.TempDir(), "log"),
		[]string{"/bin/sh", "-c", text}, env)
	csitest.Must(t, err)
	t.Cleanup(p.kill)
	return p
}

func firstLine(t *testing.T, p *process) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	line, err := p.firstLine(ctx)
	csitest.Must(t, err)
	return line
}

func TestStopReportsTheExitCodeAndTheLogOfAProgramThatFails(t *testing.T) {
	for onTERM, want := range map[string]string{"exit 0": "",
		"echo a race >&2; exit 66": "exit status 66; the end of"} {
		p := script(t, "trap '"+onTERM+"' TERM; echo ready; while :; do sleep 0.01; done")
		if line := firstLine(t, p); line != "ready\n" {
			t.Errorf("first line = %q", line)
		}
		err := p.stop()
		if (err == nil) != (want == "") || p.running() || err != nil &&
			(!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "a race")) {
			t.Errorf("%s: stop = %v, it runs: %t", onTERM, err, p.running())
		}
	}
}

func TestTheWaitForAFirstLineEndsWithTheProgramOrTheContext(t *testing.T) {
	p := script(t, `echo cannot work >&2; exit 1`)
	if _, err := p.firstLine(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "cannot work") {
		t.Errorf("firstLine = %v, want the log", err)
	}
	if err := p.stop(); err == nil || !strings.Contains(err.Error(), "exit status 1") {
		t.Errorf("stop = %v, want the exit code", err)
	}
	p = script(t, `exec sleep 60`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := p.firstLine(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("firstLine = %v, want the deadline", err)
	}
}

func TestAProgramGetsOnlyTheEnvironmentThatTheHarnessSets(t *testing.T) {
	t.Setenv("OXIDE_TOKEN", "oxide-token-of-the-caller")
	t.Setenv("CSI_ENDPOINT", "unix:///of/the/caller.sock")
	p := script(t, `echo "$OXIDE_TOKEN|$CSI_ENDPOINT|$OXIDE_HOST|${PATH:+path}"`,
		"OXIDE_HOST=http://rack")
	if line := firstLine(t, p); line != "||http://rack|path\n" {
		t.Errorf("the program sees %q", line)
	}
}

func TestOnlyAPlainRunStartsTheProgramsWithoutTheRaceDetector(t *testing.T) {
	t.Setenv(BinaryVariable("oxide-simulator"), "/built/oxide-simulator")
	t.Setenv(PlainVariable, "/built/plain")
	for plain, want := range map[bool]string{false: "/built/oxide-simulator",
		true: "/built/plain/oxide-simulator"} {
		got, err := (&Run{Plain: plain}).Binary(t.Context(), "oxide-simulator")
		if err != nil || got != want {
			t.Errorf("plain: %t: Binary = %s, %v, want %s", plain, got, err, want)
		}
	}
}

func TestTheTailOfALogContainsWholeLinesOnly(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	csitest.Must(t, os.WriteFile(path, []byte("first\nsecond\nthird\n"), 0o600))
	for size, want := range map[int64]string{
		100: "first\nsecond\nthird\n", 10: "third\n", 15: "second\nthird\n",
	} {
		if got := TailOf(path, size); got != want {
			t.Errorf("TailOf %d bytes = %q, want %q", size, got, want)
		}
	}
}

func TestARunKeepsItsDirectoryAfterAFailure(t *testing.T) {
	var progress strings.Builder
	for _, failed := range []bool{false, true} {
		run, err := NewRun(&progress)
		csitest.Must(t, err)
		t.Cleanup(func() { os.RemoveAll(run.Dir) })
		if failed {
			run.Failed()
		}
		if err := run.Close(); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(run.Dir); (err == nil) != failed {
			t.Errorf("failed %t: the directory's state is %v", failed, err)
		}
		if strings.Contains(progress.String(), run.Dir) != failed {
			t.Errorf("failed %t: the progress is %q", failed, progress.String())
		}
	}
}

func TestADriverWithoutASimulatedRackGetsNoFurtherVariables(t *testing.T) {
	for _, mode := range []string{ModeAll, ModeController, ModeNode} {
		given := map[string]string{"OXIDE_HOST": "https://rack"}
		plugin, err := (&Run{}).newPlugin(t.TempDir(), new(atomic.Int64),
			PluginOptions{Mode: mode, Env: given})
		csitest.Must(t, err)
		delete(plugin.options.Env, "OXIDE_STATE_DIR")
		if !maps.Equal(plugin.options.Env, given) {
			t.Errorf("mode %s: the driver gets %v", mode, plugin.options.Env)
		}
	}
}

func TestAnErrorThatBreaksARuleBecomesDataLoss(t *testing.T) { // B-8
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	trailer := metadata.Pairs("content-type", "application/grpc")
	for name, test := range map[string]struct {
		ctx     context.Context
		trailer metadata.MD // an error of the server has one
		answer  error
		want    codes.Code
	}{
		"a reason and a sentence": {t.Context(), trailer,
			status.Error(codes.Internal, "Why: it is so"), codes.Internal},
		"a sentence alone": {t.Context(), trailer,
			status.Error(codes.Internal, "it is so"), codes.DataLoss},
		"a deadline of the server": {t.Context(), trailer,
			status.FromContextError(context.DeadlineExceeded).Err(), codes.DataLoss},
		"a canceled call that the server ends": {canceled, trailer,
			status.FromContextError(context.Canceled).Err(), codes.Canceled},
		"a canceled call that this client ends": {canceled, nil,
			status.FromContextError(context.Canceled).Err(), codes.Canceled},
	} {
		t.Run(name, func(t *testing.T) {
			err := ErrorRules(test.ctx, "/csi.v1.Controller/GetCapacity", nil, nil, nil,
				func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn,
					options ...grpc.CallOption) error {
					*options[0].(grpc.TrailerCallOption).TrailerAddr = test.trailer
					return test.answer
				})
			if got := status.Code(err); got != test.want {
				t.Errorf("the error of the call is %v, want the code %v", err, test.want)
			}
		})
	}
}
