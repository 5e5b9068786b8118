// Command sidecar replaces two sidecars in the offline cluster. Called livenessprobe, it answers
// kubelet's HTTP probes by calling the driver's Probe. Called node-driver-registrar, it registers
// the driver at the node's kubelet. It accepts the flags in the manifests.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[0], os.Args[1:])
	stop()
	if err != nil {
		log.Fatalf("%s: %v", os.Args[0], err)
	}
}

func run(ctx context.Context, name string, args []string) error {
	flags := flag.NewFlagSet(name, flag.ContinueOnError)
	address := flags.String("csi-address", "/run/csi/socket", "the driver's socket")
	listen := flags.String("http-endpoint", ":9808", "address to answer the kubelet's probes at")
	timeout := flags.Duration("probe-timeout", time.Second, "how long a call of the driver may take")
	endpoint := flags.String("kubelet-registration-path", "",
		"the driver's socket as the kubelet sees it")
	flags.Int("v", 0, "accepted and without effect")
	if err := flags.Parse(args); err != nil {
		return err
	}
	connection, err := grpc.NewClient("unix:"+strings.TrimPrefix(*address, "unix://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the driver at %s: %w", *address, err)
	}
	defer connection.Close()
	d := driver{csi.NewIdentityClient(connection), *timeout}
	if filepath.Base(name) == "livenessprobe" {
		return answer(ctx, *listen, d.probe)
	}
	return register(ctx, d, *endpoint, *listen)
}

func answer(ctx context.Context, listen string, check func(context.Context) error) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := check(r.Context()); err != nil {
			log.Printf("probe failed: %v", err)
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write([]byte("ok"))
	})
	server := &http.Server{Addr: listen, Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	defer context.AfterFunc(ctx, func() { _ = server.Close() })()
	if err := server.ListenAndServe(); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

type driver struct {
	csi.IdentityClient
	timeout time.Duration
}

// probe calls Probe once. In CSI, an answer without the field ready means that the driver is ready.
func (d driver) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, d.timeout)
	defer cancel()
	said, err := d.Probe(ctx, &csi.ProbeRequest{})
	if ready := said.GetReady(); err == nil && ready != nil && !ready.GetValue() {
		return errors.New("the driver reports that it is not ready")
	}
	return err
}

// plugins is the directory in the container in which kubelet watches for the sockets of plugins.
const plugins = "/registration"

// register serves kubelet's registration calls until ctx ends. Probes succeed while the socket
// exists. If kubelet refuses the driver, the program ends, so that kubelet restarts the container.
func register(ctx context.Context, d driver, endpoint, listen string) error {
	info, err := d.GetPluginInfo(ctx, &csi.GetPluginInfoRequest{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("ask the driver for its name: %w", err)
	}
	name := info.GetName()
	socket := filepath.Join(plugins, name+"-reg.sock")
	// A killed container leaves its socket, and Listen fails if the file exists.
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier registrar: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the kubelet: %w", err)
	}
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &kubeletSide{driver: name, endpoint: endpoint})
	group, ctx := errgroup.WithContext(ctx)
	context.AfterFunc(ctx, server.GracefulStop)
	group.Go(func() error { return server.Serve(listener) })
	group.Go(func() error {
		return answer(ctx, listen, func(context.Context) error {
			_, err := os.Stat(socket)
			return err
		})
	})
	return group.Wait()
}

type kubeletSide struct {
	registration.UnimplementedRegistrationServer
	driver, endpoint string
}

func (k *kubeletSide) GetInfo(context.Context, *registration.InfoRequest) (
	*registration.PluginInfo, error) {
	return &registration.PluginInfo{Type: registration.CSIPlugin, Name: k.driver,
		Endpoint: k.endpoint, SupportedVersions: []string{"1.0.0"}}, nil
}

func (k *kubeletSide) NotifyRegistrationStatus(_ context.Context,
	status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if !status.GetPluginRegistered() {
		log.Fatalf("the kubelet refused %s: %s", k.driver, status.GetError())
	}
	log.Printf("the kubelet registered %s at %s", k.driver, k.endpoint)
	return &registration.RegistrationStatusResponse{}, nil
}
