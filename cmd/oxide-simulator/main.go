// Command oxide-simulator simulates an Oxide rack on one machine: it serves the API over HTTP,
// keeps the disks' bytes in files, and shows each instance its disks as loop devices.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/program"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, os.Interrupt)
	status := program.Main(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}
