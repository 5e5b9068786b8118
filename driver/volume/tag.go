package volume

import (
	"encoding/json"
	"strings"
)

// Tag is what the driver writes into the description of a disk or snapshot it makes: the CO's name
// for it, which the rack's name only hashes, and what else a later call has to answer again.
type Tag struct {
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

// Description is the description of an object with the tag.
func (t Tag) Description() string {
	text, err := json.Marshal(t)
	if err != nil {
		panic(err) // strings and a number
	}
	return DriverName + " " + string(text)
}

// ParseTag reads a description; ok is false for an object the driver did not make.
func ParseTag(description string) (t Tag, ok bool) {
	text, ok := strings.CutPrefix(description, DriverName+" ")
	if !ok || json.Unmarshal([]byte(text), &t) != nil || t.Name == "" {
		return Tag{}, false
	}
	return t, true
}
