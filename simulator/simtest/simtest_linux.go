package simtest

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Mount mounts a device until the test ends.
func Mount(t *testing.T, device, dir string, options ...string) {
	t.Helper()
	Command(t, "mount", append(options, device, dir)...)
	t.Cleanup(func() {
		// The test may have unmounted it, or cut the device off.
		_ = unix.Unmount(dir, 0)
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
}
