// Command oxide-instance-metadata writes the id of a Kubernetes node's instance to a file, for
// nodes whose SMBIOS is hidden. It reads the Node's spec.providerID, which the Oxide cloud
// controller manager sets, and writes it as OXIDE_INSTANCE_ID. It is an init container of the
// driver, so that the driver itself needs no Kubernetes client.
package main

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"syscall"
	"time"

	"k8s.io/client-go/rest"
)

// nodeNameKey is the variable that the pod sets from spec.nodeName.
const nodeNameKey = "K8S_NODE_NAME"

// Release is set in release builds: -ldflags "-X main.Release=v1.2.3".
var Release = ""

// nodeName matches the name of a node.
var nodeName = regexp.MustCompile(`^[a-z0-9]([-.a-z0-9]{0,251}[a-z0-9])?$`)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx, os.Args[1:], os.Getenv, rest.InClusterConfig, os.Stdout, os.Stderr)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "oxide-instance-metadata:", err)
		os.Exit(1)
	}
}

// run runs the program. configure returns how to reach the API server.
func run(ctx context.Context, args []string, getenv func(string) string,
	configure func() (*rest.Config, error), stdout, stderr io.Writer) error {
	flags := flag.NewFlagSet("oxide-instance-metadata", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	out := flags.String("out", "/data/config.env", "the `file` to write")
	timeout := flags.Duration("timeout", 5*time.Minute,
		"how long to wait for a node that has no spec.providerID yet")
	version := flags.Bool("version", false, "print the version and end")
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
	case *version:
		_, err := fmt.Fprintln(stdout, cmp.Or(Release, "devel"))
		return err
	case *timeout <= 0:
		return fmt.Errorf("--timeout is %s; it has to be positive", *timeout)
	}
	name := getenv(nodeNameKey)
	switch {
	case name == "":
		return fmt.Errorf("%s is not set: set it to the node's name, with a fieldRef to spec.nodeName",
			nodeNameKey)
	case !nodeName.MatchString(name):
		return fmt.Errorf("%s is %q, which is not a node's name: expected lower-case letters, digits, "+
			"dots and hyphens", nodeNameKey, oneLine(name))
	}
	config, err := configure()
	if err != nil {
		return fmt.Errorf("cannot reach the Kubernetes API: %w; run this in a pod whose service "+
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
	_, err = fmt.Fprintf(stderr, "node %s is instance %s; wrote %s\n", name, id, *out)
	return err
}

// write creates the file atomically. The value is in single quotes, because the kubelet, which
// reads the file for a fileKeyRef, accepts no other form.
func write(path, id string) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	_, err = fmt.Fprintf(file, "OXIDE_INSTANCE_ID='%s'\n", id)
	if err == nil {
		// The driver runs as another user.
		err = file.Chmod(0o644)
	}
	if closeErr := file.Close(); err == nil {
		err = closeErr
	}
	if err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
