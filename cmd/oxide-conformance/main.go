// Command oxide-conformance tests whether a rack does what the CSI driver needs, and whether the
// data that users store with the driver is safe there. --help lists its commands and settings.
//
// The program also contains the driver and the simulator, and starts itself again to run them:
// "oxide-conformance oxide-csi-plugin …" runs the driver.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	// Certificates to trust on a machine without a certificate store.
	_ "golang.org/x/crypto/x509roots/fallback"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/program"
)

// self is a path of this process's executable that works even if the file is replaced or removed.
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

var programs = map[string]func(context.Context, []string) int{
	"oxide-csi-plugin": func(ctx context.Context, args []string) int {
		return driver.Main(ctx, args, os.Getenv, os.Stdout, os.Stderr)
	},
	"oxide-simulator": func(ctx context.Context, args []string) int {
		return program.Main(ctx, args, os.Stdout, os.Stderr)
	},
	// A run copies this executable into the instance of --second, and starts it there as an agent.
	guest.Verb: func(ctx context.Context, _ []string) int { return guest.Main(ctx) },
}

// interruptible returns a context that the first interrupt cancels, and a writer to standard
// output. A second interrupt ends the program at once, because the cleanup may wait for a rack that
// does not answer. A lost terminal or a closed output counts as a first interrupt, but not as a
// second: kernel and shell may both send SIGHUP for the same lost terminal.
func interruptible() (context.Context, io.Writer) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup makes the program ignore SIGHUP
		signal.Notify(signals, syscall.SIGHUP)
	}
	// Handle SIGPIPE, because by default a write to a closed standard output ends the program.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		unheard := false
		for s := range signals {
			switch {
			case s == syscall.SIGHUP:
				if ctx.Err() == nil && !unheard {
					unheard = true
					// SIGTERM cancels ctx, and also ends a suite of Ginkgo.
					_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
				}
			case ctx.Err() == nil:
				cancel()
			default:
				fmt.Fprintln(os.Stderr, "oxide-conformance: interrupted twice: objects of this run are "+
					"left on the rack; remove them with oxide-conformance clean")
				os.Exit(conformance.ExitInterrupted)
			}
		}
	}()
	return ctx, heard{os.Stdout, func() {
		select {
		case signals <- syscall.SIGHUP:
		default: // an interrupt is already pending
		}
	}}
}

// heard is a writer that calls closed() when a write fails with EPIPE.
type heard struct {
	io.Writer
	closed func()
}

func (h heard) Write(p []byte) (int, error) {
	n, err := h.Writer.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		h.closed()
	}
	return n, err
}
