// Command oxide-node-keeper manages the nodes of a Kubernetes cluster on Oxide racks. It stops
// instances while disks are attached or detached, and manages taints of nodes that join or leave.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	// Certificates to trust in an image that contains only this binary and no system certificates.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	status := keeper.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr)
	stop()
	os.Exit(status)
}
