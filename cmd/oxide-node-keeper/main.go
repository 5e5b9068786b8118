// Command oxide-node-keeper looks after the nodes of a Kubernetes cluster on Oxide racks: it stops
// and starts instances for volumes that wait for that, and helps nodes that join and leave.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	// The certificates to trust in an image with only this binary, which has no system certificates.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	status := keeper.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}
