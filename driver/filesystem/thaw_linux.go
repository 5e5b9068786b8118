package filesystem

import (
	"errors"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// TryExclusive is claim for a device that nothing shows: a frozen filesystem that holds it without a
// mount is thawed, and so released.
func TryExclusive(h *blockdev.OpenDevice) error {
	err := h.TryExclusive()
	if !csierr.Has(err, csierr.DeviceHeld) {
		return err
	}
	if failed := thawUnmounted(h); failed != nil {
		return csierr.New(csierr.DeviceHeld, "%w; the filesystem that holds it could not be thawed: %v",
			err,
			failed)
	}
	return h.TryExclusive()
}

// thawUnmounted mounts the filesystem that holds the device aside, which is the only way to it, and
// thaws it. When it cannot be mounted, something else holds the device.
func thawUnmounted(h *blockdev.OpenDevice) error {
	found, err := Find(h)
	if err != nil || len(found) != 1 {
		return err
	}
	// Only a mount for reading joins a filesystem that was mounted so, and with most the reverse.
	readOnly := volume.MountOptions{}
	readOnly.SetReadOnly()
	m, err := mount.New(h, found[0].Type, readOnly)
	if err != nil {
		m, err = mount.New(h, found[0].Type, volume.MountOptions{})
	}
	if err != nil {
		return nil
	}
	defer func() { _ = m.Close() }()
	root, err := m.Root()
	if err != nil {
		return err
	}
	return errors.Join(mount.Thaw(root), root.Close())
}
