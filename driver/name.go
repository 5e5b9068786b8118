package driver

import (
	"crypto/sha256"
	"encoding/base32"
	"encoding/json"
	"strings"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// driverName is the driver's name in CSI, and the mark in the description of what it made.
const driverName = "csi.oxide.computer"

// The keys of volume_context and publish_context.
const (
	ctxDiskName       = "diskName"       // both
	ctxDiskID         = "diskId"         // both
	ctxBlockSize      = "blockSize"      // both
	ctxMkfsOptions    = "mkfsOptions"    // volume_context
	ctxSizeBytes      = "sizeBytes"      // publish_context
	ctxReadOnly       = "readOnly"       // publish_context
	ctxOrigin         = "origin"         // publish_context, see mark.Origin
	ctxUse            = "use"            // publish_context, see mark.Use
	ctxSourceBytes    = "sourceBytes"    // publish_context, see mark.SourceBytes
	ctxFilesystemUUID = "filesystemUUID" // publish_context, see expectedUUID
)

// What a disk was made from, and what a volume is for.
const (
	originBlank    = "blank"
	originSnapshot = "snapshot"
	originImage    = "image"

	useFilesystem = "filesystem"
	useBlock      = "block"
	useBoth       = "both"
)

const (
	ownPrefix = "csi-"
	// ownNameBytes is as much of a disk's name as the guest sees as its NVMe serial.
	ownNameBytes = 20
	// base32hex in lower case: it sorts, and every character may stand in a name of the rack.
	nameAlphabet = "0123456789abcdefghijklmnopqrstuv"
)

var nameEncoding = base32.NewEncoding(nameAlphabet).WithPadding(base32.NoPadding)

// diskName is the name of the disk of the volume that the CO of a cluster calls csiName. It is a
// pure function, so that two controllers that create the same volume meet in the rack's rule that
// names are unique; and it is exactly as long as the serial a guest sees, so that the serial is the
// whole name.
func diskName(cluster, csiName string) string { return ownName(cluster, csiName) }

// snapshotName is the name of the snapshot that the CO calls csiName. Snapshots have names of their
// own on the rack, so this may equal a disk's.
func snapshotName(cluster, csiName string) string { return ownName(cluster, csiName) }

// ownName hashes the cluster's id too, so that the volumes of two clusters may have the same name.
// No id contains a NUL, so no two pairs are the same text.
func ownName(cluster, csiName string) string {
	sum := sha256.Sum256([]byte(cluster + "\x00" + csiName))
	return ownPrefix + nameEncoding.EncodeToString(sum[:])[:ownNameBytes-len(ownPrefix)]
}

// isOwnName says whether a name has the form of those the driver gives.
func isOwnName(s string) bool {
	code, ok := strings.CutPrefix(s, ownPrefix)
	return ok && len(s) == ownNameBytes && strings.Trim(code, nameAlphabet) == ""
}

// rackID reads a volume, snapshot or node id. What is no UUID names nothing that exists, and must
// not reach the API, which would take it for an object's name.
func rackID(id string) (oxide.NameOrId, bool) {
	if len(id) != len(uuid.Nil.String()) {
		return "", false
	}
	u, err := uuid.Parse(id)
	return oxide.NameOrId(u.String()), err == nil
}

// isRackID says whether the rack could have written an id: a UUID in lower case.
func isRackID(id string) bool {
	canonical, ok := rackID(id)
	return ok && string(canonical) == id
}

// mark is what the driver writes into the description of a disk or snapshot it makes: the CO's name
// for it, which the rack's name only hashes, and what else a later call has to answer again.
type mark struct {
	Name        string `json:"name"`
	Cluster     string `json:"cluster,omitempty"`
	MkfsOptions string `json:"mkfsOptions,omitempty"`
	// BlockSize is what was asked of a disk that inherits its blocks. One that inherited others was
	// never handed out.
	BlockSize int `json:"blockSize,omitempty"`
	// Origin is what the disk was made from. Only of one that was made blank can a sample of its
	// bytes prove that it still is.
	Origin string `json:"origin,omitempty"`
	// Use is what the volume's capabilities were when it was created. One that is for filesystems
	// alone is never shown to a workload as a raw device.
	Use string `json:"use,omitempty"`
	// SourceBytes is the size of the snapshot that the disk was restored from. What lies behind it
	// was made blank by the rack.
	SourceBytes int64 `json:"sourceBytes,omitempty"`
	// FilesystemUUID is that of the filesystem which a snapshot holds, if the driver made it, and so
	// of a disk that was restored from it. A disk that was made blank gets its own id.
	FilesystemUUID string `json:"filesystemUUID,omitempty"`
}

func (m mark) description() string {
	text, err := json.Marshal(m)
	if err != nil {
		panic(err) // strings and a number
	}
	return driverName + " " + string(text)
}

// readMark reads a description; ok is false for an object the driver did not make.
func readMark(description string) (m mark, ok bool) {
	text, ok := strings.CutPrefix(description, driverName+" ")
	if !ok || json.Unmarshal([]byte(text), &m) != nil || m.Name == "" {
		return mark{}, false
	}
	return m, true
}
