// Package volume parses and checks the names, ids and parameters by which CSI, a StorageClass and
// the rack describe a volume. Its functions are pure: no call, no file, no clock.
//
// For an invalid request these functions return a csierr.Error, which the caller returns unchanged.
package volume

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

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
// pure function, so if two controllers create the same volume, one of them fails because names are
// unique on the rack. It is as long as the serial that a guest sees, so that the serial is the
// whole name.
func DiskName(cluster, csiName string) string { return ownName(cluster, csiName) }

// SnapshotName returns the rack's name of the snapshot that the CO calls csiName. Snapshots have
// names of their own on the rack, so this may equal a disk's.
func SnapshotName(cluster, csiName string) string { return ownName(cluster, csiName) }

// ownName hashes the cluster's id, too, so that volumes of two clusters may have the same name. No
// id contains a NUL, so different pairs never result in the same text.
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

// Word describes words of at most Most bytes. A limit in the expression itself would cost every
// process tens of kilobytes, because it is compiled to one copy for each byte.
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

// Serial returns the serial number that a guest sees for the disk of that name.
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

// Tag is the ownership tag, which the driver writes into the description of every disk and snapshot
// that it makes: the CO's name, of which the rack's name is only a hash, and what later calls need.
type Tag struct {
	// Name is the CO's name. If the description would be too long, Name is only its beginning.
	Name string `json:"name"`
	// RackName is the name of the object on the rack, which is the hash of the whole name. It is set
	// if Name is only a beginning.
	RackName    string `json:"rackName,omitempty"`
	Cluster     string `json:"cluster,omitempty"`
	MkfsOptions string `json:"mkfsOptions,omitempty"`
	// BlockSize is the block size of a snapshot's disk, which a disk that is made from the snapshot
	// inherits. The rack does not show it when the disk is gone.
	BlockSize int `json:"blockSize,omitempty"`
	// Origin is what the disk was made from. Only for a disk that was made blank is a sample of its
	// bytes proof that it is still blank.
	Origin string `json:"origin,omitempty"`
	// Use is the volume's use, from its capabilities at creation. A volume for filesystems only is
	// never given to a workload as a raw device.
	Use string `json:"use,omitempty"`
	// SourceBytes is the size of the snapshot that the disk was restored from. The rack made the rest
	// of the disk blank.
	SourceBytes int64 `json:"sourceBytes,omitempty"`
	// FilesystemUUID is the UUID of the filesystem in a snapshot, if the driver made it, and of a disk
	// that was restored from the snapshot. It is empty for a disk that was made blank, whose
	// filesystem has the disk's id.
	FilesystemUUID string `json:"filesystemUUID,omitempty"`
	// Claim is the namespace and name of the claim, or of the VolumeSnapshot, for people who look at
	// the rack. It is only a label: the driver never updates it, and uses it only to propose a
	// PersistentVolume to a person (audit --output pv). If the description would be too long, Claim is
	// only a beginning with "…", or empty.
	Claim string `json:"claim,omitempty"`
}

// MaxDescriptionBytes is the longest description of an object. The rack stores 512 characters
// (omicron, schema/crdb/dbinit.sql: description STRING(512)), and always answers 500 to a longer
// one.
const MaxDescriptionBytes = 512

// Description returns the description of an object with the tag. It has at most MaxDescriptionBytes
// for every legal request: first the claim is shortened or left out, then the end of the name. The
// other fields fit, because together they have at most 403 bytes.
func (t Tag) Description() string {
	text := t.encode()
	for claim := t.Claim; len(text) > MaxDescriptionBytes && t.Claim != ""; text = t.encode() {
		claim = withoutLastRune(claim)
		if t.Claim = claim + "…"; claim == "" {
			t.Claim = ""
		}
	}
	if len(text) > MaxDescriptionBytes && t.RackName == "" {
		t.RackName = t.objectName()
		for text = t.encode(); len(text) > MaxDescriptionBytes; text = t.encode() {
			name := withoutLastRune(t.Name)
			if name == "" {
				break // this is not a legal request
			}
			t.Name = name
		}
	}
	return text
}

func withoutLastRune(s string) string {
	_, last := utf8.DecodeLastRuneInString(s)
	return s[:len(s)-last]
}

func (t Tag) encode() string {
	var text strings.Builder
	text.WriteString(DriverName + " ")
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false) // which makes six bytes of each of <>&
	if err := encoder.Encode(t); err != nil {
		panic(err) // cannot fail: strings and numbers
	}
	return strings.TrimSuffix(text.String(), "\n")
}

// ParseTag parses a description; ok is false for an object that the driver did not make.
func ParseTag(description string) (t Tag, ok bool) {
	text, ok := strings.CutPrefix(description, DriverName+" ")
	if !ok || json.Unmarshal([]byte(text), &t) != nil || t.Name == "" {
		return Tag{}, false
	}
	return t, true
}

// IsOf reports whether the tag is that of the object that the CO of a cluster calls csiName.
func (t Tag) IsOf(cluster, csiName string) bool {
	return t.Cluster == cluster && t.objectName() == ownName(cluster, csiName)
}

// Names reports whether the tag stands for an object of that name. The name is compared because
// somebody may copy a description to an object of their own.
func (t Tag) Names(rackName string) bool { return rackName == t.objectName() }

func (t Tag) objectName() string {
	if t.RackName != "" {
		return t.RackName
	}
	return ownName(t.Cluster, t.Name)
}
