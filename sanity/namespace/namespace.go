// Package namespace runs this program in a mount namespace of its own: it sees no mounts of others,
// and what it leaves mounted is gone with it.
package namespace

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
)

// inside is set for the program that runs in a namespace of its own.
const inside = "OXIDE_NAMESPACE"

// Inside reports whether this program runs in a mount namespace that Run made, and lets go of the
// volumes that others had mounted when it was made.
func Inside() (bool, error) {
	if os.Getenv(inside) == "" {
		return false, nil
	}
	// A program that this one starts is not the one that Run started.
	if err := os.Unsetenv(inside); err != nil {
		return false, err
	}
	return true, LeaveVolumes()
}

// Run starts this program again with the same arguments and standard streams, in a mount namespace
// of its own, and returns its exit code. It forwards SIGTERM, and leaves SIGINT to the terminal.
func Run(ctx context.Context) (code int, err error) {
	if runtime.GOOS != "linux" {
		return 1, errors.New("mount namespaces need Linux: run it there")
	}
	if os.Geteuid() != 0 {
		return 1, errors.New("a mount namespace takes root: run it as root")
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = attr()
	// The child dies with the thread that started it, so this goroutine keeps its thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	signal.Ignore(syscall.SIGINT)
	signalled := make(chan os.Signal, 1)
	signal.Notify(signalled, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		return 1, fmt.Errorf("start in a mount namespace of its own: %w", err)
	}
	go func() {
		for s := range signalled {
			_ = cmd.Process.Signal(s)
		}
	}()
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		return code, nil
	}
	return 1, nil
}
