// Command node-driver-registrar registers a CSI driver at the kubelet of its node. It replaces
// registry.k8s.io/sig-storage/csi-node-driver-registrar where no registry can be reached, and takes
// the flags that our manifests set.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "node-driver-registrar:", err)
		os.Exit(1)
	}
}

type options struct {
	csiAddress       string
	kubeletPath      string
	registrationPath string
	listen           string
	timeout          time.Duration
}

func parse(args []string, output io.Writer) (options, error) {
	var o options
	flags := flag.NewFlagSet("node-driver-registrar", flag.ContinueOnError)
	flags.SetOutput(output)
	flags.StringVar(&o.csiAddress, "csi-address", "/run/csi/socket", "the driver's socket")
	flags.StringVar(&o.kubeletPath, "kubelet-registration-path", "",
		"the driver's socket as the kubelet sees it")
	flags.StringVar(&o.registrationPath, "plugin-registration-path", "/registration",
		"directory in which the kubelet looks for new plugins, as it is here")
	flags.StringVar(&o.listen, "http-endpoint", "", "address to answer probes at; empty is none")
	flags.DurationVar(&o.timeout, "timeout", time.Second, "how long a call of the driver may take")
	flags.Int("v", 0, "accepted and without effect")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.kubeletPath == "" {
		return o, errors.New("--kubelet-registration-path is missing: name the driver's socket " +
			"as the kubelet sees it")
	}
	return o, nil
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
	r := &registrar{options: o, log: log.New(stderr, "", log.LstdFlags)}
	name, err := r.driverName(ctx, driver)
	if err != nil {
		return err
	}
	return r.register(ctx, name)
}
