// Command oxide-conformance runs the suite against the rack that OXIDE_HOST, OXIDE_TOKEN and
// OXIDE_PROJECT name. It has to run as root in an instance of that project, and touches only what
// it made itself.
//
// "oxide-conformance demo" needs no rack: it simulates one and shows the life of a volume on it.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity"
)

func main() { os.Exit(run(os.Args[1:])) }

// run cleans up what it made, even if it is interrupted.
func run(args []string) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if len(args) == 1 && args[0] == "demo" {
		return demo(ctx)
	}
	return sanity.Conformance(ctx, args, os.Stdout, os.Stderr)
}

func demo(ctx context.Context) int {
	if err := sanity.Demo(ctx, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "oxide-conformance: demo: %v\n", err)
		return 1
	}
	return 0
}
