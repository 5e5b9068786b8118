package harness

import (
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// MountedNumber returns the number of the block device that is mounted: the device of the
// filesystem, or the device node that a mount shows.
func MountedNumber(m *mountinfo.Info) string {
	var st unix.Stat_t
	if err := unix.Stat(m.Mountpoint, &st); err == nil && st.Mode&unix.S_IFMT == unix.S_IFBLK {
		return fmt.Sprintf("%d:%d", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	}
	if m.FSType == "btrfs" { // it has a number of its own
		return btrfsNumber(m.Mountpoint)
	}
	return fmt.Sprintf("%d:%d", m.Major, m.Minor)
}

// btrfsNumber returns the number of the device of a btrfs, or "" if the kernel does not report
// it.
func btrfsNumber(path string) string {
	root, err := os.Open(path)
	if err != nil {
		return ""
	}
	defer func() { _ = root.Close() }()
	const fsInfo = 0x8400941f // BTRFS_IOC_FS_INFO of include/uapi/linux/btrfs.h
	var info [1024]byte       // max_id, num_devices, fsid[16]
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, root.Fd(), fsInfo, uintptr(unsafe.Pointer(&info)))
	if errno != 0 {
		return ""
	}
	id := hex.EncodeToString(info[16:32])
	uuid := strings.Join([]string{id[:8], id[8:12], id[12:16], id[16:20], id[20:]}, "-")
	devices, _ := filepath.Glob(filepath.Join("/sys/fs/btrfs", uuid, "devices/*/dev"))
	if len(devices) != 1 {
		return ""
	}
	number, _ := os.ReadFile(devices[0])
	return strings.TrimSpace(string(number))
}
