package filesystem

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
)

// Record says on the disk itself that a format is under way: whose, and what it makes. It is
// written to the disk before mkfs and erased after it, both durably. So a disk that carries it was
// proven blank by this driver, and nobody has been given it since.
//
// It stands where no mkfs writes (see RecordOffsets), three times, each in one sector, so that a power
// cut leaves it whole or not there at all.
type Record struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	Options    string `json:"mkfsOptions,omitempty"`
	// GrowFrom is what the filesystem's size was; only the mark of a growth has it. Mounted is when it
	// was mounted last: with the next mount the mark is worth nothing. Checked says that the check
	// before the growth found the filesystem in order.
	GrowFrom int64 `json:"growFrom,omitempty"`
	Mounted  int64 `json:"mounted,omitempty"`
	Checked  bool  `json:"checked,omitempty"`
}

// The layout of a mark: what it is, its version, a checksum of all that follows, and the text with
// its length.
const (
	recordBytes                                                     = 512
	recordMagic                                                     = "oxide-csi format"
	recordVersion                                                   = 1
	recordVersionAt, recordChecksumAt, recordLengthAt, recordTextAt = 16, 20, 24, 28
)

// Encode is the mark as a whole spot of the disk.
func (m Record) Encode() ([]byte, error) {
	text, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(text) > recordBytes-recordTextAt {
		return nil, fmt.Errorf("the mark of the format has %d bytes, %d at most", len(text),
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

// isRecord says that the bytes claim to be a mark.
func isRecord(b []byte) bool {
	return len(b) >= recordBytes && bytes.HasPrefix(b,
		[]byte(recordMagic))
}

// ParseRecord reads a mark; anything about it that does not add up makes it none.
func ParseRecord(b []byte) (Record, error) {
	if !isRecord(b) {
		return Record{}, fmt.Errorf("no mark")
	}
	if got, want := recordChecksum(b), binary.LittleEndian.Uint32(b[recordChecksumAt:]); got != want {
		return Record{}, fmt.Errorf("its checksum is %#x, not %#x", want, got)
	}
	if v := binary.LittleEndian.Uint32(b[recordVersionAt:]); v != recordVersion {
		return Record{}, fmt.Errorf("it is of version %d, not %d", v, recordVersion)
	}
	n := binary.LittleEndian.Uint32(b[recordLengthAt:])
	if n > recordBytes-recordTextAt {
		return Record{}, fmt.Errorf("its text has %d bytes", n)
	}
	var m Record
	if err := json.Unmarshal(b[recordTextAt:recordTextAt+n], &m); err != nil {
		return Record{}, fmt.Errorf("its text cannot be read: %w", err)
	}
	return m, nil
}

// of says whether it is a mark of that volume, on a disk of that size.
func (m Record) of(v Volume, sizeBytes int64) bool {
	return m.Volume == v.ID && m.Disk == v.DiskName && m.SizeBytes == sizeBytes
}

// RecordOf is the mark for the format of a volume.
func RecordOf(v Volume) Record {
	return Record{Volume: v.ID, Disk: v.DiskName, SizeBytes: v.SizeBytes, Filesystem: v.FSType,
		Options: v.Mkfs.String()}
}
