//go:build linux

package corpus_test

import (
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// guard is a check in the driver. If the edits remove the check, each of the trials must fail.
type guard struct {
	name   string
	edits  []edit
	trials []string
}

// edit is a short form of [proof.Edit].
type edit struct{ place, text, with string }

func mutable(guards []guard) []proof.Guard {
	var list []proof.Guard
	for _, g := range guards {
		all := proof.Guard{Name: g.name}
		for _, e := range g.edits {
			all.Edits = append(all.Edits, proof.Edit{Place: e.place, Text: e.text, With: e.with})
		}
		list = append(list, all)
	}
	return list
}

func TestEveryCheckThatTheProofRemovesIsInTheDriversSource(t *testing.T) {
	if err := proof.CheckGuards("../../driver", mutable(guards())); err != nil {
		t.Fatal(err)
	}
}

func guards() []guard {
	return slices.Concat(identityGuards(), holderGuards(), blankGuards(), areaGuards(), markGuards(),
		historyGuards(), tailGuards(), repairGuards())
}

func in(place, text, with string) []edit { return []edit{{place, text, with}} }

// asked returns a guard that refuses if the condition in the text is true.
func asked(name, place, text string, trials ...string) guard {
	return guard{name, in(place, text, proof.NotAsked), trials}
}

// called returns a guard that refuses if the call in the text returns an error.
func called(name, place, text string, trials ...string) guard {
	return guard{name, in(place, text, proof.NotCalled), trials}
}

// taken returns a guard that refuses if the condition in the text is false.
func taken(name, place, text string, trials ...string) guard {
	return guard{name, in(place, text, proof.Taken), trials}
}

func identityGuards() []guard {
	return []guard{
		{"a serial is compared to its last byte", in("blockdev.Host.Lookup", "d.Serial == serial",
			"(TEXT || REMOVED && len(d.Serial) >= 19 && strings.HasPrefix(serial, d.Serial[:19]))"),
			[]string{"a disk whose serial differs in the last byte"}},
		{"a serial is compared with its case", in("blockdev.Host.Lookup", "d.Serial == serial",
			"(TEXT || REMOVED && strings.EqualFold(d.Serial, serial))"),
			[]string{"a disk whose serial differs in case"}},
		{"two disks with one serial are refused", in("blockdev.Host.Lookup", "switch len(found) {",
			"if REMOVED && len(found) > 1 {\nfound = found[:1]\n}\nTEXT"),
			[]string{"two disks with one serial, the other after this",
				"two disks with one serial, the other before this",
				"two disks with one serial, one of them healthy"}},
		asked("the paths of a multipath are no disks", "blockdev.Host.List",
			"multipathLeg.MatchString(e.Name())", "a healthy disk with a hidden path of a multipath"),
		{"the node is the device that sysfs describes", []edit{
			{"blockdev.Host.checkNode", "major != d.Major || minor != d.Minor", proof.NotAsked},
			{"blockdev.OpenDevice.verify", "if major != d.Major || minor != d.Minor {",
				"if !REMOVED && (major != d.Major || minor != d.Minor) {"},
			{"blockdev.OpenDevice.verify", "d.DiskSeq != 0 && diskSeq != 0 && d.DiskSeq != diskSeq",
				proof.NotAsked},
		}, []string{"a disk with the node of another disk"}},
		asked("the device has the size in sysfs", "blockdev.OpenDevice.verify", "size != d.SizeBytes",
			"a blank disk with another size in sysfs"),
		asked("the device's size is the disk's", "node.nodeVolume.open",
			"v.SizeBytes != 0 && v.SizeBytes != d.SizeBytes", "a blank disk that is larger than its volume",
			"a healthy disk that is smaller than its volume"),
		asked("the device has the sequence number in sysfs", "blockdev.OpenDevice.verify",
			"d.DiskSeq != 0 && diskSeq != 0 && d.DiskSeq != diskSeq",
			"a disk with another sequence number in sysfs",
			"a healthy disk with another sequence number in sysfs"),
		asked("the serial is still the open device's", "blockdev.OpenDevice.Reverify",
			"now.Number() != d.Number() || now.DiskSeq != d.DiskSeq || now.Path != d.Path",
			"a disk that gets a new sequence number during the call"),
		called("a disk is found again before it is formatted", "filesystem.disk.format", "d.Reverify()",
			"a disk whose serial is duplicated during the call",
			"a disk that gets a new sequence number during the call"),
		{"a disk is found again after mkfs", in("filesystem.disk.mkfs",
			"d.Reverify(); err != nil {\n\t\treturn Superblock{}, err\n\t}\n\tmade, err :=",
			"error(nil); !REMOVED {\nerr = d.Reverify()\nif err != nil {\n"+
				"return Superblock{}, err\n}\n}\nmade, err :="),
			[]string{"a disk whose serial is duplicated while mkfs runs",
				"a disk that gets a new sequence number while mkfs runs"}},
		{"mkfs works on the open disk", in("filesystem.disk.mkfs", "append(args, inherited)",
			"append(args, map[bool]string{false: inherited, true: d.Path}[REMOVED])"),
			[]string{"a disk whose node is replaced when mke2fs begins",
				"a disk whose node is replaced when mkfs.xfs begins"}},
		called("the open disk is mounted", "mount.inRoot", `unix.Chroot(".")`,
			"a disk whose node is replaced while its filesystem is checked"),
		asked("a filesystem is the volume's own", "filesystem.Preparation.Run", "!sb.isOf(v)",
			"ext4 of another volume", "ext3 of another volume, on a larger disk", "xfs of another volume",
			"btrfs of another volume", "ext4 of another volume that needs a check"),
		asked("mkfs makes the volume's own filesystem", "filesystem.disk.identify",
			`want != "" && made.UUID.String() != want`, "a mkfs that makes another UUID"),
		called("a disk is found again before it is mounted", "filesystem.Preparation.proveMountable",
			"p.Device.Reverify()", "a healthy disk whose serial is duplicated during the call"),
	}
}

func holderGuards() []guard {
	return []guard{
		{"a disk is opened exclusively", []edit{
			{"blockdev.OpenDevice.WithExclusive", "os.O_EXCL", "zeroIf(REMOVED, os.O_EXCL)"},
			{"blockdev.OpenDevice.TryExclusive", "f, failed := d.openAgain(",
				"if REMOVED {\nreturn nil\n}\nTEXT"},
		},
			[]string{"a blank disk that a program has opened exclusively",
				"a disk that another program opens during the call"}},
		called("a disk is claimed before it is mounted", "filesystem.Preparation.proveMountable",
			"TryExclusive(p.Log, p.Device)", "a disk that is mounted in another mount namespace"),
		{"a mounted disk is refused by its mount point", []edit{
			{"node.nodeVolume.stage", "if len(mounts) > 0 {", "if !REMOVED && len(mounts) > 0 {"},
			{"filesystem.thawUnmounted", "len(mounts) > 0", proof.NotAsked},
		}, []string{"a disk that is mounted elsewhere"}},
		asked("a disk for reading gets no filesystem", "filesystem.Preparation.Run",
			"(found.Blank || found.Unfinished) && v.ReadOnly",
			"a blank disk that the rack reports as read-only"),
		{"a disk that stays read-only is refused", in("blockdev.OpenDevice.MakeWritable",
			`return csierr.New(csierr.DeviceReadOnly, "%s with serial`, "if REMOVED {\nreturn nil\n}\nTEXT"),
			[]string{"a blank disk that is read-only", "a healthy disk that is read-only"}},
		called("the device of a read-only disk refuses writes", "node.nodeVolume.begin",
			"v.device.SetReadOnly(true)", "ext3 in use, on a read-only disk",
			"ext4 in use, on a read-only disk", "xfs in use, on a read-only disk"),
		asked("no btrfs is shown without its log", "filesystem.Preparation.proveMountable",
			"found.Filesystem.Logged", "btrfs in use, on a read-only disk"),
		{"a read-only setting of another program stays", in("node.nodeVolume.begin",
			"known.Block || v.Use != volume.UseFilesystem", "REMOVED || TEXT"),
			[]string{"a healthy disk that was made read-only"}},
	}
}

func blankGuards() []guard {
	return []guard{
		{"data in an area are not overwritten", in("filesystem.scan.checkBlank", "if dirty ||",
			"if !REMOVED && dirty ||"), []string{"boot code without a table",
			"one byte: the last byte of the first MiB"}},
		{"data that blkid finds are not overwritten", in("filesystem.scan.checkBlank", `|| s.Blkid != ""`,
			`|| !REMOVED && s.Blkid != ""`),
			[]string{"a blank disk on which blkid finds something",
				"a blank disk for which blkid gives an ambivalent result"}},
		{"data that cannot be read do not count as zero", in("filesystem.disk.readRegions",
			"if err != nil {\n\t\t\t\t\terrs[i] = ",
			"if REMOVED && err != nil {\nb, err = blockdev.Aligned(regions[i].Bytes), nil\n}\nTEXT"),
			[]string{"a blank disk that cannot be read in its last block"}},
		asked("a format needs the disk's size", "filesystem.disk.format", "v.SizeBytes == 0",
			"a blank disk of unknown size"),
		{"another filesystem is not accepted", in("filesystem.Preparation.Run",
			"case sb.Type != v.FSType:", "case !REMOVED && sb.Type != v.FSType:"),
			[]string{"xfs where the request asks for another filesystem"}},
		asked("a filesystem is not larger than its disk", "filesystem.Preparation.finish",
			"sb.SizeBytes > d.SizeBytes", "ext4 on a smaller disk"),
		taken("blkid inspects data that may belong to a file", "filesystem.scan.filesystem",
			"s.Blkid == sb.Type", "xfs over the whole disk, and a member of an md RAID 1.0 at its end",
			"btrfs over the whole disk, and a member of an md RAID 1.0 at its end",
			"ext3 under an old partition table", "ext4 under an old partition table"),
		taken("blkid inspects a filesystem with data before it", "filesystem.scan.filesystem",
			"nonZero(s.at(0, sb.Offset)) < 0", "ext4 of this volume under an old partition table"),
		taken("blkid inspects a filesystem that is not the volume's", "filesystem.scan.filesystem",
			`v.FilesystemUUID != ""`, "xfs over the whole disk, and a member of an md RAID 1.0 at its end"),
		taken("a filesystem is complete on its disk, and its features are known",
			"filesystem.disk.allow", `sb.Refused == ""`, featureTrials()...),
		asked("a check uses only a valid copy, too", "filesystem.Preparation.Run",
			"found.Filesystem.Damaged",
			"ext4 with its journal on another disk, as only a copy of its superblock shows"),
		taken("a superblock with a wrong checksum is not mounted", "filesystem.scan.filesystem",
			"!sb.Damaged", "ext4 whose superblock is damaged",
			"ext4 of this volume whose superblock is damaged"),
		taken("a filesystem is finished", "filesystem.scan.filesystem", "!sb.Unfinished",
			"btrfs of this volume whose mkfs did not end"),
		{"a disk has one filesystem", in("filesystem.scan.filesystem", "if len(s.Found) != 1 {",
			"if len(s.Found) == 0 || !REMOVED && len(s.Found) != 1 {"),
			[]string{"ext4 of this volume and btrfs at once"}},
		{"a disk is read without the page cache", in("blockdev.Host.open",
			"unix.O_NONBLOCK|unix.O_DIRECT", "unix.O_NONBLOCK|zeroIf(REMOVED, unix.O_DIRECT)"),
			[]string{"a disk that is blank in the page cache"}},
		{"a failure of mkfs is reported", in("filesystem.disk.mkfs", "if result.Exit != 0 {",
			"if !REMOVED && result.Exit != 0 {"), []string{"a mkfs that fails at its end"}},
	}
}

func areaGuards() []guard {
	call := func(name, place, text string, trials ...string) guard {
		return guard{name, in("filesystem."+place, text, "if !REMOVED {\nTEXT\n}"), trials}
	}
	all := []guard{
		call("the first MiB is read", "markerRegions", `l.span(0, headBytes, "the first MiB")`,
			"one byte: the last byte of the first MiB", "one byte somewhere in the first MiB 1"),
		call("the last MiB is read", "markerRegions", `l.span(tail, sizeBytes, "the last 2 MiB")`,
			"one byte: the first byte of the last MiB", "one byte somewhere in the last MiB 1"),
		call("the places of copies of ext are read", "markerRegions", "l.extBackups(blockBytes)",
			"one byte where ext4 has its first copy"),
		call("the places of copies of xfs are read", "markerRegions", "l.xfsGroups(groups, blockBytes)",
			"one byte where an xfs of 8 groups has its third"),
		call("the places of copies of xfs for many processors are read", "markerRegions",
			"l.xfsGroups(groups, 4<<10)", "one byte where an xfs of 5 groups has its second"),
		call("the places of copies of a large xfs are read",
			"markerRegions", `l.sector(group, "a superblock of xfs, which has groups of at most 1 TiB")`,
			"one byte where a large xfs has its second group"),
		call("samples are read", "markerRegions",
			`l.sector(sizeBytes/(2*sampleCount)*(2*i+1), "a sample")`,
			"data in a hundredth of the disk, where no mark can be"),
		call("the places of the driver's own mark are read",
			"markerRegions", `l.sector(slot, fmt.Sprintf("slot %d of the driver's own record", i+1))`,
			"an unfinished format of another volume"),
	}
	for _, s := range spots {
		all = append(all, guard{"the region " + s.region, in("filesystem.fixedRegions", s.region,
			"zeroIf(REMOVED, regionTEXT)"), []string{"one byte " + s.where}})
	}
	return all
}

// nothingUnexpected is an edit after which the driver reads a whole disk, but accepts all bytes.
var nothingUnexpected = edit{"filesystem.disk.readCounted", "d.traces(v, j.expected).check",
	"func(b []byte, at int64) (int, error) {\nif REMOVED {\nreturn -1, nil\n}\nreturn TEXT(b, at)\n}"}

func markGuards() []guard {
	return []guard{
		{"a filesystem that was mounted is never formatted", []edit{
			{"filesystem.disk.inspect", "whole && !sb.Fresh", proof.NotAsked},
			{"filesystem.scan.judge", "case whole && !sb.Fresh:", "case !REMOVED && whole && !sb.Fresh:"},
			{"filesystem.scan.checkUnfinished", "!sb.Unfinished && !sb.Fresh", proof.NotAsked},
			{"filesystem.scan.takeRecords", "sb.holds(slot)", proof.NotAsked}, nothingUnexpected,
		}, []string{"a filesystem of ext3 that was mounted, under this volume's mark",
			"a filesystem of ext4 that was mounted, under this volume's mark",
			"a filesystem of xfs that was mounted, under this volume's mark",
			"a filesystem of btrfs that was mounted, under this volume's mark"}},
		called("a format is marked before it begins", "filesystem.disk.format",
			"d.writeRecords(RecordOf(v), slots)", "an own format for ext4 that had not begun"),
		{"a format that has ended leaves no mark", in("filesystem.disk.format",
			"return d.eraseFormat(w, v)", "if REMOVED {\nreturn nil\n}\nTEXT"),
			[]string{"an own format for xfs that had not begun"}},
		{"only a valid mark is erased", in("filesystem.disk.eraseRecords",
			"err != nil || !match(r)", "!REMOVED && (TEXT)"), []string{"a mkfs that writes over a mark"}},
		taken("a mark is of this volume", "filesystem.Record.of", "r.Volume == v.ID",
			"an unfinished format of another volume"),
		taken("a mark is of this disk", "filesystem.Record.of", "r.Disk == v.DiskName",
			"an unfinished format of another disk"),
		taken("a mark is of a disk of this size", "filesystem.Record.of", "r.SizeBytes == sizeBytes",
			"an unfinished format whose marks name another size"),
		asked("a mark has the right checksum", "filesystem.ParseRecord", "got != want",
			"an unfinished format whose marks have a wrong checksum"),
		asked("a mark is of a known version", "filesystem.ParseRecord", "v != recordVersion",
			"an unfinished format whose marks are of another version"),
		asked("a mark's text lies in the mark", "filesystem.ParseRecord", "n > recordBytes-recordTextAt",
			"an unfinished format whose marks name a longer text than they have"),
		{"no foreign data are wiped with an unfinished format", []edit{nothingUnexpected},
			[]string{"an unfinished format on a disk where Ceph has put a label",
				"an unfinished format on a disk on which blkid finds something",
				"an unfinished format on a disk on which blkid finds a table"}},
	}
}

func historyGuards() []guard {
	return []guard{
		taken("a disk that was not created blank is read completely", "filesystem.Volume.madeBlank",
			"v.Origin == volume.OriginBlank", "one byte in the middle of a disk restored from a snapshot",
			"one byte in the middle of a disk from an image"),
		taken("a disk that is also for raw use is read completely", "filesystem.Volume.madeBlank",
			"v.neverRaw()", "one byte in the middle of a disk that is also for raw use"),
		taken("a disk without any report about it is read completely",
			"filesystem.Preparation.proveBlank", "p.Volume.madeBlank()",
			"one byte in the middle of a disk that the driver did not make"),
		asked("data found by reading count", "filesystem.findUnexpected", "found < to",
			"one byte in the middle of a disk that the driver did not make"),
		{"only the data of an interrupted mkfs are wiped", []edit{nothingUnexpected}, []string{
			"data anywhere, under an own mark, on a disk from an image", "boot code over an own format"}},
		asked("a volume for raw use gets no filesystem", "node.nodeVolume.checkUse",
			"v.Use == volume.UseBlock && !v.Block", "a blank disk for raw use"),
		asked("the device's blocks are the disk's", "blockdev.OpenDevice.CheckBlockSize",
			"blockBytes != 0 && blockBytes != n", "a blank disk with blocks of another size",
			"a healthy disk with blocks of another size"),
		called("no program writes to a disk that is formatted", "filesystem.disk.format",
			"d.AwaitNoWriters()", "a blank disk that a program has open for writing"),
		called("no program writes to a disk that is mounted", "filesystem.Preparation.proveMountable",
			"p.Device.AwaitNoWriters()", "a healthy disk that a program has open for writing"),
		called("no loop device uses a disk", "blockdev.OpenDevice.AwaitNoWriters", "d.CheckLoops()",
			"a blank disk under a loop device", "a healthy disk under a loop device"),
		{"no two drivers work on a disk", in("blockdev.awaitLock", "case err == nil:",
			"case REMOVED || err == nil:"), []string{"a blank disk that another driver has locked",
			"a healthy disk that another driver works on"}},
	}
}

func tailGuards() []guard {
	return []guard{
		called("a filesystem grows only over proven data", "filesystem.Preparation.mayGrow",
			"p.proveTail(ctx, found.Filesystem.SizeBytes, found.behind())",
			"ext3 with a byte somewhere behind it", "ext4 with a byte somewhere behind it",
			"xfs with data behind it", "btrfs with a byte somewhere behind it",
			"ext4 with a byte behind it that its snapshot had",
			"xfs with a byte behind it that its snapshot had not",
			"ext4 with a byte behind it on a disk from an image",
			"xfs with a byte behind it on a disk that was restored for raw use, too"),
		asked("a growth that had begun is this volume's", "filesystem.scan.growth",
			"!r.of(v, s.SizeBytes)", "ext4 with a growth that another volume began"),
	}
}

func repairGuards() []guard {
	var damaged, misplaced []string
	for _, k := range described() {
		// Omit these: even without the guard, e2fsck may stop before it writes, so a trial may pass.
		if k.fs == ext3 || k.name == "ext4 without flexible groups" {
			continue
		}
		damaged = append(damaged, k.name+", damaged in the group descriptors",
			k.name+", damaged in the group descriptors and their copies")
		misplaced = append(misplaced, k.name+", damaged in the location of its inodes")
	}
	return []guard{
		called("e2fsck -p runs only on group descriptors that may be right",
			"filesystem.Preparation.checkExt", "d.checkDescriptors()", damaged...),
		asked("e2fsck -p runs only where the descriptors name inodes",
			"filesystem.disk.checkDescriptors", "!t.areInodes(inodes[at-from:])", misplaced...),
	}
}
