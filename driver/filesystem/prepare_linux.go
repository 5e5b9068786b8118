package filesystem

import (
	"context"
	"log/slog"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// Preparation makes the filesystem of one volume ready to be mounted.
type Preparation struct {
	Device *blockdev.OpenDevice // open from the first look to the mount
	Volume Volume
	Scans  *ZeroScans
	Log    *slog.Logger
	// Begin is called after every proof, right before the first write to the disk or the mount.
	Begin func() error
}

// Run brings a filesystem onto the device if it is blank, and checks and grows what is there. It
// reports whether the filesystem is to grow once it is mounted. It does not stop when the caller
// does: what it began it ends.
func (p *Preparation) Run(ctx context.Context) (grow bool, err error) {
	h, v := disk{p.Device}, p.Volume
	found, err := h.inspect(v)
	if err != nil {
		return false, err
	}
	if found.NeedsCheck && !v.ReadOnly {
		if found.Unfinished, err = h.btrfsBroken(); err != nil {
			return false, err
		}
	}
	sb := found.Filesystem
	switch {
	case (found.Blank || found.Unfinished) && v.ReadOnly:
		return false, csierr.New(csierr.DeviceReadOnly, "%s holds no filesystem yet and is read-only, "+
			"so it "+
			"cannot get one", h.Path)
	case found.Blank, found.Unfinished:
		if err := p.proveBlank(ctx, found.Unfinished); err != nil {
			return false, err
		}
		if err := p.Begin(); err != nil {
			return false, err
		}
		if found.Filesystem, err = h.format(v, found.Unfinished); err != nil {
			return false, err
		}
		p.Scans.Drop(v.ID) // it is not blank any more
	case !sb.isOf(v) && (!found.NeedsCheck || v.ReadOnly):
		return false, h.wrongFilesystem(sb, v.FilesystemUUID)
	case sb.Type != v.FSType:
		return false, csierr.New(csierr.DiskNotBlank, "%s holds an %s filesystem, but the request is "+
			"for %s; "+
			"the driver does not format it", h.Path, sb.Type, v.FSType)
	default:
		if err := p.proveMountable(ctx, &found); err != nil {
			return false, err
		}
	}
	if !v.ReadOnly {
		if err := h.prepare(v, found); err != nil {
			return false, err
		}
	}
	return found.Grow, nil
}

// proveMountable makes the same proofs for a filesystem as are made before a format: nobody has the
// disk, and it is still the same one. It finds out whether the filesystem may grow.
func (p *Preparation) proveMountable(ctx context.Context, c *state) error {
	if err := TryExclusive(p.Device); err != nil {
		return err
	}
	if err := p.Device.AwaitNoWriters(); err != nil {
		return err
	}
	if err := p.Device.Reverify(); err != nil {
		return err
	}
	if !p.Volume.ReadOnly {
		var err error
		if c.Grow, err = p.mayGrow(ctx, *c); err != nil {
			return err
		}
	}
	return p.Begin()
}

// mayGrow decides whether the filesystem grows to its device: only where that is proven to hold
// nothing. Otherwise it is used as it is, for what lies behind it may be somebody's data.
func (p *Preparation) mayGrow(ctx context.Context, c state) (bool, error) {
	if c.Begun {
		return true, nil // it was proven before the marks of the growth were written
	}
	if !c.Filesystem.grows(p.Device.SizeBytes) {
		return false, nil
	}
	err := p.proveTail(ctx, c.Filesystem.SizeBytes)
	if csierr.Has(err, csierr.DiskNotBlank) || csierr.Has(err, csierr.DeviceUnreadable) {
		p.Log.WarnContext(ctx, "the filesystem is smaller than its disk and is not grown",
			"volume", p.Volume.ID, "device", p.Device.Path, "filesystem_bytes", c.Filesystem.SizeBytes,
			"disk_bytes", p.Device.SizeBytes, "error", err)
		return false, nil
	}
	return err == nil, err
}

// proveTail proves that the device holds nothing but zeroes from an offset on: read whole, but for
// what the rack made blank when the driver restored the disk. There a sample tells.
func (p *Preparation) proveTail(ctx context.Context, from int64) error {
	blank := max(from, p.Volume.blankFrom(p.Device.SizeBytes))
	if from < blank {
		if err := p.proveZero(ctx, from, blank); err != nil {
			return err
		}
	}
	s, err := disk{p.Device}.read(tailRegions(p.Device.SizeBytes, blank), nil)
	if err != nil {
		return err
	}
	if offset, owner, dirty := s.firstNonZero(); dirty {
		return csierr.New(csierr.DiskNotBlank, "%s is not blank behind its filesystem: the first byte "+
			"that is not zero is at offset %d (%s)", p.Device.Path, offset, owner)
	}
	return nil
}
