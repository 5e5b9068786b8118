package simtest

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// inOwnNamespace is the variable that is set when this binary has started itself again.
const inOwnNamespace = "SIMULATOR_TEST_NAMESPACE"

// Main runs the tests of a package in a mount namespace of their own. Other tests of this machine
// make namespaces as well, and each starts with a copy of all mounts: it would hold ours, and the
// devices below them, for as long as it exists.
func Main(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run()) // The tests that need root report it.
	}
	if os.Getenv(inOwnNamespace) == "" {
		os.Exit(runInOwnNamespace())
	}
	if err := leaveMountsOfOthers(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}

func runInOwnNamespace() int {
	again := exec.Command("/proc/self/exe", os.Args[1:]...)
	again.Env = append(os.Environ(), inOwnNamespace+"=1")
	again.Stdin, again.Stdout, again.Stderr = os.Stdin, os.Stdout, os.Stderr
	again.SysProcAttr = &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS,
		Pdeathsig:    syscall.SIGKILL,
	}
	err := again.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		return exit.ExitCode()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// leaveMountsOfOthers unmounts, in this namespace only, what other tests had mounted when it was
// made, so that it does not hold their devices.
func leaveMountsOfOthers() error {
	below := strings.TrimSuffix(os.TempDir(), "/") + "/"
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(below))
	if err != nil {
		return fmt.Errorf("leave the mounts of other tests: %w", err)
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Source, "/dev/loop") ||
			strings.Contains(filepath.Clean(m.Source), "/dev/nvme") {
			// Another one may have covered it, or taken it along.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}

// Mount mounts something until the test ends.
func Mount(t *testing.T, device, dir string, options ...string) {
	t.Helper()
	Command(t, "mount", append(options, device, dir)...)
	t.Cleanup(func() {
		// The test may have unmounted it, or cut the device off.
		_ = unix.Unmount(dir, 0)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
}
