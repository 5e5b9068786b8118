// Command oxide-instance-metadata tells the driver which instance of the rack a Kubernetes node is,
// where the node does not know it from SMBIOS: it reads the node's spec.providerID, which the Oxide
// cloud controller manager sets, and writes it to a file as OXIDE_INSTANCE_ID. It runs as an init
// container beside the driver, so that the driver itself knows nothing of Kubernetes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
)

// nodeNameKey is the variable that the pod's spec fills from spec.nodeName.
const nodeNameKey = "K8S_NODE_NAME"

// nodeName is the form of a node's name.
var nodeName = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Getenv, rest.InClusterConfig, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "oxide-instance-metadata:", err)
		os.Exit(1)
	}
}

// run does what the arguments say. configure finds the API server.
func run(ctx context.Context, args []string, getenv func(string) string,
	configure func() (*rest.Config, error), stderr io.Writer) error {
	flags := flag.NewFlagSet("oxide-instance-metadata", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	out := flags.String("out", "/data/config.env", "the `file` to write")
	timeout := flags.Duration("timeout", 5*time.Minute,
		"how long to wait for a node that has no spec.providerID yet")
	switch err := flags.Parse(args); {
	case errors.Is(err, flag.ErrHelp):
		_, _ = fmt.Fprintf(stderr, "oxide-instance-metadata writes the instance of the Kubernetes "+
			"node in %s to a file.\n", nodeNameKey)
		flags.SetOutput(stderr)
		flags.PrintDefaults()
		return nil
	case err != nil:
		return fmt.Errorf("%w; see --help", err)
	case flags.NArg() > 0:
		return fmt.Errorf("expected flags only, found %q; see --help", flags.Arg(0))
	case *timeout <= 0:
		return fmt.Errorf("--timeout is %s; it has to be more than nothing", *timeout)
	}
	name := getenv(nodeNameKey)
	switch {
	case name == "":
		return fmt.Errorf("%s is not set: give the container the node's name, with a fieldRef to "+
			"spec.nodeName", nodeNameKey)
	case !nodeName.MatchString(name):
		return fmt.Errorf("%s is %q, which no node is called: expected lower-case letters, digits, "+
			"dots and hyphens", nodeNameKey, oneLine(name))
	}
	config, err := configure()
	if err != nil {
		return fmt.Errorf("no way to the Kubernetes API: %w; run this in a pod whose service "+
			"account's token is mounted", err)
	}
	node, err := newNode(config, name)
	if err != nil {
		return err
	}
	node.Log = stderr
	id, err := node.instance(ctx, *timeout)
	if err != nil {
		return err
	}
	if err := write(*out, id); err != nil {
		return fmt.Errorf("write %s (--out): %w", *out, err)
	}
	_, err = fmt.Fprintf(stderr, "node %s is instance %s, says %s\n", name, id, *out)
	return err
}
