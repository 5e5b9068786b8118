package conformance

import (
	"context"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
)

// askKernel demands the system calls with which the driver mounts (Linux 5.12).
func (p preflight) askKernel(context.Context) finding {
	release, err := guest.KernelRelease()
	if err != nil {
		return warn("", "%s", err)
	}
	if unix.MountSetattr(-1, "", 0, nil) == unix.ENOSYS {
		return fail("The driver needs Linux 5.12 or newer.", "Linux %s", release)
	}
	return pass("Linux %s", release)
}
