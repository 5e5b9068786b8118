package harness

import (
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestMoreListsTheAdditionsToALedger(t *testing.T) {
	start := Ledger{"disk x": 1, "open file of the driver: pipe": 4, "mount /a": 1}
	now := Ledger{"disk x": 1, "disk y": 1, "open file of the driver: pipe": 6}
	want := []string{"disk y", "open file of the driver: pipe (4 at the start, 6 now)"}
	if diff := cmp.Diff(want, now.More(start)); diff != "" {
		t.Errorf("More (-want +got):\n%s", diff)
	}
}

func TestOpenFilesCountsConnectionsToTheRackSeparately(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	csitest.Must(t, err)
	defer listener.Close()
	conn, err := net.Dial("tcp", listener.Addr().String())
	csitest.Must(t, err)
	defer conn.Close()
	served, err := listener.Accept()
	csitest.Must(t, err)
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

func TestNoneLeftNamesAChildThatOutlivesItsProcess(t *testing.T) {
	// The child is a shell, too, until it executes sleep. The parent waits for this and then ends.
	shell := exec.Command("sh", "-c",
		`sleep 60 & until [ "$(cat /proc/$!/comm)" = sleep ]; do :; done`)
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	csitest.Must(t, shell.Run())
	p := &process{name: "shell", cmd: shell}
	err := p.noneLeft()
	if killed := syscall.Kill(-p.pid(), syscall.SIGKILL); killed != nil {
		t.Fatal(killed)
	}
	if err == nil || !strings.Contains(err.Error(), "shell left running: sleep") {
		t.Errorf("noneLeft = %v, want the sleep named", err)
	}
}

func TestAGoroutineIsNamedByTheFunctionWithWhichItWasStarted(t *testing.T) {
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
