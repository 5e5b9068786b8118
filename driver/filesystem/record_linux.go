package filesystem

import (
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

func (d disk) writeRecords(r Record, slots []int64) error {
	record, err := r.Encode()
	if err != nil {
		return err
	}
	return d.WithExclusive(func(w *os.File) error {
		for _, slot := range slots {
			if err := blockdev.WriteAt(w, record, slot); err != nil {
				return d.unwritable(err)
			}
		}
		return d.unwritable(w.Sync())
	})
}

func growthSlots(sizeBytes, end int64) []int64 {
	return slices.DeleteFunc(GrowthOffsets(sizeBytes), func(slot int64) bool { return slot < end })
}

// eraseRecords durably erases the records in the slots that match selects. The writes of mkfs are
// durable before, because each mkfs syncs at its end. So are those of a growth: e2fsck -f and
// resize2fs flush the disk before and after their last write, the superblock, and fail if a flush
// fails (ext2fs_flush2, unix_flush). A slot that mkfs has overwritten belongs to the filesystem.
func (d disk) eraseRecords(w *os.File, slots []int64, match func(Record) bool) error {
	for _, slot := range slots {
		b, err := d.Read(slot, sectorBytes)
		if err != nil {
			return unreadable(err)
		}
		if r, err := ParseRecord(b); err != nil || !match(r) {
			continue
		}
		clear(b[:recordBytes])
		if err := blockdev.WriteAt(w, b, slot); err != nil {
			return d.unwritable(err)
		}
	}
	return d.unwritable(w.Sync())
}

func (d disk) eraseFormat(w *os.File, v Volume) error {
	return d.eraseRecords(w, v.slots(RecordOffsets, d.SizeBytes), func(r Record) bool {
		return r.GrowFrom == 0 && r.of(v, d.SizeBytes)
	})
}

// DropRecord durably erases the records on the disk, of a format and of a growth, before the device
// is published as a raw device, whichever volume they name. After that the content is the
// workload's, and a record would claim that it is the driver's. It erases only real records, not a
// workload's bytes that look like one: everything beside the record of a format is a trace of mkfs,
// and the record of a growth is behind the ext that it describes. It does nothing to a mounted
// device, which is in use already.
func (p *Preparation) DropRecord(mounted bool) error {
	d, v := disk{p.Device}, p.Volume
	if v.ReadOnly || mounted {
		return nil
	}
	s, err := d.read(v, ownRegions(d.SizeBytes), nil)
	if err != nil {
		return err
	}
	if len(s.Records)+len(s.Growth) > 0 { // their position decides whether they are valid
		found, err := Find(d.OpenDevice)
		if err != nil {
			return err
		}
		if s, err = d.read(v, markerRegions(d.SizeBytes), found); err != nil {
			return err
		}
	}
	own, err := d.ownRecords(v, s)
	if err != nil {
		return err
	}
	if len(own) == 0 {
		p.Flight.Confirm(flight.RecordErased, flight.Fields{}, flight.Fields{})
		return nil
	}
	if err := d.MakeWritable(true); err != nil {
		return err
	}
	change := p.Flight.Begin(flight.RecordErased, flight.Fields{})
	err = d.WithExclusive(func(w *os.File) error {
		return d.eraseRecords(w, own, func(Record) bool { return true })
	})
	change.End(err, flight.Fields{})
	return err
}

// ownRecords returns the offsets of those records in a scan that were written on this disk, or on
// the one that it was restored from.
func (d disk) ownRecords(v Volume, s scan) (own []int64, err error) {
	formats, growths := s.Records, s.Growth
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

func (d disk) unwritable(err error) error {
	if err == nil {
		return nil
	}
	return csierr.New(csierr.NodeToolFailed, "write to %s: %w", d.Path, err)
}
