package driver

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash/crc32"
)

// formatMark says on the disk itself that a format is under way: whose, and what it makes. It is
// written to the disk before mkfs and erased after it, both durably. So a disk that carries it was
// proven blank by this driver, and nobody has been given it since.
//
// It stands where no mkfs writes (see markSlots), three times, each in one sector, so that a power
// cut leaves it whole or not there at all.
type formatMark struct {
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
	markBytes                                               = 512
	markMagic                                               = "oxide-csi format"
	markVersion                                             = 1
	markVersionAt, markChecksumAt, markLengthAt, markTextAt = 16, 20, 24, 28
)

// encode is the mark as a whole spot of the disk.
func (m formatMark) encode() ([]byte, error) {
	text, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(text) > markBytes-markTextAt {
		return nil, fmt.Errorf("the mark of the format has %d bytes, %d at most", len(text),
			markBytes-markTextAt)
	}
	b := make([]byte, spotBytes)
	copy(b, markMagic)
	binary.LittleEndian.PutUint32(b[markVersionAt:], markVersion)
	binary.LittleEndian.PutUint32(b[markLengthAt:], uint32(len(text)))
	copy(b[markTextAt:], text)
	binary.LittleEndian.PutUint32(b[markChecksumAt:], markChecksum(b))
	return b, nil
}

func markChecksum(b []byte) uint32 { return crc32.Checksum(b[markLengthAt:markBytes], castagnoli) }

// isMark says that the bytes claim to be a mark.
func isMark(b []byte) bool { return len(b) >= markBytes && bytes.HasPrefix(b, []byte(markMagic)) }

// parseMark reads a mark; anything about it that does not add up makes it none.
func parseMark(b []byte) (formatMark, error) {
	if !isMark(b) {
		return formatMark{}, fmt.Errorf("no mark")
	}
	if got, want := markChecksum(b), binary.LittleEndian.Uint32(b[markChecksumAt:]); got != want {
		return formatMark{}, fmt.Errorf("its checksum is %#x, not %#x", want, got)
	}
	if v := binary.LittleEndian.Uint32(b[markVersionAt:]); v != markVersion {
		return formatMark{}, fmt.Errorf("it is of version %d, not %d", v, markVersion)
	}
	n := binary.LittleEndian.Uint32(b[markLengthAt:])
	if n > markBytes-markTextAt {
		return formatMark{}, fmt.Errorf("its text has %d bytes", n)
	}
	var m formatMark
	if err := json.Unmarshal(b[markTextAt:markTextAt+n], &m); err != nil {
		return formatMark{}, fmt.Errorf("its text cannot be read: %w", err)
	}
	return m, nil
}

// of says whether it is a mark of that volume, on a disk of that size.
func (m formatMark) of(v fsVolume, sizeBytes int64) bool {
	return m.Volume == v.ID && m.Disk == v.DiskName && m.SizeBytes == sizeBytes
}

// markOf is the mark for the format of a volume.
func markOf(v fsVolume) formatMark {
	return formatMark{Volume: v.ID, Disk: v.DiskName, SizeBytes: v.SizeBytes, Filesystem: v.FSType,
		Options: v.Mkfs.String()}
}
