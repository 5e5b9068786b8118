package mount

import (
	"errors"
	"fmt"
	"os"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// A filesystem that is frozen (fsfreeze, a backup that was killed) and then unmounted lives on
// without a mount and keeps its device for ever. So NodeUnstageVolume, where nobody has the volume
// any more, ends a freeze, and NodeStageVolume that of what nothing shows. No other call does: who
// has frozen the filesystem may rely on it.

// ioctlThaw is FITHAW of linux/fs.h, which x/sys lacks.
const ioctlThaw = 0xC0045878

// Thaw ends the freeze of the filesystem that root is the root directory of, if it is frozen.
func Thaw(root *os.File) error {
	err := unix.IoctlSetInt(int(root.Fd()), ioctlThaw, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil // it is not frozen
	}
	return err
}

// ThawAt ends the freeze of the filesystem that a mount shows. Who has something open in the
// mount may be at work on the frozen filesystem, so then it stays frozen: the mount cannot be
// unmounted either.
func ThawAt(m *mountinfo.Info) error {
	// The first call with this flag only answers whether the mount is in use. A second one unmounts
	// it; then a filesystem that lives on is found at the end.
	err := unix.Unmount(m.Mountpoint, unix.MNT_EXPIRE|unix.UMOUNT_NOFOLLOW)
	if !errors.Is(err, unix.EAGAIN) {
		return nil
	}
	root, err := openMount(m)
	if err != nil {
		return err
	}
	return errors.Join(Thaw(root), root.Close())
}

// openMount opens the root directory of a mount. A mount that is hidden by another one, or is in
// another namespace, is an error.
func openMount(m *mountinfo.Info) (*os.File, error) {
	root, err := os.OpenFile(m.Mountpoint, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|
		unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Statx_t
	err = unix.Statx(int(root.Fd()), "", unix.AT_EMPTY_PATH|unix.AT_STATX_DONT_SYNC,
		unix.STATX_MNT_ID, &st)
	if err == nil && (st.Mask&unix.STATX_MNT_ID == 0 || st.Mnt_id != uint64(m.ID)) {
		err = fmt.Errorf("%q leads to another mount", m.Mountpoint)
	}
	if err != nil {
		_ = root.Close()
		return nil, err
	}
	return root, nil
}
