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

// Main runs a package's tests in a mount namespace of its own. So the tests cannot see other
// packages' mounts or keep the mounted devices in use, and the mounts of a failed test disappear.
// Without root, Main runs the tests in the present namespace, and a test that needs root fails.
// Call Main from TestMain.
func Main(m interface{ Run() int }) {
	if os.Geteuid() == 0 {
		if err := Enter(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		allowDevices()
	}
	os.Exit(m.Run())
}

// Enter starts this program again, as the same process and with the same arguments, in a mount
// namespace of its own. The new namespace has all mounts of the old one. Enter returns in the
// program that was started again, after it has unmounted the volumes of other processes. Call Enter
// only once: a second call starts the program again.
func Enter() error {
	if Entered() {
		// Programs that this program starts must not inherit the marker.
		return errors.Join(os.Unsetenv(marker), leaveVolumes())
	}
	if os.Geteuid() != 0 {
		return errors.New("a mount namespace needs root: run it as root")
	}
	// A namespace belongs to a thread. After exec, the program has the namespace of the thread that
	// called exec.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("make a mount namespace: %w", err)
	}
	// Mounts here do not propagate to the machine. Unmounts on the machine propagate to this
	// namespace, so that no copy of a mount keeps a filesystem in use.
	if err := unix.Mount("", "/", "", unix.MS_SLAVE|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("keep the mounts of a namespace to itself: %w", err)
	}
	err := unix.Exec("/proc/self/exe", os.Args, append(os.Environ(), marker+"=1"))
	return fmt.Errorf("start again in a mount namespace: %w", err)
}

// shm is a tmpfs, where tests keep disks and guest views (an instance's simulated /dev and /sys).
const shm = "/dev/shm"

// allowDevices makes the device nodes of guest views usable in /dev/shm of this namespace: most
// systems mount /dev/shm with nodev. If this fails, the tests use another directory.
func allowDevices() {
	var fs unix.Statfs_t
	if unix.Statfs(shm, &fs) == nil && fs.Flags&unix.ST_NODEV != 0 {
		flags := uintptr(fs.Flags) & (unix.MS_NOSUID | unix.MS_NOEXEC | unix.MS_RDONLY)
		_ = unix.Mount("", shm, "", unix.MS_REMOUNT|unix.MS_BIND|flags, "")
	}
}

// leaveVolumes unmounts other processes' volumes, only in this namespace. Otherwise a mount here
// would keep the device in use, and the volume's driver would not release the device.
func leaveVolumes() error {
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return fmt.Errorf("unmount the volumes of other processes: %w", err)
	}
	// Tests mount volumes below these directories. Mounts elsewhere belong to the machine.
	homes := []string{os.TempDir(), "/var/tmp", shm}
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
			// Ignore errors: another mount may cover this one, or this one may already be unmounted.
			_ = unix.Unmount(m.Mountpoint, unix.MNT_DETACH)
		}
	}
	return nil
}
