package conformance

import (
	"context"
	"os"
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

func osRelease() string {
	text, _ := os.ReadFile("/etc/os-release")
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); is {
			return strings.Trim(name, `"`)
		}
	}
	return ""
}
