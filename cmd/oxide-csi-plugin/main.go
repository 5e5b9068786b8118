// Command oxide-csi-plugin serves the disks of an Oxide rack as CSI volumes. --help lists its
// settings. "oxide-csi-plugin audit" finds leaked disks and snapshots, "oxide-csi-plugin claim"
// grows or reverts a claim, "oxide-csi-plugin doctor" explains why a volume does not work, and
// "oxide-csi-plugin inspect" prints what a node sees of its volumes; each has a --help of its own.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	// Certificates to trust in an image that contains only this binary and no system certificates.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/driver"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the defaults apply again, so a second signal ends the process at once.
	context.AfterFunc(ctx, stop)
	os.Exit(driver.Main(ctx, os.Args[1:], os.Getenv, os.Stdout, os.Stderr))
}
