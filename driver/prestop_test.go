package driver

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// leaving listens at a socket, as the program beside a node's driver does.
func leaving(t *testing.T) (listener net.Listener, socket string) {
	t.Helper()
	socket = filepath.Join(shortDir(t), "leave.sock")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	return listener, socket
}

// prestop runs the program, which says both what it prints and what is wrong.
func prestop(ctx context.Context, socket string, args ...string) (status int, says string) {
	var said bytes.Buffer
	status = Main(ctx, append([]string{"prestop"}, args...), goodEnv(map[string]string{
		"OXIDE_LEAVE_SOCKET": socket}), &said, &said)
	return status, said.String()
}

// ended is how a prestop in the background ended.
type ended struct {
	status int
	says   string
}

func prestopping(ctx context.Context, socket string, args ...string) <-chan ended {
	result := make(chan ended, 1)
	go func() {
		status, says := prestop(ctx, socket, args...)
		result <- ended{status, says}
	}()
	return result
}

func TestPrestopWaitsUntilTheConnectionIsClosed(t *testing.T) {
	listener, socket := leaving(t)
	result := prestopping(t.Context(), socket)
	conn, err := listener.Accept()
	must(t, err)
	// What the other end writes is not the end.
	_, err = conn.Write([]byte("two volumes left\n"))
	must(t, err)
	select {
	case got := <-result:
		t.Errorf("it has not waited: %+v", got)
	case <-time.After(50 * time.Millisecond):
	}
	must(t, conn.Close())
	if got := <-result; got != (ended{}) {
		t.Errorf("got %+v, want status 0 and nothing said", got)
	}
}

func TestPrestopEndsAtOnceWhereNobodyServes(t *testing.T) {
	listener, socket := leaving(t)
	left := filepath.Join(filepath.Dir(socket), "left.sock")
	must(t, os.Rename(socket, left)) // closing the listener does not find it there
	must(t, listener.Close())
	for what, path := range map[string]string{"a socket that was left": left, "no socket": socket} {
		status, says := prestop(t.Context(), path)
		if status != 0 || !strings.Contains(says, "no program serves at OXIDE_LEAVE_SOCKET") {
			t.Errorf("%s: status %d, %q", what, status, says)
		}
	}
}

func TestPrestopDoesNotWaitForever(t *testing.T) {
	_, socket := leaving(t) // connections are made, and nobody takes them
	status, says := prestop(t.Context(), socket, "--timeout=20ms")
	if status != 1 || !strings.Contains(says, "has not closed the connection within 20ms") {
		t.Errorf("status %d, %q", status, says)
	}
	ctx, cancel := context.WithCancel(t.Context())
	result := prestopping(ctx, socket)
	cancel()
	if got := <-result; got.status != 1 || !strings.Contains(got.says, "context canceled") {
		t.Errorf("canceled, it ends with %+v", got)
	}
}

func TestPrestopRefusesWhatItCannotUse(t *testing.T) {
	for _, test := range []struct {
		socket string
		args   []string
		want   string
	}{
		{"", nil, "OXIDE_LEAVE_SOCKET (--leave-socket) is not set"},
		{"leave.sock", nil, "has to be an absolute path"},
		{"/leave.sock", []string{"--timeout=0s"}, "--timeout has to be positive"},
		{"/leave.sock", []string{"now"}, "expected flags only"},
	} {
		status, says := prestop(t.Context(), test.socket, test.args...)
		if status != 1 || !strings.Contains(says, test.want) {
			t.Errorf("%q %q: status %d, %q; want %q", test.socket, test.args, status, says, test.want)
		}
	}
}

// readiness is what `ready` says of the plugin at an endpoint.
func readiness(t *testing.T, endpoint string) (status int, says string) {
	t.Helper()
	var said bytes.Buffer
	status = Main(t.Context(), []string{"ready"},
		goodEnv(map[string]string{"CSI_ENDPOINT": endpoint}), io.Discard, &said)
	return status, said.String()
}

func probeAt(t *testing.T, endpoint string) (*csi.ProbeResponse, error) {
	t.Helper()
	conn, err := grpc.NewClient(endpoint, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer func() { _ = conn.Close() }()
	return csi.NewIdentityClient(conn).Probe(t.Context(), &csi.ProbeRequest{})
}

func TestAnEndpointWhereNoPluginServesIsNotReady(t *testing.T) {
	for endpoint, want := range map[string]string{
		"":                                     "CSI_ENDPOINT",
		"tcp://127.0.0.1:1":                    "unix:///path/name.sock",
		"unix://" + t.TempDir() + "/none.sock": "no plugin serves at CSI_ENDPOINT",
	} {
		if status, says := readiness(t, endpoint); status != 1 || !strings.Contains(says, want) {
			t.Errorf("%q: status %d, %q; want %q", endpoint, status, says, want)
		}
	}
}
