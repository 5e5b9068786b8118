package namespace

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// Main runs a package's tests in this binary, started again in a mount namespace of its own: no
// test sees the mounts of another package, or holds their devices, and what a failed one leaves
// mounted is gone with it. Without root the tests run here, and those that need root report it.
// Call it from TestMain.
func Main(m interface{ Run() int }) {
	if os.Geteuid() == 0 {
		if err := Enter(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
	}
	os.Exit(m.Run())
}

// Enter starts this program again, as the same process and with the same arguments, in a mount
// namespace of its own. There it returns, and lets go of the volumes that others had mounted when
// the namespace was made as a copy of theirs. A program that enters a second time does nothing new.
func Enter() error {
	if Entered() {
		// A program that this one starts is not the one that was started again.
		return errors.Join(os.Unsetenv(marker), leaveVolumes())
	}
	if os.Geteuid() != 0 {
		return errors.New("a mount namespace takes root: run it as root")
	}
	// A namespace is a thread's, and the thread that starts the program again hands its own on.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// What the machine unmounts goes away here, too, so that nothing of others is held; what is
	// mounted here is not seen there.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep the mounts of a namespace to itself: %w", err)
	}
	err := unix.Exec("/proc/self/exe", os.Args, append(os.Environ(), marker+"=1"))
	return fmt.Errorf("start again in a mount namespace: %w", err)
}

// leaveVolumes lets go of the volumes that others have mounted. Else this process would hold their
// devices, and a driver does not let go of a volume that another namespace has.
func leaveVolumes() error {
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
			strings.Contains(filepath.Clean(m.Source), "/dev/nvme") ||
			strings.Contains(m.Root, "/dev/nvme") || strings.HasPrefix(m.Root, "/nvme")
		if ofTests && onDevice {
			// Another one may have covered it, or taken it along.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}
