package main

import (
	"context"
	"io"
	"log"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// identity is a driver whose Probe the test defines.
type identity struct {
	csi.UnimplementedIdentityServer
	probe func(context.Context) (*csi.ProbeResponse, error)
}

func (i *identity) Probe(ctx context.Context, _ *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return i.probe(ctx)
}

func TestTheStatusForTheKubeletFollowsTheDriversProbe(t *testing.T) {
	answer := func(ready *wrapperspb.BoolValue) func(context.Context) (*csi.ProbeResponse, error) {
		return func(context.Context) (*csi.ProbeResponse, error) {
			return &csi.ProbeResponse{Ready: ready}, nil
		}
	}
	for name, test := range map[string]struct {
		probe func(context.Context) (*csi.ProbeResponse, error)
		code  int
		says  string
	}{
		"a driver that is ready is healthy": {answer(wrapperspb.Bool(true)), http.StatusOK,
			"ok"},
		"a driver that says nothing of its readiness is healthy": {answer(nil), http.StatusOK, "ok"},
		"a driver that is not ready yet is not healthy": {answer(wrapperspb.Bool(false)),
			http.StatusInternalServerError, errNotReady.Error()},
		"a driver that refuses is not healthy, and its reason is told": {
			func(context.Context) (*csi.ProbeResponse, error) {
				return nil, status.Error(codes.FailedPrecondition, "no mkfs here")
			}, http.StatusInternalServerError, "no mkfs here"},
		"a driver that hangs is not healthy": {
			func(ctx context.Context) (*csi.ProbeResponse, error) {
				<-ctx.Done()
				return nil, ctx.Err()
			}, http.StatusInternalServerError, "DeadlineExceeded"},
	} {
		t.Run(name, func(t *testing.T) {
			code, body := healthz(t, test.probe)
			if code != test.code || !strings.Contains(body, test.says) {
				t.Errorf("GET /healthz = %d %q, want %d and %q", code, body, test.code, test.says)
			}
		})
	}
}

// healthz sends one request to a stand-in for a driver with this Probe.
func healthz(t *testing.T, probe func(context.Context) (*csi.ProbeResponse, error)) (int, string) {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "csi.sock")
	listener, err := net.Listen("unix", socket)
	csitest.Must(t, err)
	server := grpc.NewServer()
	csi.RegisterIdentityServer(server, &identity{probe: probe})
	go func() { _ = server.Serve(listener) }()
	t.Cleanup(server.Stop)
	driver, err := grpc.NewClient("unix:"+socket,
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	csitest.Must(t, err)
	t.Cleanup(func() { _ = driver.Close() })

	ctx, cancel := context.WithCancel(t.Context())
	web, err := net.Listen("tcp", "127.0.0.1:0")
	csitest.Must(t, err)
	served := make(chan error, 1)
	go func() {
		served <- serve(ctx, web, &prober{
			driver: driver, timeout: 300 * time.Millisecond, log: log.New(io.Discard, "", 0),
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Errorf("serve = %v, want nil after its context ended", err)
		}
	})
	answer, err := http.Get("http://" + web.Addr().String() + "/healthz")
	csitest.Must(t, err)
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	csitest.Must(t, err)
	return answer.StatusCode, string(body)
}
