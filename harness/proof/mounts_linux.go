package proof

import (
	"errors"
	"os"
	"slices"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// UnmountBelow unmounts everything below a directory, the last mount first.
func UnmountBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		return unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	})
}

// EndMountsBelow removes every mount below a directory although it may be in use or frozen, as the
// end of an instance does.
func EndMountsBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		_ = SetFrozen(path, false)              // otherwise its device could never be released
		_ = unix.Unmount(path, unix.MNT_DETACH) // it may be gone already
		return nil
	})
}

func eachMountBelow(dir string, do func(path string) error) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		errs = append(errs, do(m.Mountpoint))
	}
	return errors.Join(errs...)
}

// SetFrozen freezes or thaws the filesystem at a path. A filesystem that is not frozen counts as
// thawed.
func SetFrozen(path string, freeze bool) error {
	// These ioctls stop and resume writing to a filesystem (linux/fs.h). x/sys lacks them.
	const freezeRequest, thawRequest = 0xC0045877, 0xC0045878 // FIFREEZE, FITHAW
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	if freeze {
		err = unix.IoctlSetInt(int(root.Fd()), freezeRequest, 0)
	} else if err = unix.IoctlSetInt(int(root.Fd()), thawRequest, 0); errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, root.Close())
}
