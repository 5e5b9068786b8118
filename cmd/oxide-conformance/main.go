// Command oxide-conformance tells whether a rack does what the CSI driver needs, and whether the
// driver keeps its users' bytes on it. --help lists its verbs and settings.
//
// It is one file with the driver and the simulator inside, which it starts as processes of their
// own: "oxide-conformance oxide-csi-plugin …" is the driver.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	// The certificates to trust on a machine that has none.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/driver"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/conformance"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/program"
)

// self is this file, also when it was replaced or removed since it was started.
const self = "/proc/self/exe"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	status := run(ctx, os.Args[1:])
	stop()
	os.Exit(status)
}

func run(ctx context.Context, args []string) int {
	if len(args) > 0 {
		switch args[0] {
		case "oxide-csi-plugin":
			return driver.Main(ctx, args[1:], os.Getenv, os.Stdout, os.Stderr)
		case "oxide-simulator":
			return program.Main(ctx, args[1:], os.Stdout, os.Stderr)
		case guest.Verb:
			return agent(ctx)
		}
	}
	p := conformance.Program{Args: args, Getenv: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout,
		Stderr: os.Stderr, Version: driver.Version(), Self: map[string][]string{
			"oxide-csi-plugin": {self, "oxide-csi-plugin"},
			"oxide-simulator":  {self, "oxide-simulator"},
		}}
	return p.Main(ctx)
}

// agent works in another instance of the rack, into which a run has copied this file.
func agent(ctx context.Context) int {
	if err := guest.Serve(ctx, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "oxide-conformance:", err)
		return 1
	}
	return 0
}
