package conformance

import (
	"context"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/report"
)

// kernelRelease is the release of the running kernel.
func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// askKernel demands the system calls by which the driver mounts (Linux 5.12).
func (w *session) askKernel(context.Context) finding {
	err := unix.MountSetattr(-1, "", 0, nil)
	if err == unix.ENOSYS {
		return finding{report.Fail, kernelRelease(), "The driver needs Linux 5.12 or newer."}
	}
	return pass("Linux %s", kernelRelease())
}

// ownMounts starts this program again, as the same process, in a mount namespace of its own: what a
// killed run has mounted is gone with it. It returns if that is done already.
func ownMounts() error {
	const done = "OXIDE_CONFORMANCE_OWN_MOUNTS"
	if os.Getenv(done) != "" {
		return os.Unsetenv(done)
	}
	// A namespace is a thread's, and the thread that starts the program again hands its own on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return err
	}
	// What the machine unmounts goes away here, too, so that nothing of others is held; what is
	// mounted here is not seen there.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return err
	}
	return unix.Exec("/proc/self/exe", os.Args, append(os.Environ(), done+"=1"))
}

func osRelease() string {
	text, _ := os.ReadFile("/etc/os-release")
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); is {
			return strings.Trim(name, `"`)
		}
	}
	return ""
}
