package main

import (
	"bytes"
	"context"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/testing/protocmp"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// identity is a driver that starts late: it returns its name from the second call on.
type identity struct {
	csi.UnimplementedIdentityServer
	name  string
	calls int
}

func (i *identity) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (
	*csi.GetPluginInfoResponse, error) {
	i.calls++
	if i.calls == 1 {
		return &csi.GetPluginInfoResponse{}, nil
	}
	return &csi.GetPluginInfoResponse{Name: i.name}, nil
}

// node is a stand-in that starts before its driver, and the kubelet's end of the connection.
type node struct {
	kubelet registration.RegistrationClient
	health  string
	socket  string
	log     *bytes.Buffer
	ended   chan error
	stop    context.CancelFunc
}

func newNode(t *testing.T) *node {
	t.Helper()
	dir := t.TempDir()
	listener, err := net.Listen("unix", filepath.Join(dir, "csi.sock"))
	csitest.Must(t, err)
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, &identity{name: "csi.example"})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)

	// The port is free after Close, and no other process of this machine is likely to take it at
	// once.
	free, err := net.Listen("tcp", "127.0.0.1:0")
	csitest.Must(t, err)
	n := &node{
		health: free.Addr().String(), log: &bytes.Buffer{}, ended: make(chan error, 1),
		socket: filepath.Join(dir, "csi.example-reg.sock"),
	}
	_ = free.Close()
	// A registrar that was killed leaves its socket.
	csitest.Must(t, os.WriteFile(n.socket, nil, 0o600))
	ctx, stop := context.WithCancel(t.Context())
	n.stop = stop
	t.Cleanup(stop)
	go func() {
		n.ended <- run(ctx, []string{
			"--csi-address=" + filepath.Join(dir, "csi.sock"),
			"--kubelet-registration-path=/var/lib/kubelet/plugins/csi.example/csi.sock",
			"--plugin-registration-path=" + dir,
			"--http-endpoint=" + n.health,
			"--timeout=200ms", "--v=5",
		}, n.log)
	}()
	connection, err := grpc.NewClient("unix:"+n.socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: time.Second}))
	csitest.Must(t, err)
	t.Cleanup(func() { _ = connection.Close() })
	n.kubelet = registration.NewRegistrationClient(connection)
	return n
}

// info asks for the driver as the kubelet does when it sees the socket.
func (n *node) info(t *testing.T) *registration.PluginInfo {
	t.Helper()
	info, err := n.kubelet.GetInfo(t.Context(), &registration.InfoRequest{},
		grpc.WaitForReady(true))
	csitest.Must(t, err)
	return info
}

func TestTheRegistrarReportsTheDriverToTheKubelet(t *testing.T) {
	n := newNode(t)
	want := &registration.PluginInfo{
		Type: "CSIPlugin", Name: "csi.example",
		Endpoint:          "/var/lib/kubelet/plugins/csi.example/csi.sock",
		SupportedVersions: []string{"1.0.0"},
	}
	if diff := cmp.Diff(want, n.info(t), protocmp.Transform()); diff != "" {
		t.Errorf("GetInfo (-want +got):\n%s", diff)
	}
	if _, err := n.kubelet.NotifyRegistrationStatus(t.Context(),
		&registration.RegistrationStatus{PluginRegistered: true}); err != nil {
		t.Fatal(err)
	}
	if code := n.healthz(t); code != http.StatusOK {
		t.Errorf("GET /healthz = %d while the socket is there, want 200", code)
	}
	csitest.Must(t, os.Remove(n.socket))
	if code := n.healthz(t); code != http.StatusInternalServerError {
		t.Errorf("GET /healthz = %d after the socket is gone, want 500", code)
	}
	n.stop()
	if err := <-n.ended; err != nil {
		t.Errorf("run = %v after it was told to end, want nil", err)
	}
	if said := n.log.String(); !strings.Contains(said, "does not answer yet") ||
		!strings.Contains(said, "registered csi.example") {
		t.Errorf("the log says %q, want the driver's late start and its registration", said)
	}
}

func TestADriverThatTheKubeletRefusesIsAnError(t *testing.T) {
	n := newNode(t)
	n.info(t)
	if _, err := n.kubelet.NotifyRegistrationStatus(t.Context(),
		&registration.RegistrationStatus{Error: "name is taken"}); err != nil {
		t.Fatal(err)
	}
	if err := <-n.ended; err == nil || !strings.Contains(err.Error(), "name is taken") {
		t.Errorf("run = %v, want the kubelet's reason", err)
	}
}

func (n *node) healthz(t *testing.T) int {
	t.Helper()
	answer, err := http.Get("http://" + n.health + "/healthz")
	csitest.Must(t, err)
	defer answer.Body.Close()
	return answer.StatusCode
}
