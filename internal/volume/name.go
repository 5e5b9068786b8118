// Package volume parses and checks the names, ids and parameters by which CSI, a StorageClass and
// the rack describe a volume. Its functions are pure: they make no call and read no file or clock.
//
// For an invalid request they return a csierr.Error, which the caller returns unchanged.
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

// DriverName is the driver's name in CSI. Every ownership tag begins with it.
const DriverName = "csi.oxide.computer"

// The keys of volume_context and publish_context.
const (
	CtxDiskName       = "diskName"       // both
	CtxDiskID         = "diskId"         // both
	CtxBlockSize      = "blockSize"      // both
	CtxMkfsOptions    = "mkfsOptions"    // volume_context
	CtxSnapshotID     = "snapshotId"     // volume_context of a disk made from a snapshot
	CtxSizeBytes      = "sizeBytes"      // publish_context
	CtxReadOnly       = "readOnly"       // publish_context
	CtxOrigin         = "origin"         // publish_context, see Tag.Origin
	CtxUse            = "use"            // publish_context, see Tag.Use
	CtxSourceBytes    = "sourceBytes"    // publish_context, see Tag.SourceBytes
	CtxFilesystemUUID = "filesystemUUID" // publish_context, see expectedUUID
)

// DefaultMaxDisks is a rack's limit of disks per instance, including the boot disk.
const DefaultMaxDisks = 12

// The values of Tag.Origin and of Tag.Use.
const (
	OriginBlank    = "blank"
	OriginSnapshot = "snapshot"
	OriginImage    = "image"

	UseFilesystem = "filesystem"
	UseBlock      = "block"
	UseBoth       = "both"
)

const (
	// MaxStringBytes is CSI's limit for every string without a limit of its own (B-1).
	MaxStringBytes = 128

	ownPrefix = "csi-"
	// SerialBytes is how many bytes of a disk's name the guest sees as serial number.
	SerialBytes = 20
	// nameAlphabet is base32hex in lower case, which the rack allows and which keeps the bytes' order.
	nameAlphabet = "0123456789abcdefghijklmnopqrstuv"
)

var nameEncoding = base32.NewEncoding(nameAlphabet).WithPadding(base32.NoPadding)

// DiskName returns the name of a volume's disk, which depends only on the cluster and on csiName,
// the CO's name for the volume. Names are unique on the rack, so one of two controllers that create
// the same volume fails. The name is no longer than a serial number, so a guest shows it whole.
func DiskName(cluster, csiName string) string { return ownName(cluster, csiName) }

// SnapshotName returns the rack's name for the snapshot that the CO calls csiName. A disk may have
// the same name: snapshots and disks have separate names on the rack.
func SnapshotName(cluster, csiName string) string { return ownName(cluster, csiName) }

// ownName hashes the cluster's id, a NUL and the CSI name. No id contains a NUL, so two different
// pairs of id and CSI name never yield the same text to hash.
func ownName(cluster, csiName string) string {
	sum := sha256.Sum256([]byte(cluster + "\x00" + csiName))
	return ownPrefix + nameEncoding.EncodeToString(sum[:])[:SerialBytes-len(ownPrefix)]
}

// IsOwnName reports whether the name has the form of the driver's names.
func IsOwnName(s string) bool {
	code, ok := strings.CutPrefix(s, ownPrefix)
	return ok && len(s) == SerialBytes && strings.Trim(code, nameAlphabet) == ""
}

// ParseID parses the id of a volume, snapshot or node, which is a UUID. Any other text must not
// reach the rack's API, which treats it as a name.
func ParseID(id string) (string, bool) {
	if len(id) != len(uuid.Nil.String()) {
		return "", false
	}
	u, err := uuid.Parse(id)
	return u.String(), err == nil
}

// IsID reports whether the text is a UUID in lower case, as the rack writes it.
func IsID(id string) bool {
	canonical, ok := ParseID(id)
	return ok && canonical == id
}

// RackName matches the valid names of objects on the rack.
var RackName = Word{63, regexp.MustCompile(`^[a-z]([-a-z0-9]*[a-z0-9])?$`)}

// Word matches the texts that Looks matches, up to a length of Most bytes. A limit in Looks itself
// would take tens of kilobytes, because Go compiles a copy of the expression for each byte.
type Word struct {
	Most  int
	Looks *regexp.Regexp
}

// MatchString reports whether the text matches.
func (w Word) MatchString(text string) bool {
	return len(text) <= w.Most && w.Looks.MatchString(text)
}

// CheckName checks the name of a new volume or snapshot by CSI's rules: at most 128 bytes of
// Unicode, without control characters other than tab, line feed and carriage return.
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

// Serial returns the serial number that a guest shows for the disk with this name.
func Serial(diskName string) string {
	return diskName[:min(len(diskName), SerialBytes)]
}

// NameAndID returns an object's name and id for messages. The rack's console shows the name, and
// Kubernetes shows the id. Either may be empty.
func NameAndID(name, id string) string {
	switch {
	case name == "":
		return id
	case id == "":
		return name
	}
	return fmt.Sprintf("%.80s (%.80s)", name, id)
}

// SizeText returns a size for messages, in GiB and in bytes.
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
// that it makes. It contains values that later calls need.
type Tag struct {
	// Name is the CO's name for the object, cut if the description would be too long.
	Name string `json:"name"`
	// RackName is the object's name on the rack: the hash of the CO's whole name. It is set only if
	// Name is cut.
	RackName    string `json:"rackName,omitempty"`
	Cluster     string `json:"cluster,omitempty"`
	MkfsOptions string `json:"mkfsOptions,omitempty"`
	// BlockSize is the block size of the disk that the snapshot was taken of. Disks made from the
	// snapshot inherit it. The rack no longer shows it after the original disk is deleted.
	BlockSize int `json:"blockSize,omitempty"`
	// Origin is what the disk was created from. If it was created blank, a sample of its bytes can
	// prove that it is still blank.
	Origin string `json:"origin,omitempty"`
	// Use says for what the volume was created: a filesystem, raw block, or both. The driver never
	// publishes a volume for filesystems as a raw block device.
	Use string `json:"use,omitempty"`
	// SourceBytes is the size of the snapshot that the disk was restored from. The rest of the disk
	// was created blank.
	SourceBytes int64 `json:"sourceBytes,omitempty"`
	// FilesystemUUID is the filesystem's UUID, for a snapshot whose filesystem the driver made, and
	// for a disk restored from that snapshot. It is empty for a disk that was created blank: its
	// filesystem has the disk's id as UUID.
	FilesystemUUID string `json:"filesystemUUID,omitempty"`
	// Claim is the namespace and name of the claim or VolumeSnapshot, for people who look at the rack.
	// The driver never updates it, and uses it only to propose a PersistentVolume to a person (audit
	// --output pv). If the description would be too long, Claim is cut and ends with "…", or is empty.
	Claim string `json:"claim,omitempty"`
}

// MaxDescriptionBytes is the length of the longest description. The rack stores 512 characters
// (omicron, schema/crdb/dbinit.sql: description STRING(512)), and answers 500 to a longer one.
const MaxDescriptionBytes = 512

// Description returns a description that contains the tag. For every valid request it has at most
// MaxDescriptionBytes: Description first shortens or omits the claim, and then shortens the name.
// The other fields together have at most 403 bytes.
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
				break // only with an invalid request
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
	encoder.SetEscapeHTML(false) // an escape makes six bytes of each of <>&
	if err := encoder.Encode(t); err != nil {
		panic(err) // cannot fail: strings and numbers
	}
	return strings.TrimSuffix(text.String(), "\n")
}

// ParseTag parses a description. ok is false if the driver did not write it.
func ParseTag(description string) (t Tag, ok bool) {
	text, ok := strings.CutPrefix(description, DriverName+" ")
	if !ok || json.Unmarshal([]byte(text), &t) != nil || t.Name == "" {
		return Tag{}, false
	}
	return t, true
}

// IsOf reports whether the tag belongs to the object that the cluster's CO calls csiName.
func (t Tag) IsOf(cluster, csiName string) bool {
	return t.Cluster == cluster && t.objectName() == ownName(cluster, csiName)
}

// Names reports whether the tag belongs to the object with this name on the rack. It does not if
// somebody has copied the description to another object.
func (t Tag) Names(rackName string) bool { return rackName == t.objectName() }

func (t Tag) objectName() string {
	if t.RackName != "" {
		return t.RackName
	}
	return ownName(t.Cluster, t.Name)
}
