package filesystem

import (
	"bytes"
	"fmt"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// mkfsCommand is the program that makes the filesystem, without any flag that would make it
// overwrite: mkfs.xfs and mkfs.btrfs then refuse a disk that holds something, a second guard behind
// ours. (mke2fs asks only on a terminal, so with it ours is the only one.)
//
// None of them discards: the disk is blank, and the rest of a disk is not touched by mistake
// either. reservedPercent is 0 unless chosen, as Kubernetes has always formatted: no root daemon
// lives on a volume. mke2fs leaves what it can to the kernel, whatever its configuration says, for
// a table of inodes that it wrote whole would cover the marks; and an ext that meets an error turns
// read-only, so that somebody notices.
//
// The filesystem gets the volume's UUID, which tells it from that of a disk that took its place.
// mkfs.btrfs would refuse a UUID that any other disk of the machine shows, such as the disk that
// this volume was restored from, so btrfs gets its UUID afterwards (see identify).
func mkfsCommand(v Volume) (name string, args []string, err error) {
	id := v.makeUUID()
	switch v.FSType {
	case volume.Ext3, volume.Ext4:
		name, args = "mke2fs", []string{"-q", "-t", v.FSType, "-e", "remount-ro",
			"-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"}
		if v.Mkfs.Value("reservedPercent") == "" {
			args = append(args, "-m", "0")
		}
		if id != "" {
			args = append(args, "-U", id)
		}
	case volume.XFS:
		name, args = "mkfs.xfs", []string{"-q", "-K"}
		if id != "" {
			args = append(args, "-m", "uuid="+id)
		}
	case volume.Btrfs:
		name, args = "mkfs.btrfs", []string{"-q", "-K"}
	default:
		return "", nil, fmt.Errorf("no mkfs for filesystem %q", v.FSType)
	}
	return name, slices.Concat(args, v.Mkfs.Args(v.FSType)), nil
}

// format makes a filesystem on a device that inspect found blank, or with a format of this volume
// that was cut off, and looks at what came out. The caller keeps the device open from inspect to
// the mount, so its number stays its own.
//
// A format that is cut off at any instant is done again by the next call: until the first mark is
// durable nothing else has been written; from then on a mark of this volume stands on the disk
// until mkfs's work is durable; and what one call wipes after another one was cut off, the next
// wipes again. A btrfs that mkfs had finished, right before the mark was to be erased, is used as
// it is when a check finds it whole, but for its UUID: nothing tells that nobody has written to it.
func (h disk) format(v Volume, unfinished bool) (Superblock, error) {
	if v.SizeBytes == 0 {
		return Superblock{}, csierr.New(csierr.DiskSizeUnknown, "%s with serial %q is to be formatted, "+
			"but publish_context does not hold %s, so it cannot be compared with the disk; make the "+
			"filesystem by hand, or let a controller publish the volume", h.Path, h.Serial,
			volume.CtxSizeBytes)
	}
	mark, err := RecordOf(v).Encode()
	if err != nil {
		return Superblock{}, err
	}
	if err := h.AwaitNoWriters(); err != nil {
		return Superblock{}, err
	}
	if err := h.Reverify(); err != nil {
		return Superblock{}, err
	}
	if err := h.WithExclusive(func(w *os.File) error { return h.writeRecords(w, mark) }); err != nil {
		return Superblock{}, err
	}
	if unfinished {
		if err := h.wipe(); err != nil {
			return Superblock{}, err
		}
	}
	made, err := h.mkfs(v)
	if err != nil {
		return Superblock{}, err
	}
	return made, h.WithExclusive(func(w *os.File) error { return h.eraseRecords(w, mark) })
}

// mkfs runs the program and proves that what it made is on this device.
func (h disk) mkfs(v Volume) (Superblock, error) {
	name, args, err := mkfsCommand(v)
	if err != nil {
		return Superblock{}, err
	}
	result, err := runTool([]*os.File{h.File}, name, append(args, inherited)...)
	if err != nil {
		return Superblock{}, err
	}
	if result.Exit != 0 {
		return Superblock{}, result.failure(name, h.Path)
	}
	if err := h.Reverify(); err != nil {
		return Superblock{}, err
	}
	made, err := Find(h.OpenDevice)
	if err != nil {
		return Superblock{}, err
	}
	if len(made) != 1 || made[0].Type != v.FSType || made[0].Unfinished {
		return Superblock{}, csierr.New(csierr.NodeToolFailed, "%s ended well, but %s holds no %s", name,
			h.Path, v.FSType)
	}
	return h.identify(made[0], v.makeUUID())
}

// writeMarks says durably on the disk that a format begins.
func (h disk) writeRecords(w *os.File, mark []byte) error {
	slots := RecordOffsets(h.SizeBytes)
	if len(slots) == 0 {
		return csierr.New(csierr.DeviceWrongSize, "%s has %d bytes, which is too small for a filesystem",
			h.Path, h.SizeBytes)
	}
	for _, slot := range slots {
		if err := blockdev.WriteAt(w, mark, slot); err != nil {
			return h.unwritable(err)
		}
	}
	return h.unwritable(w.Sync())
}

// eraseMarks takes the marks away; what mkfs made is durable, for each mkfs sees to that before it
// ends. One that mkfs has written over is the filesystem's now.
func (h disk) eraseRecords(w *os.File, mark []byte) error {
	for _, slot := range RecordOffsets(h.SizeBytes) {
		b, err := h.Read(slot, sectorBytes)
		if err != nil {
			return unreadable(err)
		}
		if !bytes.Equal(b, mark) {
			continue
		}
		clear(b)
		if err := blockdev.WriteAt(w, b, slot); err != nil {
			return h.unwritable(err)
		}
	}
	return h.unwritable(w.Sync())
}

// wipe clears what a format that was cut off has left in the areas, and proves the disk blank
// again but for the marks.
func (h disk) wipe() error {
	// The kernel may remember a btrfs that mkfs had announced.
	ForgetBtrfs(h.Path)
	s, err := h.read(markerRegions(h.SizeBytes), nil)
	if err != nil {
		return err
	}
	if err := h.WithExclusive(func(w *os.File) error { return h.clear(w, s) }); err != nil {
		return err
	}
	found, err := Find(h.OpenDevice)
	if err != nil {
		return err
	}
	if s, err = h.scan(found); err != nil {
		return err
	}
	return s.checkBlank()
}

// clear writes zeroes over the spots that are not zero.
func (h disk) clear(w *os.File, s scan) error {
	slots := RecordOffsets(h.SizeBytes)
	for _, p := range s.Regions {
		for at := int64(0); at < p.Bytes; at += sectorBytes {
			spot := p.Data[at:min(at+sectorBytes, p.Bytes)]
			if nonZero(spot) < 0 || slices.Contains(slots, p.Offset+at) {
				continue
			}
			clear(spot)
			if err := blockdev.WriteAt(w, spot, p.Offset+at); err != nil {
				return h.unwritable(err)
			}
		}
	}
	return h.unwritable(w.Sync())
}

// unwritable gives an error of a write the words a person needs; nil stays nil.
func (h disk) unwritable(err error) error {
	if err == nil {
		return nil
	}
	return csierr.New(csierr.NodeToolFailed, "write to %s: %w", h.Path, err)
}
