// Command oxide-csi-plugin serves the disks of an Oxide rack as CSI volumes. --help lists its
// settings. "oxide-csi-plugin audit" finds leaked disks and snapshots; audit --help lists its
// flags.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	// The certificates to trust in an image with only this binary, which has no system certificates.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/driver"
)

// errFound reports that an audit succeeded and found something.
var errFound = errors.New("found orphans or missing volumes")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	switch {
	case errors.Is(err, errFound):
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "oxide-csi-plugin:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	if len(args) > 0 && args[0] == "audit" {
		return audit(ctx, args[1:], stdout, stderr)
	}
	config, err := driver.ParseConfig(args, os.Getenv, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	case config.PrintVersion:
		_, err := fmt.Fprintln(stdout, driver.Version())
		return err
	}
	return driver.Run(ctx, config, stderr)
}

func audit(ctx context.Context, args []string, stdout, stderr io.Writer) error {
	config, err := driver.ParseAuditConfig(args, os.Getenv, stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return nil
	case err != nil:
		return err
	}
	found, err := driver.Audit(ctx, config, stdout, stderr)
	if err == nil && found {
		return errFound
	}
	return err
}
