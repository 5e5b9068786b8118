package filesystem

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// TryExclusive is OpenDevice.TryExclusive for a device that is mounted nowhere. A frozen filesystem
// that was unmounted keeps the device in use; TryExclusive thaws it, which releases the device.
func TryExclusive(log *slog.Logger, d *blockdev.OpenDevice) error {
	err := d.TryExclusive()
	if !csierr.Has(err, csierr.DeviceHeld) {
		return err
	}
	if failed := thawUnmounted(log, d); failed != nil {
		return csierr.New(csierr.DeviceHeld, "%w; %w", err, failed)
	}
	return d.TryExclusive()
}

// thawUnmounted thaws the filesystem that keeps the device in use, unless a mount is seen, for
// whose sake it may be frozen. It reaches the filesystem through a detached mount. If it cannot be
// mounted, the device is in use by something else. If that has gone by now, nothing is replayed.
func thawUnmounted(log *slog.Logger, d *blockdev.OpenDevice) error {
	views, err := mount.ReadViews(log)
	if err != nil {
		return err
	}
	if mounts := views.Of(d.Device, nil); len(mounts) > 0 {
		return fmt.Errorf("it is mounted at %s", mount.Describe(mounts))
	}
	found, err := Find(d)
	if err != nil || len(found) != 1 || found[0].Refused != "" {
		return err
	}
	// A filesystem that was mounted read-only accepts only another read-only mount, and most that
	// were mounted for writing accept only another such mount.
	readOnly := unreplayed(found[0].Type)
	m, err := mount.New(d, found[0].Type, readOnly)
	if err != nil {
		m, err = mount.New(d, found[0].Type, volume.MountOptions{})
	}
	if err != nil {
		return nil
	}
	defer func() { _ = m.Close() }()
	root, err := m.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(mount.Thaw(root), root.Close()); err != nil {
		return fmt.Errorf("the filesystem that holds it could not be thawed: %w", err)
	}
	return nil
}

// unreplayed returns the options of a read-only mount that does not even replay a log.
func unreplayed(fsType string) (o volume.MountOptions) {
	o.SetReadOnly()
	switch fsType {
	case volume.Ext3, volume.Ext4:
		o.AddData("noload")
	case volume.XFS:
		o.AddData("norecovery")
	case volume.Btrfs:
		o.Data = append(o.Data, volume.MountOption{Key: "rescue", Value: "nologreplay", HasValue: true})
	}
	return o
}
