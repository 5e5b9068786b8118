// Package volume parses and checks the names, ids and parameters by which CSI, a StorageClass and
// the rack describe a volume. Its functions are pure: no call, no file, no clock.
//
// Files: name.go (names, ids, and the keys of the contexts), tag.go (the ownership tag in the
// description of a disk or snapshot), capacity.go, capability.go, parameters.go and mkfs_options.go
// (the properties of a requested volume), topology.go, mount_flags.go.
//
// For an invalid request these functions return a csierr.Error, which the caller returns unchanged.
package volume

import (
	"crypto/sha256"
	"encoding/base32"
	"fmt"
	"regexp"
	"strings"
	"unicode"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// DriverName is the driver's name in CSI, and the beginning of every ownership tag.
const DriverName = "csi.oxide.computer"

// The keys of volume_context and publish_context.
const (
	CtxDiskName       = "diskName"       // both
	CtxDiskID         = "diskId"         // both
	CtxBlockSize      = "blockSize"      // both
	CtxMkfsOptions    = "mkfsOptions"    // volume_context
	CtxSnapshotID     = "snapshotId"     // volume_context, of a disk made from a snapshot
	CtxSizeBytes      = "sizeBytes"      // publish_context
	CtxReadOnly       = "readOnly"       // publish_context
	CtxOrigin         = "origin"         // publish_context, see Tag.Origin
	CtxUse            = "use"            // publish_context, see Tag.Use
	CtxSourceBytes    = "sourceBytes"    // publish_context, see Tag.SourceBytes
	CtxFilesystemUUID = "filesystemUUID" // publish_context, see expectedUUID
)

// DefaultMaxDisks is a rack's limit of disks per instance, including the boot disk.
const DefaultMaxDisks = 12

// The origin of a disk and the use of a volume.
const (
	OriginBlank    = "blank"
	OriginSnapshot = "snapshot"
	OriginImage    = "image"

	UseFilesystem = "filesystem"
	UseBlock      = "block"
	UseBoth       = "both"
)

const (
	// MaxStringBytes is CSI's limit for every string that has none of its own (B-1).
	MaxStringBytes = 128

	ownPrefix = "csi-"
	// SerialBytes is as much of a disk's name as the guest sees as its NVMe serial.
	SerialBytes = 20
	// base32hex in lower case: it sorts, and every character may stand in a name of the rack.
	nameAlphabet = "0123456789abcdefghijklmnopqrstuv"
)

var nameEncoding = base32.NewEncoding(nameAlphabet).WithPadding(base32.NoPadding)

// DiskName is the name of the disk of the volume that the CO of a cluster calls csiName. It is a
// pure function, so that two controllers that create the same volume meet in the rack's rule that
// names are unique; and it is exactly as long as the serial a guest sees, so that the serial is the
// whole name.
func DiskName(cluster, csiName string) string { return ownName(cluster, csiName) }

// SnapshotName returns the rack's name of the snapshot that the CO calls csiName. Snapshots have
// names of their own on the rack, so this may equal a disk's.
func SnapshotName(cluster, csiName string) string { return ownName(cluster, csiName) }

// ownName hashes the cluster's id too, so that volumes of two clusters may have the same name. No
// id contains a NUL, so no two pairs hash the same text.
func ownName(cluster, csiName string) string {
	sum := sha256.Sum256([]byte(cluster + "\x00" + csiName))
	return ownPrefix + nameEncoding.EncodeToString(sum[:])[:SerialBytes-len(ownPrefix)]
}

// IsOwnName reports whether a name has the form of the driver's own names.
func IsOwnName(s string) bool {
	code, ok := strings.CutPrefix(s, ownPrefix)
	return ok && len(s) == SerialBytes && strings.Trim(code, nameAlphabet) == ""
}

// ParseID parses a volume, snapshot or node id. An id that is not a UUID names nothing that exists,
// and must not reach the API, which would treat it as an object's name.
func ParseID(id string) (string, bool) {
	if len(id) != len(uuid.Nil.String()) {
		return "", false
	}
	u, err := uuid.Parse(id)
	return u.String(), err == nil
}

// IsID reports whether an id is a UUID in lower case, as the rack writes it.
func IsID(id string) bool {
	canonical, ok := ParseID(id)
	return ok && canonical == id
}

// RackName is the form of the rack's names.
var RackName = Word{63, regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`)}

// Word is what a word of at most Most bytes looks like. A limit in the expression itself would cost
// every process tens of kilobytes, because it is compiled to one copy for each byte.
type Word struct {
	Most  int
	Looks *regexp.Regexp
}

// MatchString reports whether a text is such a word.
func (w Word) MatchString(text string) bool {
	return len(text) <= w.Most && w.Looks.MatchString(text)
}

// CheckName checks the name of a new volume or snapshot against CSI's rules: any Unicode, in at
// most 128 bytes, but no control characters other than tab, line feed and carriage return.
func CheckName(name string) error {
	banned := func(r rune) bool {
		return unicode.IsControl(r) && !strings.ContainsRune("\t\n\r", r)
	}
	switch {
	case name == "":
		return csierr.New(csierr.FieldMissing, "name is missing")
	case len(name) > MaxStringBytes:
		return csierr.New(csierr.FieldInvalid, "name has %d bytes; CSI allows %d",
			len(name), MaxStringBytes)
	case strings.ContainsFunc(name, banned):
		return csierr.New(csierr.FieldInvalid, "name contains a control character")
	}
	return nil
}

// Serial returns the serial number with which a guest sees the disk of that name.
func Serial(diskName string) string {
	return diskName[:min(len(diskName), SerialBytes)]
}

// NameAndID returns how messages show an object of the rack: people and the rack's console know the
// name, Kubernetes the id. Either may be unknown.
func NameAndID(name, id string) string {
	switch {
	case name == "":
		return id
	case id == "":
		return name
	}
	return fmt.Sprintf("%.80s (%.80s)", name, id)
}

// SizeText returns how messages show a size: in the GiB that people ask for, and exactly.
func SizeText(bytes int64) string {
	switch {
	case bytes < GiB/100:
		return fmt.Sprintf("%d bytes", bytes)
	case bytes%GiB == 0:
		return fmt.Sprintf("%d GiB (%d bytes)", bytes/GiB, bytes)
	}
	return fmt.Sprintf("%.2f GiB (%d bytes)", float64(bytes)/float64(GiB), bytes)
}
