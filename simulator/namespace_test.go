package simulator

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// inOwnNamespace tells this binary that it has been started again.
const inOwnNamespace = "SIMULATOR_TEST_NAMESPACE"

// TestMain runs the tests in a mount namespace of their own. Other tests of this machine make
// namespaces as well, and each starts with all mounts that it finds: it would hold ours, and the
// devices below them, for as long as it lives.
func TestMain(m *testing.M) {
	if os.Geteuid() != 0 {
		os.Exit(m.Run()) // The tests that need root say so.
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

// leaveMountsOfOthers lets go of what other tests had mounted when this namespace was made. They
// notice nothing but that their devices are not held by us.
func leaveMountsOfOthers() error {
	below := strings.TrimSuffix(os.TempDir(), "/") + "/"
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(below))
	if err != nil {
		return fmt.Errorf("leave the mounts of other tests: %w", err)
	}
	for _, m := range mounts {
		if strings.HasPrefix(m.Source, "/dev/loop") || strings.Contains(m.Source, "/dev/nvme") {
			// Another one may have covered it, or taken it along.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}
