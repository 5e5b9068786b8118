package node

import (
	"cmp"
	"errors"
	"fmt"
	"os"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// NodeUnpublishVolume and NodeUnstageVolume get an id and a path, and the path may show something
// other than the volume. Another volume is left alone, and the call succeeds: CSI wants OK for a
// volume that is not at the path, and an orchestrator has to be able to go on. A mount that no
// volume has is an error: nobody knows what it hides, and no orchestrator puts one there. So is a
// mount that a record contradicts, and one for which neither a record nor its own look speaks.

// ownMounts returns those of the mounts at an orchestrator's path that are the volume's. It returns
// none when the path shows another volume.
func (v heldVolume) ownMounts(layers []*mountinfo.Info, reason csierr.Reason) ([]stagedDisk,
	error) {
	var own []stagedDisk
	var others string
	for _, m := range layers {
		d, err := v.mountedDisk(m, reason)
		if err != nil {
			return nil, err
		}
		why, certain := v.record.otherVolume(d.Serial)
		if d.Path == "" && !certain {
			why = goneToo(v.node.host(), v.record.all())
		}
		switch {
		case why != "" && certain:
			others = why
		case why == "" && ofVolume(m, d, certain):
			own = append(own, stagedDisk{Device: d, layer: m})
		default:
			return nil, csierr.New(reason, "%q has %s mounted, %s; it is left alone", m.Mountpoint,
				m.Source, cmp.Or(why, "and nothing shows that it is the volume's"))
		}
	}
	if others == "" {
		return own, nil
	}
	path := layers[0].Mountpoint
	if len(own) > 0 {
		return nil, csierr.New(reason, "%q shows the volume, and mounted over or under it %s; unmount "+
			"what is not the volume's by hand", path, others)
	}
	v.node.log().Warn("what is mounted at the path is left alone, for it is not the volume's",
		"volume", v.id, "path", path, "shown", others)
	return nil, nil
}

// claimPath locks a path for one call, of any process of the driver, that mounts something there:
// two volumes at one path could not be told apart later. The lock is on what the mount will hide,
// and it ends with the descriptor. Where the kernel cannot lock it, nothing is locked.
func claimPath(path string, reason csierr.Reason) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, csierr.New(csierr.PathInvalid, "open the path of the mount: %w", err)
	}
	var table mount.Table
	if err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); errors.Is(err, unix.EWOULDBLOCK) {
		err = csierr.New(csierr.DeviceLocked, "another call is about to mount at %q; repeat this one "+
			"later", path)
	} else if table, err = mount.ReadTable(); err == nil && table.Top(path) != nil {
		err = csierr.New(reason, "%q has %s mounted by now", path, table.Top(path).Source)
	}
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

// ofVolume reports whether a mount of the disk, the zero device if it is gone, may be taken for the
// volume's: a record says so, or the driver made the mount. A btrfs may lose its source when its
// device is scanned.
func ofVolume(m *mountinfo.Info, d blockdev.Device, recorded bool) bool {
	node, _ := mount.NodeRoot(m)
	isDisk := node || d.Path != "" || mount.IsDiskPath(m.Source)
	return isDisk && (recorded || mount.Made(m) ||
		m.FSType == volume.Btrfs && (d.Path == "" || volume.IsOwnName(d.Serial)))
}

// undoError converts the error of a call that takes a volume away. CSI has no ALREADY_EXISTS for
// those: what is in the way may go, and the call is repeated until it has.
func undoError(err error) error {
	err = csierr.Convert(err, csierr.NodeToolFailed)
	if csierr.IsAlreadyExists(err) {
		err = csierr.Coded(codes.Internal, csierr.ReasonOf(err), "%w", err)
	}
	return err
}

// goneToo returns, as text for an error, a volume whose record names a disk that is gone.
// Nobody can tell what the mount of such a disk was.
func goneToo(host blockdev.Host, records []volumeRecord) string {
	for _, r := range records {
		if _, err := host.Lookup(volume.Serial(r.Disk)); csierr.Has(err, csierr.DeviceNotFound) {
			return fmt.Sprintf("whose disk is gone, as is that of volume %s", csierr.Plain(r.Volume))
		}
	}
	return ""
}

// mountedDisk returns the disk of this instance that a mount shows, or the zero device if it is no
// longer there.
func (v heldVolume) mountedDisk(m *mountinfo.Info, reason csierr.Reason) (blockdev.Device, error) {
	node, deleted := mount.NodeRoot(m)
	if !node && !volume.IsFilesystem(m.FSType) {
		return blockdev.Device{}, csierr.New(reason, "%q has a mount of type %s, which no volume has; "+
			"it is left alone", m.Mountpoint, m.FSType)
	}
	if deleted {
		return blockdev.Device{}, nil // the number of a node that is gone may be another disk's by now
	}
	host := v.node.host()
	known, _ := v.record.load()
	likely, _ := host.Lookup(volume.Serial(known.Disk))
	major, minor, err := mount.Device(m, likely)
	d, missing := host.WithNumber(major, minor)
	_, twins := errors.AsType[*mount.TwinsError](err)
	switch {
	case twins && mount.Shows(m, d):
	case twins, errors.Is(err, mount.ErrBtrfsDevices):
		return blockdev.Device{}, csierr.New(reason, "%q: %w", m.Mountpoint, err)
	case err != nil, csierr.Has(missing, csierr.DeviceNotFound):
		return blockdev.Device{}, nil //nolint:nilerr // such a mount has lost its device
	}
	return d, missing
}
