package namespace

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"syscall"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// attr gives a process a mount namespace of its own, without propagation. The process ends with the
// thread that started it.
func attr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGTERM,
	}
}

// LeaveVolumes lets go of the volumes that others had mounted when this process's mount namespace
// was made as a copy of theirs. Else this process would hold their devices, and a driver does not
// let go of a volume that another namespace has.
func LeaveVolumes() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return fmt.Errorf("leave the volumes of others: %w", err)
	}
	// Tests and guests live there; what the machine itself has mounted stays.
	homes := []string{os.TempDir(), "/var/tmp"}
	if dir := os.Getenv("OXIDE_SANITY_DIR"); dir != "" {
		homes = append(homes, dir)
	}
	for _, m := range mounts {
		ofTests := slices.ContainsFunc(homes, func(dir string) bool {
			return strings.HasPrefix(m.Mountpoint, strings.TrimSuffix(dir, "/")+"/")
		})
		onDevice := strings.HasPrefix(m.Source, "/dev/loop") ||
			strings.Contains(m.Source, "/dev/nvme") || strings.Contains(m.Root, "/dev/nvme") ||
			strings.HasPrefix(m.Root, "/nvme")
		if ofTests && onDevice {
			// Another one may have covered it, or taken it along.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}
