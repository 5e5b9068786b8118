// Package filesystem decides what a disk holds and makes a volume's filesystem ready to be mounted.
//
// The node calls Preparation.Run. It reads the regions of the open device where filesystems,
// partition tables, RAIDs and volume managers keep their signatures, and runs blkid. From this scan
// it decides that the disk is blank, holds one filesystem, or holds an unfinished format of this
// volume; anything else is an error that names the evidence. Run writes only after that: it formats
// a disk that is proven blank, repeats the unfinished format, or checks and grows the filesystem.
//
// The driver reads the whole disk before it formats one that was not created blank for filesystems.
// ZeroScans continues these reads when the caller gives up; the repeated call joins them.
//
// During a format or the growth of an ext, a Record on the disk itself names the volume and the
// step. It is durable before the first other write, and erased after the last one. So a process
// that dies at any instruction leaves an untouched disk, or one that the next call can finish.
//
// The package attaches no mount to a path. It imports no CSI types, so the proof that only blank
// disks are formatted can be reviewed without CSI. Reading a disk needs Linux; parsing its layouts
// (regions, superblocks, records) does not.
package filesystem

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os/exec"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Volume describes a volume and its disk, as far as Preparation needs it.
type Volume struct {
	ID        string
	DiskName  string
	SizeBytes int64 // of the disk, from the controller; 0 if unknown
	ReadOnly  bool  // the disk itself is read-only
	FSType    string
	Mkfs      volume.MkfsOptions
	// Origin, Use, SourceBytes and FilesystemUUID are from the disk's ownership tag, or zero.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // mount no other filesystem; empty for any
}

// neverRaw reports whether, according to the controller, no workload ever had the raw device.
func (v Volume) neverRaw() bool { return v.Use == volume.UseFilesystem }

// madeBlank reports whether the disk was created blank and never published as a raw device. If so,
// a sample of its bytes proves that it is still blank. Any other disk is read whole.
func (v Volume) madeBlank() bool { return v.Origin == volume.OriginBlank && v.neverRaw() }

// slots returns the offsets of the volume's records on a disk of this size. If the disk was
// restored from the snapshot of a smaller disk, it adds the offsets on the smaller disk.
func (v Volume) slots(offsets func(int64) []int64, sizeBytes int64) []int64 {
	slots := offsets(sizeBytes)
	if v.Origin == volume.OriginSnapshot && v.SourceBytes > 0 && v.SourceBytes < sizeBytes {
		slots = append(slots, offsets(v.SourceBytes)...)
	}
	return slots
}

// makeUUID returns the UUID for a new filesystem: FilesystemUUID if it is set, else the volume's
// id. It returns "" if the id is not a UUID, as for a static volume with a name of its own.
func (v Volume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := volume.ParseID(v.ID); ok {
		return id
	}
	return ""
}

// Tools are the programs that the node runs. A mount needs no program: the driver calls the kernel,
// so the process list shows no mount flags.
var Tools = []string{
	"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs", "btrfs",
}

// MissingTools returns the Tools that are not in the PATH.
func MissingTools() []string {
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}

// Record is the note that the driver writes on the disk itself during a format or the growth of an
// ext: the volume, and the step. It is durable before the first other write. It is erased, durably,
// after the last write, and before a workload gets the disk as a raw device.
//
// A record is no proof, because a workload could have written it. It only makes the driver accept
// nonzero bytes that the announced mkfs or growth writes (see traces). The driver ignores a record
// at an offset where the filesystem keeps file data.
//
// The driver writes three copies, each in one sector, so that a power failure leaves each copy
// whole or absent. No mkfs overwrites all copies of a format record (see RecordOffsets). The copies
// of a growth record are behind the future end of the filesystem (see GrowthOffsets).
type Record struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	Options    string `json:"mkfsOptions,omitempty"`
	// UUID is the filesystem's UUID if it is not the volume's id. A volume that is restored from a
	// snapshot of the disk expects the same UUID.
	UUID string `json:"uuid,omitempty"`
	// GrowFrom is the filesystem's size before the growth; it is 0 in a format record. Mounted is the
	// time of the last mount: a later mount makes the record invalid. Checked reports that e2fsck
	// succeeded before the growth.
	GrowFrom int64 `json:"growFrom,omitempty"`
	Mounted  int64 `json:"mounted,omitempty"`
	Checked  bool  `json:"checked,omitempty"`
}

// A record consists of the magic number, the version, a checksum of all that follows, the text's
// length, and the text.
const (
	recordBytes      = 512
	recordMagic      = "oxide-csi format"
	recordVersion    = 1
	recordVersionAt  = 16
	recordChecksumAt = 20
	recordLengthAt   = 24
	recordTextAt     = 28
)

// Encode returns a sector that contains the record.
func (r Record) Encode() ([]byte, error) {
	text, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	if len(text) > recordBytes-recordTextAt {
		return nil, fmt.Errorf("the format-in-progress record has %d bytes, at most %d fit", len(text),
			recordBytes-recordTextAt)
	}
	b := make([]byte, sectorBytes)
	copy(b, recordMagic)
	binary.LittleEndian.PutUint32(b[recordVersionAt:], recordVersion)
	binary.LittleEndian.PutUint32(b[recordLengthAt:], uint32(len(text)))
	copy(b[recordTextAt:], text)
	binary.LittleEndian.PutUint32(b[recordChecksumAt:], recordChecksum(b))
	return b, nil
}

func recordChecksum(b []byte) uint32 {
	return crc32.Checksum(b[recordLengthAt:recordBytes], castagnoli)
}

// ParseRecord parses and validates a record.
func ParseRecord(b []byte) (Record, error) {
	if len(b) < recordBytes || !bytes.HasPrefix(b, []byte(recordMagic)) {
		return Record{}, errors.New("not a record")
	}
	if got, want := recordChecksum(b), binary.LittleEndian.Uint32(b[recordChecksumAt:]); got != want {
		return Record{}, fmt.Errorf("its checksum is %#x, want %#x", want, got)
	}
	if v := binary.LittleEndian.Uint32(b[recordVersionAt:]); v != recordVersion {
		return Record{}, fmt.Errorf("it has version %d, want %d", v, recordVersion)
	}
	n := binary.LittleEndian.Uint32(b[recordLengthAt:])
	if n > recordBytes-recordTextAt {
		return Record{}, fmt.Errorf("its text has %d bytes", n)
	}
	var r Record
	if err := json.Unmarshal(b[recordTextAt:recordTextAt+n], &r); err != nil {
		return Record{}, fmt.Errorf("its text is invalid: %w", err)
	}
	return r, nil
}

// of() reports whether the record was written for this volume on a disk of this size, or for the
// volume from whose snapshot the disk was restored.
func (r Record) of(v Volume, sizeBytes int64) bool {
	return r.Volume == v.ID && r.Disk == v.DiskName && r.SizeBytes == sizeBytes || r.inherited(v)
}

func (r Record) inherited(v Volume) bool {
	return v.Origin == volume.OriginSnapshot && v.FilesystemUUID != "" &&
		cmp.Or(r.UUID, r.Volume) == v.FilesystemUUID && r.SizeBytes == v.SourceBytes
}

// RecordOf returns the record that the driver writes when it formats the volume.
func RecordOf(v Volume) Record {
	r := Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: v.SizeBytes, Filesystem: v.FSType,
		Options: v.Mkfs.String()}
	if id := v.makeUUID(); id != v.ID {
		r.UUID = id
	}
	return r
}
