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

// interruptible returns a context that the first interrupt cancels, and standard output. A second
// interrupt ends the program at once, because a rack that does not answer may keep it from cleaning
// up. It also counts as an interrupt when the reader of the output or the terminal is gone, but
// never as the second one: a shell passes on a hangup that the program has already received.
func interruptible() (context.Context, io.Writer) {
	ctx, cancel := context.WithCancel(context.Background())
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	if !signal.Ignored(syscall.SIGHUP) { // nohup ignores it
		signal.Notify(signals, syscall.SIGHUP)
	}
	// Without this, a write to a closed standard output would end the program.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	go func() {
		unheard := false
		for s := range signals {
			switch {
			case s == syscall.SIGHUP:
				if ctx.Err() == nil && !unheard {
					unheard = true
					// Ginkgo ends its suite at this signal.
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
		default: // an interrupt is already pending
		}
	}}
}

// heard is a writer that reports when nobody reads its output any more.
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
