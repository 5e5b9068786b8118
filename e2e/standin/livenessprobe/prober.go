package main

import (
	"context"
	"errors"
	"log"
	"net/http"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
)

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
