package main

import (
	"context"
	"errors"
	"fmt"
	"log"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// registrar registers one driver: it serves the kubelet on its own socket.
type registrar struct {
	options
	log *log.Logger
}

// driverName asks the driver for its name until it answers, because the driver may start later.
func (r *registrar) driverName(ctx context.Context, driver grpc.ClientConnInterface) (
	string, error) {
	for {
		name, err := r.askName(ctx, driver)
		if err == nil {
			return name, nil
		}
		r.log.Printf("the driver does not answer yet: %v", err)
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("wait for the driver at %s: %w; it said: %w",
				r.csiAddress, ctx.Err(), err)
		case <-time.After(r.timeout):
		}
	}
}

func (r *registrar) askName(ctx context.Context, driver grpc.ClientConnInterface) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	info, err := csi.NewIdentityClient(driver).GetPluginInfo(ctx, &csi.GetPluginInfoRequest{})
	if err != nil {
		return "", err
	}
	if info.GetName() == "" {
		return "", errors.New("the driver's name is empty")
	}
	return info.GetName(), nil
}

// register serves the kubelet until the context ends. If the kubelet refuses the driver, it fails,
// and the container is restarted to try again.
func (r *registrar) register(ctx context.Context, driver string) error {
	socket := filepath.Join(r.registrationPath, driver+"-reg.sock")
	// A socket that a killed container left has to be removed first.
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("remove the socket of an earlier registrar: %w", err)
	}
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return fmt.Errorf("listen for the kubelet: %w", err)
	}
	ctx, refuse := context.WithCancelCause(ctx)
	defer refuse(nil)
	server := grpc.NewServer()
	registration.RegisterRegistrationServer(server, &kubeletSide{
		driver: driver, endpoint: r.kubeletPath, refuse: refuse, log: r.log,
	})
	stopHealth, err := r.serveHealth(socket)
	if err != nil {
		_ = listener.Close()
		return err
	}
	defer stopHealth()
	stopped := context.AfterFunc(ctx, server.GracefulStop)
	defer stopped()
	if err := server.Serve(listener); err != nil {
		return fmt.Errorf("serve the kubelet: %w", err)
	}
	if cause := context.Cause(ctx); !errors.Is(cause, context.Canceled) {
		return cause
	}
	return nil
}

// serveHealth answers health probes: the registrar is healthy as long as its socket exists.
func (r *registrar) serveHealth(socket string) (stop func(), err error) {
	if r.listen == "" {
		return func() {}, nil
	}
	listener, err := net.Listen("tcp", r.listen)
	if err != nil {
		return nil, fmt.Errorf("listen for probes: %w", err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		if _, err := os.Stat(socket); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, _ = w.Write([]byte("ok"))
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = server.Serve(listener)
	}()
	return func() {
		_ = server.Close()
		<-done
	}, nil
}

// kubeletSide is the service that the kubelet calls.
type kubeletSide struct {
	registration.UnimplementedRegistrationServer
	driver, endpoint string
	refuse           context.CancelCauseFunc
	log              *log.Logger
}

func (k *kubeletSide) GetInfo(context.Context, *registration.InfoRequest) (
	*registration.PluginInfo, error) {
	return &registration.PluginInfo{
		Type:              registration.CSIPlugin,
		Name:              k.driver,
		Endpoint:          k.endpoint,
		SupportedVersions: []string{"1.0.0"},
	}, nil
}

func (k *kubeletSide) NotifyRegistrationStatus(_ context.Context,
	status *registration.RegistrationStatus) (*registration.RegistrationStatusResponse, error) {
	if status.GetPluginRegistered() {
		k.log.Printf("the kubelet registered %s at %s", k.driver, k.endpoint)
	} else {
		k.refuse(fmt.Errorf("the kubelet refused %s: %s", k.driver, status.GetError()))
	}
	return &registration.RegistrationStatusResponse{}, nil
}
