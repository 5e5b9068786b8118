//go:build e2e

package e2e

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// releaseDisks releases the loop devices whose files are the rack's disks: bindings outlive the
// containers that made them.
func releaseDisks(rackDir string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	files, err := filepath.Glob(filepath.Join(rackDir, "disks", "*"))
	if err != nil {
		return err
	}
	ours := map[[2]uint64]bool{}
	for _, file := range files {
		var st unix.Stat_t
		if err := unix.Stat(file, &st); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		ours[[2]uint64{st.Dev, st.Ino}] = true
	}
	devices, err := loopdev.List()
	if err != nil {
		return err
	}
	var errs []error
	for _, d := range devices {
		if ours[[2]uint64{d.BackingDevice, d.BackingInode}] {
			errs = append(errs, d.Detach(ctx))
		}
	}
	return errors.Join(errs...)
}
