package proof

import (
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// inside tells this binary that it has been started again.
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
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "the proofs make loop devices and mount them: run them as root")
		os.Exit(1)
	}
	cmd := exec.Command(os.Args[0], os.Args[1:]...)
	cmd.Env = append(os.Environ(), inside+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM,
	}
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

// LeaveMountsOfOthers lets go of the volumes that other tests had mounted when this process's mount
// namespace was made as a copy of theirs. Else this process would hold their devices, and a driver
// does not let go of a volume that another namespace has.
func LeaveMountsOfOthers() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return fmt.Errorf("leave the mounts of other tests: %w", err)
	}
	// Tests live there; what the machine itself has mounted stays.
	homes := []string{os.TempDir(), "/var/tmp"}
	if dir := os.Getenv("OXIDE_SANITY_DIR"); dir != "" {
		homes = append(homes, dir)
	}
	for _, m := range mounts {
		ofTests := slices.ContainsFunc(homes, func(dir string) bool {
			return strings.HasPrefix(m.Mountpoint, strings.TrimSuffix(dir, "/")+"/")
		})
		onDevice := strings.HasPrefix(m.Source, "/dev/loop") ||
			strings.Contains(m.Source, "/dev/nvme") || strings.Contains(m.Root, "/dev/nvme")
		if ofTests && onDevice {
			// Another one may have covered it, or taken it along.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}
