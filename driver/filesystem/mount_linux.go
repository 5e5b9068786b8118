package filesystem

import (
	"errors"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Mount is mount.New. It explains why the kernel refuses a filesystem. On a read-only device it
// refuses an ext or xfs whose log has to be replayed with EROFS; for btrfs see proveMountable.
func Mount(d *blockdev.OpenDevice, fsType string, o volume.MountOptions) (*mount.Mount, error) {
	m, err := mount.New(d, fsType, o)
	if errors.Is(err, unix.EROFS) {
		return nil, notReplayed(d, err)
	}
	if csierr.Has(err, csierr.FilesystemFeature) {
		if found, failed := Find(d); failed == nil && len(found) == 1 {
			err = csierr.New(csierr.FilesystemFeature, "%w; the filesystem is damaged, or this node's "+
				"kernel does not support a feature of it: the kernel's log says which; it has %s", err,
				found[0].Features)
		}
	}
	return m, err
}

// notReplayed is the error of a log that cannot be replayed.
func notReplayed(d *blockdev.OpenDevice, cause error) error {
	return csierr.New(csierr.LogNotReplayed, "%w: %s is read-only, and the log of its filesystem "+
		"holds changes to replay, without which synced files may be missing; restore the snapshot to a "+
		"writable volume, and take it again when a pod has used that and is gone", cause, d.Path)
}

// forgetWait is how long ForgetBtrfs waits for the kernel.
const forgetWait = time.Second

// forgetting is full while the kernel is asked to forget a btrfs.
var forgetting = make(chan struct{}, 1)

// ForgetBtrfs is mount.ForgetBtrfs for an unmounted device that holds a btrfs.
//
// The kernel looks at every btrfs of the node for this, and waits for one whose disk hangs in a
// commit. So a device without a btrfs is left out, and the call does not wait for long. Then one
// thread of the process goes on waiting, and no second one begins.
func ForgetBtrfs(d *blockdev.OpenDevice) {
	found, _ := Find(d)
	if !slices.ContainsFunc(found, func(sb Superblock) bool { return sb.Type == volume.Btrfs }) {
		return
	}
	limit := time.NewTimer(forgetWait)
	defer limit.Stop()
	select {
	case forgetting <- struct{}{}:
	case <-limit.C:
		return
	}
	forgotten := make(chan struct{})
	async.Detach(func() {
		mount.ForgetBtrfs("/dev/btrfs-control", d.Path)
		<-forgetting
		close(forgotten)
	})
	select {
	case <-forgotten:
	case <-limit.C:
	}
}
