package filesystem

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Record is what the driver writes on the disk itself while a format, or a growth of an ext, is in
// progress: the volume, and the step. It is durable before the first other write and is erased,
// durably, after the last one, and before a workload gets the disk as a raw device.
//
// A record is no proof, for a workload could have written it. It only says which bytes may be there
// besides zero: those of the mkfs or the growth that it announces (see traces). It is ignored where
// a filesystem keeps file data.
//
// It is written three times, each in one sector, so that a power failure leaves each copy whole or
// absent: that of a format where no mkfs writes (see RecordOffsets), and that of a growth behind
// the end that the filesystem will have (see GrowthOffsets).
type Record struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	Options    string `json:"mkfsOptions,omitempty"`
	// UUID is the filesystem's, if it is not the volume's id. A volume that is restored from a
	// snapshot of the disk expects the same one.
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

// of reports whether the record is of that volume, on a disk of that size, or of the volume from
// whose snapshot the disk was restored.
func (r Record) of(v Volume, sizeBytes int64) bool {
	return r.Volume == v.ID && r.Disk == v.DiskName && r.SizeBytes == sizeBytes || r.inherited(v)
}

// inherited reports whether the record is of the volume from whose snapshot the disk was restored.
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
