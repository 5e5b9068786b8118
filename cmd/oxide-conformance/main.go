// Command oxide-conformance tests whether a rack does what the CSI driver needs, and whether the
// driver keeps its users' data on it. --help lists its verbs and settings.
//
// The one file contains the driver and the simulator, which it starts as processes of their own:
// "oxide-conformance oxide-csi-plugin …" runs the driver.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	// Certificates to trust on a machine that has none.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/program"
)

// self is this program's file, even if it was replaced or removed since the start.
const self = "/proc/self/exe"

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(args []string) int {
	if len(args) > 0 {
		if inner := programs[args[0]]; inner != nil {
			ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
			defer stop()
			return inner(ctx, args[1:])
		}
	}
	ctx, stdout := interruptible()
	p := conformance.Program{Args: args, Getenv: os.Getenv, Stdin: os.Stdin, Stdout: stdout,
		Stderr: os.Stderr, Version: driver.Version(), Self: map[string][]string{
			"oxide-csi-plugin": {self, "oxide-csi-plugin"},
			"oxide-simulator":  {self, "oxide-simulator"},
		}}
	return p.Main(ctx)
}

// programs contains the programs in this file.
var programs = map[string]func(context.Context, []string) int{
	"oxide-csi-plugin": func(ctx context.Context, args []string) int {
		return driver.Main(ctx, args, os.Getenv, os.Stdout, os.Stderr)
	},
	"oxide-simulator": func(ctx context.Context, args []string) int {
		return program.Main(ctx, args, os.Stdout, os.Stderr)
	},
	// An agent runs in another instance of the rack, to which a run has copied this file.
	guest.Verb: func(ctx context.Context, _ []string) int { return guest.Main(ctx) },
}
