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

// DetachBelow releases every device whose file is below dir, and returns the devices that it
// found. A file is identified by its device and inode number, because the path that the kernel
// reports may be valid only in a container. Call DetachBelow before the files are removed,
// because it finds no devices of removed files. As in [Device.Detach], the error is [ErrBusy]
// when a device is still in use.
func DetachBelow(ctx context.Context, dir string) ([]Device, error) {
	found, err := below(dir)
	if err != nil {
		return nil, fmt.Errorf("find the loop devices of the files below %s: %w", dir, err)
	}
	// Detach all at once, because one may hold another: a device of dir can itself be the backing
	// file of a device.
	errs := make([]error, len(found))
	var all sync.WaitGroup
	for i, d := range found {
		all.Go(func() { errs[i] = d.Detach(ctx) })
	}
	all.Wait()
	return found, errors.Join(errs...)
}

// fileID identifies a file independently of its path.
type fileID struct{ device, inode uint64 }

// below returns the devices whose file is below dir.
func below(dir string) ([]Device, error) {
	files := map[fileID]bool{}
	err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil {
			err = unix.Lstat(path, &st)
		}
		switch {
		case errors.Is(err, fs.ErrNotExist): // It was removed meanwhile.
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
