// Command livenessprobe answers the kubelet's HTTP probe of a CSI driver by calling the driver's
// Probe. It replaces registry.k8s.io/sig-storage/livenessprobe where no registry can be reached,
// and takes the flags that our manifests set.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "livenessprobe:", err)
		os.Exit(1)
	}
}

type options struct {
	csiAddress   string
	listen       string
	probeTimeout time.Duration
}

func parse(args []string, output io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("livenessprobe", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&o.csiAddress, "csi-address", "/run/csi/socket", "the driver's socket")
	flags.StringVar(&o.listen, "http-endpoint", ":9808", "address to answer at")
	flags.DurationVar(&o.probeTimeout, "probe-timeout", time.Second, "how long a Probe may take")
	flags.Int("v", 0, "accepted and without effect")
	err := flags.Parse(args)
	return o, err
}

func run(ctx context.Context, args []string, stderr io.Writer) error {
	o, err := parse(args, stderr)
	if err != nil {
		return err
	}
	driver, err := grpc.NewClient("unix:"+strings.TrimPrefix(o.csiAddress, "unix://"),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return fmt.Errorf("connect to the driver at %s: %w", o.csiAddress, err)
	}
	defer driver.Close()
	listener, err := net.Listen("tcp", o.listen)
	if err != nil {
		return fmt.Errorf("listen for the kubelet: %w", err)
	}
	return serve(ctx, listener, &prober{
		driver: driver, timeout: o.probeTimeout, log: log.New(stderr, "", log.LstdFlags),
	})
}

// serve answers requests until the context ends.
func serve(ctx context.Context, listener net.Listener, p *prober) error {
	mux := http.NewServeMux()
	mux.Handle("GET /healthz", p)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stopped := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stopped()
	if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// errNotReady means that the driver answers but reports that it is not ready.
var errNotReady = errors.New("the driver says that it is not ready")

// prober answers an HTTP probe by calling the driver's Probe.
type prober struct {
	driver  grpc.ClientConnInterface
	timeout time.Duration
	log     *log.Logger
}

func (p *prober) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if err := p.probe(r.Context()); err != nil {
		p.log.Printf("probe failed: %v", err)
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = w.Write([]byte("ok"))
}

// probe asks the driver once. According to CSI a driver that does not report its readiness is
// ready.
func (p *prober) probe(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, p.timeout)
	defer cancel()
	answer, err := csi.NewIdentityClient(p.driver).Probe(ctx, &csi.ProbeRequest{})
	if err != nil {
		return err
	}
	if ready := answer.GetReady(); ready != nil && !ready.GetValue() {
		return errNotReady
	}
	return nil
}
