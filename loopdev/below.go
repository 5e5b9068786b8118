package loopdev

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"
)

// DetachBelow releases every device whose file lies below dir, and returns those that it found. A
// file is known by its device and inode number, for the path that the kernel tells may be that of a
// container. So DetachBelow comes before the files are removed: afterwards nothing says that they
// lay there. As in [Device.Detach], the error is [ErrBusy] where somebody still held a device.
func DetachBelow(ctx context.Context, dir string) ([]Device, error) {
	found, err := below(dir)
	if err != nil {
		return nil, fmt.Errorf("find the loop devices of the files below %s: %w", dir, err)
	}
	// All at once, since one may hold another: a node below dir can itself be a device's file.
	errs := make([]error, len(found))
	var all sync.WaitGroup
	for i, d := range found {
		all.Go(func() { errs[i] = d.Detach(ctx) })
	}
	all.Wait()
	return found, errors.Join(errs...)
}

// fileID says which file it is, whatever its path.
type fileID struct{ device, inode uint64 }

// below returns the devices whose file lies below dir.
func below(dir string) ([]Device, error) {
	files := map[fileID]bool{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // It went meanwhile.
			return nil
		case err != nil:
			return err
		}
		files[fileID{st.Dev, st.Ino}] = true
		return nil
	})
	if err != nil {
		return nil, err
	}
	devices, err := List()
	if err != nil {
		return nil, err
	}
	var found []Device
	for _, d := range devices {
		if files[fileID{d.BackingDevice, d.BackingInode}] {
			found = append(found, d)
		}
	}
	return found, nil
}
