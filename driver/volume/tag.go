package volume

import (
	"encoding/json"
	"strings"
)

// Tag is the ownership tag, which the driver writes into the description of every disk and snapshot
// that it makes: the CO's name, of which the rack's name is only a hash, and what later calls need.
type Tag struct {
	Name        string `json:"name"`
	Cluster     string `json:"cluster,omitempty"`
	MkfsOptions string `json:"mkfsOptions,omitempty"`
	// BlockSize is the requested block size of a disk that inherits it. A disk that inherited another
	// one was never returned to a CO.
	BlockSize int `json:"blockSize,omitempty"`
	// Origin is what the disk was made from. A sample of the bytes proves that a disk is blank only if
	// it was made blank.
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
}

// Description returns the description of an object with the tag.
func (t Tag) Description() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // cannot fail: strings and numbers
	}
	return DriverName + " " + string(text)
}

// ParseTag parses a description; ok is false for an object that the driver did not make.
func ParseTag(description string) (t Tag, ok bool) {
	text, ok := strings.CutPrefix(description, DriverName+" ")
	if !ok || json.Unmarshal([]byte(text), &t) != nil || t.Name == "" {
		return Tag{}, false
	}
	return t, true
}
