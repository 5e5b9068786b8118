package filesystem

import (
	"context"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
)

// writeRecords writes the format-in-progress records durably.
func (d disk) writeRecords(w *os.File, record []byte) error {
	slots := RecordOffsets(d.SizeBytes)
	if len(slots) == 0 {
		return csierr.New(csierr.DeviceWrongSize, "%s has %d bytes, which is too small for a filesystem",
			d.Path, d.SizeBytes)
	}
	return d.writeSectors(w, record, slots)
}

// eraseRecords erases the format-in-progress records. What mkfs wrote is durable: each mkfs syncs
// before it ends. A record that mkfs has overwritten is the filesystem's now.
func (d disk) eraseRecords(w *os.File, v Volume) error {
	return d.eraseSectors(w, v.slots(RecordOffsets, d.SizeBytes), func(b []byte) bool {
		r, err := ParseRecord(b)
		return err == nil && r.GrowFrom == 0 && r.of(v, d.SizeBytes)
	})
}

// writeGrowthRecords writes the records of a growth durably.
func (d disk) writeGrowthRecords(r Record) error {
	record, err := r.Encode()
	if err != nil {
		return err
	}
	return d.WithExclusive(func(w *os.File) error {
		return d.writeSectors(w, record, growthSlots(d.SizeBytes, r.GrowFrom))
	})
}

// growthSlots returns the offsets of growth records behind the end of a filesystem.
func growthSlots(sizeBytes, end int64) []int64 {
	return slices.DeleteFunc(GrowthOffsets(sizeBytes), func(slot int64) bool { return slot < end })
}

// eraseGrowthRecords erases what is left of the records of a growth. The growth is durable: e2fsck
// -f and resize2fs flush the disk before and after the superblock, their last write, and fail if
// that fails (ext2fs_flush2, unix_flush). So does an e2fsck -f after a resize2fs that was killed.
func (d disk) eraseGrowthRecords(w *os.File, sb Superblock) error {
	return d.eraseSectors(w, growthSlots(d.SizeBytes, sb.SizeBytes), func(b []byte) bool {
		r, err := ParseRecord(b)
		return err == nil && r.GrowFrom != 0
	})
}

// writeSectors durably writes one sector to all of the offsets.
func (d disk) writeSectors(w *os.File, sector []byte, offsets []int64) error {
	for _, offset := range offsets {
		if err := blockdev.WriteAt(w, sector, offset); err != nil {
			return d.unwritable(err)
		}
	}
	return d.unwritable(w.Sync())
}

// eraseSectors durably erases the records at the offsets that match selects.
func (d disk) eraseSectors(w *os.File, offsets []int64, match func(b []byte) bool) error {
	for _, offset := range offsets {
		b, err := d.Read(offset, sectorBytes)
		if err != nil {
			return unreadable(err)
		}
		if !match(b) {
			continue
		}
		clear(b[:recordBytes])
		if err := blockdev.WriteAt(w, b, offset); err != nil {
			return d.unwritable(err)
		}
	}
	return d.unwritable(w.Sync())
}

// DropRecord durably erases records of the disk, of a format and of a growth, before the device is
// published as a raw device, whichever volume they name. From then on its content is the
// workload's, and a record would claim that it is not. What was written to a raw device, and only
// looks like a record, stays: it is not beside traces of mkfs alone, nor behind an ext that it
// fits. A device that is mounted is already in use.
func DropRecord(ctx context.Context, device *blockdev.OpenDevice, v Volume, mounted bool) error {
	d := disk{device}
	if v.ReadOnly || mounted {
		return nil
	}
	s, err := d.read(v, recordRegions(d.SizeBytes), nil)
	if err != nil {
		return err
	}
	if len(s.validRecords())+len(s.Growth) > 0 { // where they lie decides whether they count
		found, err := Find(d.OpenDevice)
		if err != nil {
			return err
		}
		if s, err = d.read(v, edgeRegions(d.SizeBytes), found); err != nil {
			return err
		}
	}
	own, err := d.ownRecords(v, s)
	if err != nil {
		return err
	}
	if len(own) == 0 {
		flight.Confirm(ctx, flight.RecordErased, flight.Fields{}, flight.Fields{})
		return nil
	}
	if err := d.MakeWritable(true); err != nil {
		return err
	}
	change := flight.Begin(ctx, flight.RecordErased, flight.Fields{})
	err = d.WithExclusive(func(w *os.File) error {
		return d.eraseSectors(w, own, isRecord)
	})
	change.End(err, flight.Fields{})
	return err
}

// ownRecords returns the offsets of those records in a scan of the disk's ends that were written on
// this disk, or on the one that it was restored from.
func (d disk) ownRecords(v Volume, s scan) (own []int64, err error) {
	formats, growths := s.validRecords(), s.Growth
	if len(formats) > 0 {
		offset, err := d.traces(v, expected{Mkfs: true}).unexplained(s.Regions)
		if err != nil || offset >= 0 {
			formats = nil
		}
		if err != nil {
			return nil, err
		}
	}
	if len(s.Found) != 1 || !s.Found[0].isExt() {
		growths = nil
	}
	for _, r := range slices.Concat(formats, growths) {
		fits := r.GrowFrom == 0 || r.Mounted == s.Found[0].Mounted
		if fits && (r.SizeBytes == d.SizeBytes || r.inherited(v)) {
			own = append(own, r.Offset)
		}
	}
	return own, nil
}

// unwritable wraps an error of a write; nil stays nil.
func (d disk) unwritable(err error) error {
	if err == nil {
		return nil
	}
	return csierr.New(csierr.NodeToolFailed, "write to %s: %w", d.Path, err)
}
