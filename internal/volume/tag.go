package volume

import (
	"encoding/json"
	"strings"
	"unicode/utf8"
)

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
	// Claim is the namespace and name of the claim, or of the VolumeSnapshot, for people who look at
	// the rack. It is a label and no identity: nothing is decided from it, and nobody updates it. If
	// the description would be too long, Claim is only a beginning with "…", or empty.
	Claim string `json:"claim,omitempty"`
}

// MaxDescriptionBytes is the longest description of an object. The rack stores 512 characters
// (omicron, schema/crdb/dbinit.sql: description STRING(512)), and answers 500 to a longer one every
// time it is asked.
const MaxDescriptionBytes = 512

// Description returns the description of an object with the tag. It has at most MaxDescriptionBytes
// for every legal request: first the claim is shortened or left out, then the end of the name.
// Nothing else has to be, because all other fields are limited to 403 bytes together.
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
				break // of no legal request
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
