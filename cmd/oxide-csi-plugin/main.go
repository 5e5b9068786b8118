// Command oxide-csi-plugin serves the disks of an Oxide rack as CSI volumes. --help lists its
// settings.
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

	"github.com/oxidecomputer/oxide-csi-plugin/driver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// A second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	if err := run(ctx, os.Args[1:], os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "oxide-csi-plugin:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout, stderr io.Writer) error {
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
