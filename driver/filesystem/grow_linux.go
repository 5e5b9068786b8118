package filesystem

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// The ioctls of XFS (fs/xfs/libxfs/xfs_fs.h) and btrfs (include/uapi/linux/btrfs.h).
const (
	xfsGeometryV1 = 0x80705864 // _IOR('X', 100, struct xfs_fsop_geom_v1)
	xfsGrowData   = 0x4010586e // _IOW('X', 110, struct xfs_growfs_data)
	btrfsResize   = 0x50009403 // _IOW(0x94, 3, struct btrfs_ioctl_vol_args)
)

// growExt grows the ext filesystem, after the check that resize2fs requires. A killed resize2fs
// leaves damage, and e2fsck does not write the superblock atomically. So growExt first writes
// growth records, which show a later call whether the growth was cut off before or after the check.
func (p *Preparation) growExt(found state) (err error) {
	d, v := disk{p.Device}, p.Volume
	change := p.Flight.Begin(flight.FilesystemGrown, flight.Fields{Filesystem: v.FSType})
	defer func() { change.End(err, flight.Fields{}) }()
	sb := found.Filesystem
	record := Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: d.SizeBytes, Filesystem: sb.Type,
		UUID: sb.UUID.String(), GrowFrom: sb.SizeBytes, Mounted: sb.Mounted, Checked: found.Checked}
	if err := d.writeRecords(record, growthSlots(d.SizeBytes, record.GrowFrom)); err != nil {
		return err
	}
	if found.Checked && v.neverRaw() {
		if err := d.tryRead(); err != nil {
			return err
		}
	}
	if err := p.checkExt(growCheck(found, v)...); err != nil {
		return err
	}
	// The check may have replaced a damaged superblock by its copy.
	sbs, err := Find(d.OpenDevice)
	if err != nil {
		return err
	}
	if len(sbs) != 1 {
		return csierr.New(csierr.FilesystemDamaged, "%s holds %d filesystems after a check", d.Path,
			len(sbs))
	}
	if sb = sbs[0]; sb.canGrow(d.SizeBytes) {
		record.GrowFrom, record.Mounted, record.Checked = sb.SizeBytes, sb.Mounted, true
		if err := d.writeRecords(record, growthSlots(d.SizeBytes, record.GrowFrom)); err != nil {
			return err
		}
		result, err := runRepair(d.Inherited, "resize2fs", inherited,
			fmt.Sprintf("%dK", sb.largest(d.SizeBytes)>>10))
		if err != nil {
			return err
		}
		if result.Exit != 0 {
			return result.failure("resize2fs", d.Path)
		}
	}
	return d.WithExclusive(func(w *os.File) error {
		return d.eraseRecords(w, growthSlots(d.SizeBytes, sb.SizeBytes),
			func(r Record) bool { return r.GrowFrom != 0 })
	})
}

func growCheck(found state, v Volume) []string {
	sb := found.Filesystem
	switch {
	case found.Checked && v.neverRaw():
		// Only a killed resize2fs can have left errors: the record shows that a check succeeded, and
		// that the filesystem was not mounted after it. No workload can have written the record: it is
		// behind the filesystem, and the disk was never a workload's raw device.
		return []string{"-f", "-y"}
	case found.Growing && sb.Damaged:
		// e2fsck was killed while it wrote the superblock. The copy is undamaged (see allowCopy).
		return []string{"-f", "-p", "-b", fmt.Sprint(sb.CopyBlock), "-B", fmt.Sprint(sb.BlockBytes)}
	}
	return []string{"-f", "-p"}
}

// GrowMounted grows a mounted xfs or btrfs to the whole device, if it does not cover the device
// yet. It does nothing to other filesystems, which grow before they are mounted.
func GrowMounted(call flight.Call, m *mount.Mount, d blockdev.Device) error {
	if m.FSType != volume.XFS && m.FSType != volume.Btrfs {
		return nil
	}
	change := call.Begin(flight.FilesystemGrown, flight.Fields{Filesystem: m.FSType})
	root, err := m.Root()
	if err == nil {
		if m.FSType == volume.Btrfs {
			err = growBtrfs(root)
		} else {
			err = growXFS(root, d.SizeBytes)
		}
		_ = root.Close()
	}
	change.End(err, flight.Fields{})
	if err != nil {
		return csierr.New(csierr.NodeToolFailed, "grow the %s filesystem on %s: %w", m.FSType, d.Path,
			err)
	}
	return nil
}

// xfsGeometry returns the block size and the size of a mounted xfs, as the kernel reports them, and
// the percentage of its space that inodes may use.
func xfsGeometry(root *os.File) (sb Superblock, inodePercent uint32, err error) {
	var b [112]byte
	err = blockdev.Ioctl(int(root.Fd()), xfsGeometryV1, unsafe.Pointer(&b))
	block := uint64(binary.NativeEndian.Uint32(b[0:]))
	return Superblock{Type: volume.XFS, BlockBytes: int64(block),
		SizeBytes: product(binary.NativeEndian.Uint64(b[32:]), block),
		UnitBytes: product(xfsMinimumAGBlocks, block)}, binary.NativeEndian.Uint32(b[28:]), err
}

// Uncovered returns the size of a mounted xfs if it does not cover its device, and otherwise 0. It
// asks the kernel: the superblock on the disk may contain an older size until the log is replayed.
func Uncovered(m *mount.Mount, d blockdev.Device) (sizeBytes int64, err error) {
	root, err := m.Root()
	if err != nil {
		return 0, err
	}
	defer func() { _ = root.Close() }()
	sb, _, err := xfsGeometry(root)
	if err == nil && sb.leavesRoom(d.SizeBytes) {
		return sb.SizeBytes, nil
	}
	return 0, err
}

func growXFS(root *os.File, deviceBytes int64) error {
	sb, percent, err := xfsGeometry(root)
	if err != nil || !sb.canGrow(deviceBytes) {
		return err
	}
	request := struct {
		blocks  uint64
		percent uint32 // unchanged
		_       uint32
	}{blocks: uint64(deviceBytes / sb.BlockBytes), percent: percent}
	return blockdev.Ioctl(int(root.Fd()), xfsGrowData, unsafe.Pointer(&request))
}

func growBtrfs(root *os.File) error {
	member, err := mount.BtrfsDevice(root)
	if err != nil {
		return err
	}
	var arg [4096]byte // a number that is always 0, then a text
	copy(arg[8:], fmt.Sprintf("%d:max", member.ID))
	if err := blockdev.Ioctl(int(root.Fd()), btrfsResize, unsafe.Pointer(&arg)); err != nil {
		return err
	}
	// The ioctl commits the new size before any file uses the new space. If the commit fails, the
	// ioctl returns no error (btrfs_ioctl_resize), but the filesystem becomes read-only.
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(root.Fd()), &st); err != nil {
		return err
	}
	if st.Flags&unix.ST_RDONLY != 0 {
		return errors.New("its new size could not be committed, and it became read-only")
	}
	return nil
}

// allow returns an error if the filesystem has a feature that the driver refuses. The driver calls
// allow() before each mount, check, growth and write, because a filesystem with such a feature may
// be partly on other disks.
func (d disk) allow(sb Superblock) error {
	if sb.Refused == "" {
		return nil
	}
	return csierr.New(csierr.FilesystemFeature, "the %s filesystem on %s with serial %q has %s; the "+
		"driver mounts only a filesystem that is whole on its disk and whose features it knows",
		sb.Type, d.Path, d.Serial, sb.Refused)
}

// allowCopy checks the first copy of a damaged superblock, because e2fsck will use that copy. The
// size in the copy may be larger, because a growth writes the copies first.
func (d disk) allowCopy(sb Superblock) error {
	at := sb.CopyBlock * sb.BlockBytes
	b, err := d.Read(at&^(sectorBytes-1), sectorBytes)
	if err != nil {
		return unreadable(err)
	}
	whole, ok := extSuperblock(slices.Concat(make([]byte, extOffset), b[at%sectorBytes:]))
	if !ok || whole.Damaged || whole.UUID != sb.UUID || whole.SizeBytes < sb.SizeBytes {
		return csierr.New(csierr.FilesystemDamaged, "the superblock of the %s filesystem on %s is "+
			"damaged, and so is its first copy, at offset %d", sb.Type, d.Path, at)
	}
	return d.allow(whole)
}

// checkDescriptors fails if a group descriptor is damaged. e2fsck -p uses no copy of the
// descriptors: it deletes the journal and overwrites the copies with the damaged descriptors. A
// manual repair then finds no files. Without -p e2fsck uses a copy.
func (d disk) checkDescriptors() error {
	head, err := d.Read(0, sectorBytes)
	if err != nil {
		return unreadable(err)
	}
	t := extTableOf(head[extOffset:])
	from := t.Offset &^ (sectorBytes - 1)
	to := (t.Offset + t.Bytes + sectorBytes - 1) &^ (sectorBytes - 1)
	if t.Bytes == 0 || to > d.SizeBytes {
		return nil // there is no single table within the disk
	}
	b, err := d.Read(from, to-from)
	if err != nil {
		return unreadable(err)
	}
	group := t.firstBad(b[t.Offset-from:])
	if group < 0 {
		// A descriptor may name wrong blocks within the filesystem. e2fsck then does not find the
		// journal's inode and deletes the journal. So check that inodes 1 to 8 are in their place.
		at, n := t.inodesAt(b[t.Offset-from:])
		from, to := at&^(sectorBytes-1), (at+n+sectorBytes-1)&^(sectorBytes-1)
		if at > d.SizeBytes-n || to > d.SizeBytes {
			return nil // the filesystem is larger than the disk
		}
		inodes, err := d.Read(from, to-from)
		if err != nil {
			return unreadable(err)
		}
		if !t.areInodes(inodes[at-from:]) {
			group = 0
		}
	}
	if group >= 0 {
		return csierr.New(csierr.FilesystemDamaged, "the descriptor of the block group %d on %s is "+
			"damaged; e2fsck has to take a copy, which needs a decision", group, d.Path)
	}
	return nil
}

// The bits of e2fsck's exit code (e2fsck(8)).
const (
	fsckCorrected       = 1
	fsckCorrectedReboot = 2 // asks for a reboot only if the filesystem is mounted; it is not
	fsckUncorrected     = 4
)

// checkExt runs e2fsck with args: -p repairs errors that need no decision, -f also checks a
// filesystem that is marked clean.
func (p *Preparation) checkExt(args ...string) (err error) {
	d := disk{p.Device}
	if slices.Contains(args, "-p") && !slices.Contains(args, "-b") {
		if err := d.checkDescriptors(); err != nil {
			return err
		}
	}
	change := p.Flight.Begin(flight.FilesystemChecked,
		flight.Fields{Detail: "e2fsck " + strings.Join(args, " ")})
	defer func() { change.End(err, flight.Fields{}) }()
	result, err := runRepair(d.Inherited, "e2fsck", append(args, inherited)...)
	switch {
	case err != nil:
		return err
	case diskFailed(result):
		return result.failure("e2fsck", d.Path)
	case result.Exit&^(fsckCorrected|fsckCorrectedReboot) == 0:
		if result.Exit != 0 {
			p.Flight.Note(flight.FilesystemRepaired, flight.Fields{})
		}
		return nil
	case result.Exit&fsckUncorrected != 0:
		return csierr.New(csierr.FilesystemDamaged, "the filesystem on %s needs a repair that may lose "+
			"data: %s", d.Path, csierr.OutputTail(result.Stdout+result.Stderr))
	}
	return result.failure("e2fsck", d.Path)
}

// tryRead runs e2fsck -n, which reads all blocks that a repair reads, and returns an error if a
// read fails. A repair with e2fsck -y would not fail: it overwrites an unreadable block with zeroes
// and continues (e2fsck_handle_read_error).
func (d disk) tryRead() error {
	result, err := runTool(d.Inherited, "e2fsck", "-f", "-n", inherited)
	if err == nil && diskFailed(result) {
		return result.failure("e2fsck", d.Path)
	}
	return err
}

// diskFailed reports whether e2fsck could not read or write the disk. Only its messages show that
// (e2fsck/ehandler.c and problem.c): the exit code is the same as for errors in the filesystem or,
// with -y, for corrected errors.
func diskFailed(e2fsck toolResult) bool {
	return slices.ContainsFunc([]string{"Error reading block ", "Error writing block ",
		"Error writing file system info", "Error flushing writes ",
		"Input/output error"}, func(message string) bool {
		return strings.Contains(e2fsck.Stdout+e2fsck.Stderr, message)
	})
}

// btrfsBroken reports whether btrfs check finds errors. The check only reads; it exits with 0 or 1.
func (d disk) btrfsBroken() (bool, error) {
	if err := d.TryExclusive(); err != nil {
		return false, err
	}
	result, err := runTool(d.Inherited, "btrfs", "check", "--readonly", inherited)
	switch {
	case err != nil:
		return false, err
	case result.Exit > 1:
		return false, result.failure("btrfs check", d.Path)
	}
	return result.Exit == 1, nil
}
