// Package filesystem decides what a disk holds and makes a volume's filesystem ready to be mounted.
//
// Preparation.Run is the entry for the node. It scans the regions of the open device where
// filesystems, partition tables, RAIDs and volume managers keep their signatures, asks blkid, and
// judges the scan: blank, one filesystem, an unfinished format of this volume, or an error that
// names the evidence. Only then does it write: it formats a disk that is proven blank, repeats its
// own unfinished format, or checks and grows the filesystem that is there.
//
// A disk that was not created blank for filesystems is read whole before it is formatted. ZeroScans
// keeps these reads going when the caller gives up; the repeated call joins them.
//
// While a format or a growth is under way, a Record on the disk itself names the volume and the
// step. It is durable before the first other write and erased after the last one, so a process that
// dies at any instruction leaves either an untouched disk or one that the next call can finish.
//
// The package attaches no mount to a path: it uses detached mounts only to thaw. It imports no CSI
// types, so the proof that only blank disks are formatted can be reviewed alone. Reading and
// judging a disk needs Linux; the layouts (regions, superblocks, records) do not.
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

// Volume is what Preparation needs to know about a volume.
type Volume struct {
	ID        string
	DiskName  string
	SizeBytes int64 // of the disk, from the controller; 0 if unknown
	ReadOnly  bool  // the disk itself is read-only
	FSType    string
	Mkfs      volume.MkfsOptions
	// Origin and the following come from the disk's ownership tag and are zero for a disk without one.
	Origin, Use    string
	SourceBytes    int64
	FilesystemUUID string // of the only filesystem to mount; empty for any
}

// neverRaw reports whether, according to the controller, no workload ever had the disk as a raw
// device.
func (v Volume) neverRaw() bool { return v.Use == volume.UseFilesystem }

// madeBlank reports whether the disk was created blank and never published as a raw device. Then a
// sample of its bytes can prove that it is still blank. Any other disk is read whole.
func (v Volume) madeBlank() bool { return v.Origin == volume.OriginBlank && v.neverRaw() }

// slots returns the offsets of the volume's records: those on a disk of that size and, if the disk
// was restored from the snapshot of a smaller one, those on the smaller one.
func (v Volume) slots(offsets func(int64) []int64, sizeBytes int64) []int64 {
	slots := offsets(sizeBytes)
	if v.Origin == volume.OriginSnapshot && v.SourceBytes > 0 && v.SourceBytes < sizeBytes {
		slots = append(slots, offsets(v.SourceBytes)...)
	}
	return slots
}

// makeUUID returns the UUID for a new filesystem of the volume: the expected one, else the volume's
// id. It is empty if the id is not a UUID, as for a static volume with a name of its own.
func (v Volume) makeUUID() string {
	if v.FilesystemUUID != "" {
		return v.FilesystemUUID
	}
	if id, ok := volume.ParseID(v.ID); ok {
		return id
	}
	return ""
}

// Tools are the programs the node runs. Mounting needs none: the driver calls the kernel, which
// also keeps mount flags out of the process list.
var Tools = []string{
	"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs", "btrfs",
}

// MissingTools returns the programs that the node needs and that are not in its PATH.
func MissingTools() []string {
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}

// Record is what the driver writes on the disk itself while a format, or a growth of an ext, is in
// progress: the volume, and the step. It is durable before the first other write and is erased,
// durably, after the last one, and before a workload gets the disk as a raw device.
//
// A record is no proof, because a workload could have written it. It only allows bytes other than
// zero: those of the mkfs or the growth that it announces (see traces). It is ignored where a
// filesystem keeps file data.
//
// It is written three times, each in one sector, so that a power failure leaves each copy whole or
// absent: the record of a format where no mkfs writes (see RecordOffsets), and the record of a
// growth behind the future end of the filesystem (see GrowthOffsets).
type Record struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	Options    string `json:"mkfsOptions,omitempty"`
	// UUID is the filesystem's UUID if that is not the volume's id. A volume that is restored from a
	// snapshot of the disk expects the same UUID.
	UUID string `json:"uuid,omitempty"`
	// GrowFrom is the filesystem's old size; 0 in the record of a format. Mounted is when it was last
	// mounted: the next mount makes the record invalid. Checked reports that the check before the
	// growth succeeded.
	GrowFrom int64 `json:"growFrom,omitempty"`
	Mounted  int64 `json:"mounted,omitempty"`
	Checked  bool  `json:"checked,omitempty"`
}

// The layout of a record: magic, version, a checksum of everything that follows, and the text with
// its length.
const (
	recordBytes      = 512
	recordMagic      = "oxide-csi format"
	recordVersion    = 1
	recordVersionAt  = 16
	recordChecksumAt = 20
	recordLengthAt   = 24
	recordTextAt     = 28
)

// Encode returns the record as a whole sector.
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

// of reports whether the record was written for that volume on a disk of that size, or for the
// volume from whose snapshot the disk was restored.
func (r Record) of(v Volume, sizeBytes int64) bool {
	return r.Volume == v.ID && r.Disk == v.DiskName && r.SizeBytes == sizeBytes || r.inherited(v)
}

func (r Record) inherited(v Volume) bool {
	return v.Origin == volume.OriginSnapshot && v.FilesystemUUID != "" &&
		cmp.Or(r.UUID, r.Volume) == v.FilesystemUUID && r.SizeBytes == v.SourceBytes
}

// RecordOf returns the record of a format of the volume.
func RecordOf(v Volume) Record {
	r := Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: v.SizeBytes, Filesystem: v.FSType,
		Options: v.Mkfs.String()}
	if id := v.makeUUID(); id != v.ID {
		r.UUID = id
	}
	return r
}
