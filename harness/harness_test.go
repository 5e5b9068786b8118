package harness

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func script(t *testing.T, text string, env ...string) *process {
	t.Helper()
	p := Need(startProcess("script", filepath.Join(t.TempDir(), "log"),
		[]string{"/bin/sh", "-c", text}, env))(t)
	t.Cleanup(p.kill)
	return p
}

func firstLine(t *testing.T, p *process) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	return Need(p.firstLine(ctx))(t)
}

func TestStopReportsTheExitCodeAndLogOfAFailedProgram(t *testing.T) {
	for onTERM, want := range map[string]string{"exit 0": "",
		"echo a race >&2; exit 66": "exit status 66; the end of"} {
		p := script(t, "trap '"+onTERM+"' TERM; echo ready; while :; do sleep 0.01; done")
		if line := firstLine(t, p); line != "ready\n" {
			t.Errorf("first line = %q", line)
		}
		err := p.stop()
		if (err == nil) != (want == "") || p.Running() || err != nil &&
			(!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "a race")) {
			t.Errorf("%s: stop = %v, it runs: %t", onTERM, err, p.Running())
		}
	}
}

func TestFirstLineReturnsAnErrorWhenTheProgramOrContextEnds(t *testing.T) {
	p := script(t, `echo cannot work >&2; exit 1`)
	csitest.Says(t, csitest.Err(p.firstLine(t.Context())), "cannot work")
	csitest.Says(t, p.stop(), "exit status 1")
	p = script(t, `exec sleep 60`)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := p.firstLine(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("firstLine = %v, want the deadline", err)
	}
}

func TestProgramsDoNotInheritTheCallersTokenAndEndpoint(t *testing.T) {
	t.Setenv("OXIDE_TOKEN", "oxide-token-of-the-caller")
	t.Setenv("CSI_ENDPOINT", "unix:///of/the/caller.sock")
	p := script(t, `echo "$OXIDE_TOKEN|$CSI_ENDPOINT|$OXIDE_HOST|${PATH:+path}"`,
		"OXIDE_HOST=http://rack")
	if line := firstLine(t, p); line != "||http://rack|path\n" {
		t.Errorf("the program sees %q", line)
	}
}

func TestCatchReportsAWrappedErrorOnlyOnce(t *testing.T) {
	fail := func() (err error) {
		defer Catch(&err)
		_, err = os.Open("/missing")
		Must(Wrap(err, "read %s", "it"))
		return nil
	}
	if got := fmt.Sprint(fail()); got != "read it: open /missing: no such file or directory" {
		t.Errorf("the function returns %s", got)
	}
}

func TestPlainRunsUseProgramsWithoutTheRaceDetector(t *testing.T) {
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

func TestTailOfReturnsOnlyWholeLines(t *testing.T) {
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

func TestCloseKeepsTheDirectoryOfAFailedRun(t *testing.T) {
	var progress strings.Builder
	for _, failed := range []bool{false, true} {
		run := Need(NewRun(&progress))(t)
		t.Cleanup(func() { os.RemoveAll(run.Dir) })
		if failed {
			run.Failed()
		}
		csitest.Must(t, run.Close())
		if _, err := os.Stat(run.Dir); (err == nil) != failed {
			t.Errorf("failed %t: the directory's state is %v", failed, err)
		}
		if strings.Contains(progress.String(), run.Dir) != failed {
			t.Errorf("failed %t: the progress is %q", failed, progress.String())
		}
	}
}

func TestADriverWithoutASimulatedRackGetsOnlyTheGivenVariables(t *testing.T) {
	for _, mode := range []string{ModeAll, ModeController, ModeNode} {
		given := map[string]string{"OXIDE_HOST": "https://rack"}
		plugin := Need((&Run{}).newPlugin(t.TempDir(), new(atomic.Int64),
			PluginOptions{Mode: mode, Env: given}))(t)
		delete(plugin.options.Env, "OXIDE_STATE_DIR")
		if !maps.Equal(plugin.options.Env, given) {
			t.Errorf("mode %s: the driver gets %v", mode, plugin.options.Env)
		}
	}
}

func TestAnErrorWithoutAReasonGetsTheCodeDataLoss(t *testing.T) { // B-8
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	trailer := metadata.Pairs("content-type", "application/grpc")
	ends := func(err error) error { return status.FromContextError(err).Err() }
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
		"a deadline of the server": {t.Context(), trailer, ends(context.DeadlineExceeded),
			codes.DataLoss},
		"a canceled call that the server ends": {canceled, trailer, ends(context.Canceled),
			codes.Canceled},
		"a canceled call that this client ends": {canceled, nil, ends(context.Canceled),
			codes.Canceled},
	} {
		err := ErrorRules(test.ctx, "/csi.v1.Controller/GetCapacity", nil, nil, nil,
			func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn,
				options ...grpc.CallOption) error {
				*options[0].(grpc.TrailerCallOption).TrailerAddr = test.trailer
				return test.answer
			})
		if got := status.Code(err); got != test.want {
			t.Errorf("%s: the error of the call is %v, want the code %v", name, err, test.want)
		}
	}
}

func TestTheDifferenceOfTwoLedgersListsOnlyAddedObjects(t *testing.T) {
	start := Ledger{"disk x": 1, "open file of the driver: pipe": 4, "mount /a": 1}
	now := Ledger{"disk x": 1, "disk y": 1, "open file of the driver: pipe": 6}
	want := []string{"disk y", "open file of the driver: pipe (4 at the start, 6 now)"}
	if diff := cmp.Diff(want, now.More(start)); diff != "" {
		t.Errorf("More (-want +got):\n%s", diff)
	}
}

func TestConnectionsToTheRackAreCountedApartFromOpenFiles(t *testing.T) {
	listener := Need(net.Listen("tcp", "127.0.0.1:0"))(t)
	defer listener.Close()
	conn := Need(net.Dial("tcp", listener.Addr().String()))(t)
	defer conn.Close()
	served := Need(listener.Accept())(t)
	defer served.Close()
	port := netPort("http://" + listener.Addr().String())
	names, connections, err := openFiles(os.Getpid(), port, 0)
	csitest.Must(t, err)
	if connections != 2 {
		t.Errorf("%d connections, want both ends of one: %q", connections, names)
	}
	if want := "listener at " + listener.Addr().String(); !strings.Contains(
		strings.Join(names, "\n"), want) {
		t.Errorf("open files are %q, want %q among them", names, want)
	}
	names, connections, err = openFiles(os.Getpid(), 0, port)
	csitest.Must(t, err)
	if served := served.RemoteAddr().String(); connections != 0 || strings.Contains(
		strings.Join(names, "\n"), "to "+served) {
		t.Errorf("a console's connection from %s is counted: %q, %d connections", served, names,
			connections)
	}
}

func TestAChildThatOutlivesItsProgramIsReported(t *testing.T) {
	// The shell waits until its child runs sleep, because before that the child's name is "sh".
	shell := exec.Command("sh", "-c",
		`sleep 60 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done`)
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	csitest.Must(t, shell.Run())
	p := &process{name: "shell", cmd: shell}
	err := p.noneLeft()
	csitest.Must(t, syscall.Kill(-p.PID(), syscall.SIGKILL))
	csitest.Says(t, err, "shell left running: sleep")
}

func TestGoroutinesAreNamedAfterTheFunctionThatTheyRun(t *testing.T) {
	const profile = `goroutine profile: total 6
2 @ 0x4c5e6e 0x45274f
#	0xb97552	main.serve.func1.2+0x52					/src/main.go:69
#	0x88bca6	golang.org/x/sync/errgroup.(*Group).Go.func1+0x86	/src/errgroup.go:93

1 @ 0x4c5e6e 0x485557
#	0x4c5024	internal/poll.runtime_pollWait+0x84	/src/netpoll.go:351
#	0x867de4	net/http.(*conn).serve+0xe64	/src/server.go:2067

2 @ 0x4c5e6e 0x485557
#	0x4c5024	driver.wait+0x84	/src/driver/wait.go:3

1 @ 0x4c5e6e
#	0x4c5e6d

`
	got, err := goroutinesIn(profile)
	want := []string{"main.serve.func1.2", "main.serve.func1.2",
		"driver.wait", "driver.wait"}
	csitest.Must(t, err)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("goroutines (-want +got):\n%s", diff)
	}
	if got, err := goroutinesIn("404 page not found"); err == nil {
		t.Errorf("goroutines of another page = %q, want an error", got)
	}
}
