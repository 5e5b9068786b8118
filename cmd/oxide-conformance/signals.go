package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance"
)

// interruptible returns a context that ends with the first interrupt, and standard output. A
// second interrupt ends the program at once: a rack may keep it from sweeping. That nobody reads
// what is printed any more, or that the terminal is gone, is an interrupt, too, but never a second
// one: a shell passes on the hangup that the program has had already.
func interruptible() (context.Context, io.Writer) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(signals, syscall.SIGHUP)
	}
	// Else a write to a closed standard output ends the program.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		unheard := false
		for s := range signals {
			switch {
			case s == syscall.SIGHUP:
				if ctx.Err() == nil && !unheard {
					unheard = true
					// Ginkgo listens for this one.
					_ = syscall.Kill(os.Getpid(), syscall.SIGTERM)
				}
			case ctx.Err() == nil:
				cancel()
			default:
				fmt.Fprintln(os.Stderr, "oxide-conformance: interrupted twice: what there is was left; "+
					"see oxide-conformance clean")
				os.Exit(conformance.ExitInterrupted)
			}
		}
	}()
	return ctx, heard{os.Stdout, func() {
		select {
		case signals <- syscall.SIGHUP:
		default: // others are under way
		}
	}}
}

// heard tells when nobody reads what is written.
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
