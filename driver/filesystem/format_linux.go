package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// format formats a device that was proven blank. If unfinished is true, the device was proven to
// hold only an unfinished format of this volume, in the chunks at the offsets in the slice left.
func (p *Preparation) format(unfinished bool, left []int64) (Superblock, error) {
	d, v := disk{p.Device}, p.Volume
	proof := "read whole"
	if v.madeBlank() && !unfinished {
		proof = "a sample read, of a disk that was created blank"
	}
	p.Flight.Note(flight.ProvenBlank, flight.Fields{Detail: proof})
	if unfinished {
		p.Flight.Note(flight.FormatResumed, flight.Fields{Filesystem: v.FSType})
	}
	name, args, err := mkfsCommand(v)
	if err != nil {
		return Superblock{}, err
	}
	change := p.Flight.Begin(flight.Formatted, flight.Fields{Filesystem: v.FSType,
		Detail: strings.Join(append([]string{name}, args...), " ")})
	made, err := d.format(v, left, name, args)
	change.End(err, flight.Fields{})
	return made, err
}

// mkfsCommand returns the name and the arguments of the mkfs program for the volume's filesystem.
// No argument forces the program to overwrite content, so mkfs.xfs and mkfs.btrfs refuse a disk
// that is not blank. mke2fs refuses no such disk: it only asks a user on a terminal.
//
// The arguments disable discards, which could only harm a blank disk. reservedPercent defaults to
// 0, as in Kubernetes' own formatting, because no daemon of root writes to a volume. The kernel
// initializes the inode tables of an ext4 later: if mke2fs wrote all, it could overwrite the
// driver's records. An ext becomes read-only at its first error, so that the error is noticed.
//
// The filesystem gets the volume's UUID, so the driver notices if another disk is attached instead.
// mkfs.btrfs refuses a UUID that another disk of the machine has, and a restored disk may get the
// UUID of its origin. So setBtrfsUUID sets the UUID of a btrfs after mkfs.
//
// The arguments switch each feature on or off (see newFeatures). The mkfs program refuses unknown
// features, so xfsSwitches and btrfsSwitches ask it which features it knows. checkNewFeatures finds
// features that a newer program switches on without listing them.
func mkfsCommand(v Volume) (name string, args []string, err error) {
	id := v.makeUUID()
	switch v.FSType {
	case volume.Ext3, volume.Ext4:
		name, args = "mke2fs", []string{"-q", "-t", v.FSType, "-e", "remount-ro",
			"-O", "none," + strings.Join(v.newFeatures(), ","),
			"-E", "nodiscard,lazy_itable_init=1,lazy_journal_init=1"}
		if v.Mkfs.Value("reservedPercent") == "" {
			args = append(args, "-m", "0")
		}
		if id != "" {
			args = append(args, "-U", id)
		}
	case volume.XFS:
		switches, err := xfsSwitches(v)
		if err != nil {
			return "", nil, err
		}
		name, args = "mkfs.xfs", append([]string{"-q", "-K"}, switches...)
		if id != "" {
			args = append(args, "-m", "uuid="+id)
		}
	case volume.Btrfs:
		switches, err := btrfsSwitches(v)
		if err != nil {
			return "", nil, err
		}
		name, args = "mkfs.btrfs", append([]string{"-q", "-K", "-d", "single", "-m", "dup",
			"-n", "16384", "-s", "4096", "--csum", "crc32c"}, switches...)
	default:
		return "", nil, fmt.Errorf("no mkfs for filesystem %q", v.FSType)
	}
	return name, slices.Concat(args, v.Mkfs.Args(v.FSType)), nil
}

// xfsSwitch matches a 0|1 option, or the letter of an option group, in the usage text of mkfs.xfs.
var xfsSwitch = regexp.MustCompile(`\[-(\w) |(\w+)=0\|1[],]`)

// xfsSwitches returns arguments that set each 0|1 option of the groups -m, -i and -n in the usage
// text of mkfs.xfs: those in newFeatures() to 1, others to 0. It omits those that the volume sets.
func xfsSwitches(v Volume) (args []string, err error) {
	usage, err := runTool(nil, "mkfs.xfs")
	text := strings.ReplaceAll(usage.Stderr, "inobtcnt", "inobtcount") // wrong name in xfsprogs 5.10
	group := ""
	for _, match := range xfsSwitch.FindAllStringSubmatch(text, -1) {
		switch name := match[2]; {
		case name == "":
			group = match[1]
		case !strings.ContainsAny(group, "min") || v.Mkfs.Value(name) != "":
		case slices.Contains(v.newFeatures(), name):
			args = append(args, "-"+group, name+"=1")
		default:
			args = append(args, "-"+group, name+"=0")
		}
	}
	return args, err
}

// btrfsSwitch matches a feature in the list that mkfs.btrfs prints, but not an alias of a feature.
var btrfsSwitch = regexp.MustCompile(`(?m)^([a-z0-9-]+) +- .*\)$`)

// btrfsSwitches sets features as newFeatures() says. Older mkfs.btrfs lists some of them under -R.
func btrfsSwitches(v Volume) (args []string, err error) {
	for _, flag := range []string{"-O", "-R"} {
		list, err := runTool(nil, "mkfs.btrfs", flag, "list-all")
		if err != nil {
			return nil, err
		}
		for _, match := range btrfsSwitch.FindAllStringSubmatch(list.Stdout+list.Stderr, -1) {
			name := match[1]
			if !slices.Contains(v.newFeatures(), strings.ReplaceAll(name, "-", "_")) {
				name = "^" + name
			}
			if !slices.Contains(args, name) {
				args = append(args, flag, name)
			}
		}
	}
	return args, nil
}

// format makes a filesystem on the device and verifies the result. The device is proven blank
// except for the chunks at the offsets in the slice left, which an unfinished format wrote.
//
// If a format is cut off, at any instant, a later call repeats it. The driver writes the records
// first, and starts mkfs when they are durable. At least one record of this volume stays on the
// disk until mkfs's writes are durable. If the wipe of a repeated call is cut off, the next call
// wipes again. If mkfs had finished a btrfs, somebody may have written to it since. So the driver
// keeps the btrfs if a check finds no errors (see finishFormat).
func (d disk) format(v Volume, left []int64, name string, args []string) (Superblock, error) {
	if v.SizeBytes == 0 {
		return Superblock{}, csierr.New(csierr.DiskSizeUnknown, "%s with serial %q is to be formatted, "+
			"but publish_context does not hold %s, so it cannot be compared with the disk; make the "+
			"filesystem by hand, or let a controller publish the volume", d.Path, d.Serial,
			volume.CtxSizeBytes)
	}
	slots := RecordOffsets(d.SizeBytes)
	if len(slots) == 0 {
		return Superblock{}, csierr.New(csierr.DeviceWrongSize, "%s has %d bytes, which is too small "+
			"for a filesystem", d.Path, d.SizeBytes)
	}
	if err := d.AwaitNoWriters(); err != nil {
		return Superblock{}, err
	}
	if err := d.Reverify(); err != nil {
		return Superblock{}, err
	}
	if err := d.writeRecords(RecordOf(v), slots); err != nil {
		return Superblock{}, err
	}
	if len(left) > 0 {
		if err := d.wipe(v, left); err != nil {
			return Superblock{}, err
		}
	}
	made, err := d.mkfs(v, name, args)
	if err != nil {
		return Superblock{}, err
	}
	return made, d.WithExclusive(func(w *os.File) error { return d.eraseFormat(w, v) })
}

func (d disk) mkfs(v Volume, name string, args []string) (Superblock, error) {
	result, err := runTool(d.Inherited, name, append(args, inherited)...)
	if err != nil {
		return Superblock{}, err
	}
	if result.Exit != 0 {
		return Superblock{}, result.failure(name, d.Path)
	}
	if err := d.Reverify(); err != nil {
		return Superblock{}, err
	}
	made, err := Find(d.OpenDevice)
	if err != nil {
		return Superblock{}, err
	}
	if len(made) != 1 || made[0].Type != v.FSType || made[0].Unfinished {
		return Superblock{}, csierr.New(csierr.NodeToolFailed, "%s succeeded, but %s holds no %s", name,
			d.Path, v.FSType)
	}
	return d.identify(made[0], v)
}

// finishFormat completes a format that was cut off before its last steps: it gives the btrfs the
// volume's UUID and erases the records. The caller has found records of this volume, and no errors
// in the btrfs. While records are on the disk, each later call repeats the check, and formats the
// disk again if the check fails.
//
// If mkfs or the driver was killed, its last writes may be in the kernel's cache only. So
// finishFormat syncs the disk before it erases the records.
func (d disk) finishFormat(v Volume, sb Superblock) error {
	if err := d.checkNewFeatures(sb, v); err != nil {
		return err
	}
	if !sb.isOf(v) {
		if _, err := d.setBtrfsUUID(sb, v.FilesystemUUID); err != nil {
			return err
		}
	}
	return d.WithExclusive(func(w *os.File) error {
		if err := w.Sync(); err != nil {
			return d.unwritable(err)
		}
		return d.eraseFormat(w, v)
	})
}

// wipe overwrites with zeroes what an unfinished format wrote to the chunks, and proves that the
// disk is blank again except for the records. It overwrites the first 512 bytes of btrfs
// superblocks and tree blocks last, because those bytes identify the block. So if the wipe is cut
// off or a write fails, the next call still recognizes what is left.
func (d disk) wipe(v Volume, chunks []int64) error {
	if err := d.WithExclusive(func(w *os.File) error {
		if err := d.clearSectors(w, chunks, false); err != nil {
			return err
		}
		return d.clearSectors(w, chunks, true)
	}); err != nil {
		return err
	}
	found, err := Find(d.OpenDevice)
	if err != nil {
		return err
	}
	s, err := d.scan(v, found)
	if err != nil {
		return err
	}
	return s.checkBlank()
}

// clearSectors durably zeroes the chunks except for the records. If heads is false, it keeps the
// first 512 bytes of btrfs blocks. Even in a power failure, a disk writes 512 bytes wholly or not.
func (d disk) clearSectors(w *os.File, chunks []int64, heads bool) error {
	const wholeBytes = 512
	slots := RecordOffsets(d.SizeBytes)
	for _, chunk := range chunks {
		b, err := d.Read(chunk, min(chunkBytes, d.SizeBytes-chunk))
		if err != nil {
			return unreadable(err)
		}
		for at := int64(0); at < int64(len(b)); at += sectorBytes {
			sector := b[at:min(at+sectorBytes, int64(len(b)))]
			rest := sector
			if !heads && (btrfsFirstHeader(sector) || btrfsSuper(sector, chunk+at)) {
				rest = sector[min(wholeBytes, len(sector)):]
			}
			if nonZero(rest) < 0 || slices.Contains(slots, chunk+at) {
				continue
			}
			clear(rest)
			if err := blockdev.WriteAt(w, sector, chunk+at); err != nil {
				return d.unwritable(err)
			}
		}
	}
	return d.unwritable(w.Sync())
}

func (sb Superblock) isOf(v Volume) bool {
	return v.FilesystemUUID == "" || sb.UUID.String() == v.FilesystemUUID
}

func (d disk) wrongFilesystem(sb Superblock, want string) error {
	return csierr.New(csierr.WrongFilesystem, "%s with serial %q holds an %s filesystem with the "+
		"UUID %s, but the volume's has the UUID %s; is another disk attached in its place?",
		d.Path, d.Serial, sb.Type, sb.UUID, want)
}

// identify checks that the driver may mount the new filesystem, and that it has the volume's
// features and UUID. A btrfs gets the UUID here. A volume without a UUID accepts every UUID.
func (d disk) identify(made Superblock, v Volume) (Superblock, error) {
	if err := d.allow(made); err != nil {
		return Superblock{}, err
	}
	if err := d.checkNewFeatures(made, v); err != nil {
		return Superblock{}, err
	}
	want := v.makeUUID()
	if made.Type == volume.Btrfs && want != "" {
		return d.setBtrfsUUID(made, want)
	}
	if want != "" && made.UUID.String() != want {
		return Superblock{}, d.wrongFilesystem(made, want)
	}
	return made, nil
}

func (d disk) checkNewFeatures(made Superblock, v Volume) error {
	if got, want := made.chosenFeatures(), v.newFeatures(); !slices.Equal(got, want) {
		return csierr.New(csierr.NodeToolFailed, "the new %s filesystem on %s has the features %s, but "+
			"the driver asked for %s; give the node a version of the mkfs program that makes these, and "+
			"if this error stays, make the volume anew",
			made.Type, d.Path, strings.Join(got, " "), strings.Join(want, " "))
	}
	return nil
}

// setBtrfsUUID gives an unmounted btrfs the volume's UUID, as btrfstune -M does: the tree blocks
// keep the UUID from mkfs, and the superblock contains both UUIDs. It writes the first superblock
// last, because the copies are used only if the first is lost.
func (d disk) setBtrfsUUID(sb Superblock, want string) (Superblock, error) {
	id, err := uuid.Parse(want)
	if err != nil || !sb.ChecksumOK {
		return sb, d.wrongFilesystem(sb, want)
	}
	err = d.WithExclusive(func(w *os.File) error {
		for _, at := range []int64{256 << 30, 64 << 20, btrfsOffset} {
			if at+btrfsBytes > d.SizeBytes {
				continue
			}
			b, err := d.Read(at, btrfsBytes)
			if err != nil {
				return unreadable(err)
			}
			if !changeBtrfsUUID(b, id) {
				continue
			}
			if err := errors.Join(blockdev.WriteAt(w, b, at), w.Sync()); err != nil {
				return d.unwritable(err)
			}
		}
		return nil
	})
	if err != nil {
		return sb, err
	}
	found, err := Find(d.OpenDevice)
	switch {
	case err != nil:
		return sb, err
	case len(found) != 1 || found[0].UUID != id || !found[0].ChecksumOK:
		return sb, d.wrongFilesystem(sb, want)
	}
	return found[0], nil
}

func changeBtrfsUUID(b []byte, id uuid.UUID) bool {
	if string(b[0x40:0x48]) != "_BHRfS_M" {
		return false
	}
	le := binary.LittleEndian
	incompat := le.Uint64(b[btrfsIncompat:])
	if incompat&btrfsIncompatMetadataUUID == 0 {
		copy(b[btrfsMetadataUUID:], b[btrfsFSID:btrfsFSID+16])
		le.PutUint64(b[btrfsIncompat:], incompat|btrfsIncompatMetadataUUID)
	}
	copy(b[btrfsFSID:], id[:])
	le.PutUint32(b, crc32.Checksum(b[0x20:], castagnoli))
	return true
}

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

// eraseRecords durably erases each record in the slots for which match() returns true. What the
// tools wrote is durable already. Each mkfs syncs at its end. e2fsck -f and resize2fs write the
// superblock last, flush the disk before and after that, and fail if a flush fails (ext2fs_flush2,
// unix_flush). A slot without a record may contain data of the filesystem, and stays as it is.
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

// DropRecord durably erases the driver's format and growth records of any volume before the disk is
// published as a raw device. A record states that the driver wrote the content, but from then on
// the workload writes it. DropRecord keeps a workload's bytes that look like a record: it erases
// format records only if the regions that it reads contain nothing else but bytes that mkfs writes,
// and growth records only behind the ext that they describe. It does nothing to a read-only disk,
// or to a mounted device, which a workload already uses.
func (p *Preparation) DropRecord(mounted bool) error {
	d, v := disk{p.Device}, p.Volume
	if v.ReadOnly || mounted {
		return nil
	}
	s, err := d.read(v, ownRegions(d.SizeBytes), nil)
	if err != nil {
		return err
	}
	if len(s.Records)+len(s.Growth) > 0 { // other regions show whether the driver wrote them
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

// ownRecords returns the offsets of the records in s that the driver wrote, to this disk or to the
// disk that this one was restored from.
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
