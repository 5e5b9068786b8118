package proof

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"syscall"
	"testing"
)

// inside is set when this binary has been started again.
const inside = "PROOF_INSIDE"

// Main runs a package's tests in this binary, started again in a mount namespace of its own: a
// proof sees no mounts of another, and what a failed one leaves mounted is gone with it. Call it
// from TestMain.
func Main(m *testing.M) {
	if os.Getenv(inside) != "" {
		if err := LeaveMountsOfOthers(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(m.Run())
	}
	if runtime.GOOS != "linux" {
		fmt.Fprintln(os.Stderr, "the proofs make loop devices and mount them: run them on Linux")
		os.Exit(1)
	}
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the proofs make loop devices and mount them: run them as root")
		os.Exit(1)
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = namespaceAttr()
	// The child dies with the thread that started it, so this goroutine keeps its thread.
	runtime.LockOSThread()
	// An interrupt at the terminal reaches the tests by themselves; this process has to wait for them.
	signal.Ignore(syscall.SIGINT)
	signalled := make(chan os.Signal, 1)
	signal.Notify(signalled, syscall.SIGTERM)
	if err := cmd.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "start the tests in a mount namespace of their own:", err)
		os.Exit(1)
	}
	go func() {
		for s := range signalled {
			_ = cmd.Process.Signal(s)
		}
	}()
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code >= 0 {
		os.Exit(code)
	}
	os.Exit(1)
}
