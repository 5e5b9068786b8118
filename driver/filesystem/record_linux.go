package filesystem

import (
	"bytes"
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
func (d disk) eraseRecords(w *os.File, record []byte) error {
	return d.eraseSectors(w, RecordOffsets(d.SizeBytes), func(b []byte) bool {
		return bytes.Equal(b, record)
	})
}

func (d disk) growthRecord(v Volume, sb Superblock) Record {
	return Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: d.SizeBytes, Filesystem: sb.Type,
		GrowFrom: sb.SizeBytes, Mounted: sb.Mounted}
}

// writeGrowthRecords writes the records of a growth durably, behind the filesystem's old end.
func (d disk) writeGrowthRecords(r Record) error {
	record, err := r.Encode()
	if err != nil {
		return err
	}
	slots := slices.DeleteFunc(GrowthOffsets(d.SizeBytes), func(slot int64) bool {
		return slot < r.GrowFrom
	})
	return d.WithExclusive(func(w *os.File) error { return d.writeSectors(w, record, slots) })
}

// eraseGrowthRecords erases what is left of the records of a growth. The growth is durable: e2fsck
// -f and resize2fs flush the disk before and after the superblock, their last write, and fail if
// that fails (ext2fs_flush2, unix_flush). So does an e2fsck -f after a resize2fs that was killed.
func (d disk) eraseGrowthRecords(w *os.File) error {
	return d.eraseSectors(w, GrowthOffsets(d.SizeBytes), func(b []byte) bool {
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

// eraseSectors durably erases the sectors at the offsets that match selects.
func (d disk) eraseSectors(w *os.File, offsets []int64, match func(b []byte) bool) error {
	for _, offset := range offsets {
		b, err := d.Read(offset, sectorBytes)
		if err != nil {
			return unreadable(err)
		}
		if !match(b) {
			continue
		}
		clear(b)
		if err := blockdev.WriteAt(w, b, offset); err != nil {
			return d.unwritable(err)
		}
	}
	return d.unwritable(w.Sync())
}

// DropRecord durably erases the records of an unfinished format of this volume before the device is
// published as a raw device. From then on its content is the workload's, and a record would claim
// that it is not. A device that is mounted is already in use. A filesystem that has been in use
// keeps its bytes, because a record is ignored there.
func DropRecord(ctx context.Context, device *blockdev.OpenDevice, v Volume, mounted bool) error {
	d := disk{device}
	if v.ReadOnly || mounted {
		return nil
	}
	var slots []region
	for _, slot := range RecordOffsets(d.SizeBytes) {
		slots = append(slots, region{slot, sectorBytes, "the driver's own record"})
	}
	s, err := d.read(slots, nil)
	if err != nil {
		return err
	}
	own := slices.DeleteFunc(s.validRecords(), func(r foundRecord) bool {
		return !r.of(v, d.SizeBytes)
	})
	if len(own) == 0 {
		flight.Confirm(ctx, flight.RecordErased, flight.Fields{}, flight.Fields{})
		return nil
	}
	found, err := Find(d.OpenDevice)
	if err != nil {
		return err
	}
	if slices.ContainsFunc(found, func(sb Superblock) bool {
		return !sb.Fresh && !sb.MaybeFresh && !sb.Unfinished
	}) {
		return nil
	}
	if err := d.MakeWritable(true); err != nil {
		return err
	}
	change := flight.Begin(ctx, flight.RecordErased, flight.Fields{})
	err = d.WithExclusive(func(w *os.File) error {
		for _, r := range own {
			// read has cleared the record in what it returned.
			if err := blockdev.WriteAt(w, s.at(r.Offset, sectorBytes), r.Offset); err != nil {
				return d.unwritable(err)
			}
		}
		return d.unwritable(w.Sync())
	})
	change.End(err, flight.Fields{})
	return err
}

// unwritable wraps an error of a write; nil stays nil.
func (d disk) unwritable(err error) error {
	if err == nil {
		return nil
	}
	return csierr.New(csierr.NodeToolFailed, "write to %s: %w", d.Path, err)
}
