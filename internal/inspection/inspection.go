// Package inspection defines the JSON report on the volumes of a node: oxide-csi-plugin inspect
// writes it in the node's pod, and oxide-csi-plugin doctor reads it.
package inspection

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

// Format is the version of the report's format.
const Format = 1

// MaxBytes is more than the report of any node.
const MaxBytes = 16 << 20

// Report describes what a node sees. It contains no mount flags, and no token, because a node has
// none.
type Report struct {
	Format   int       `json:"format"`
	Version  string    `json:"version"` // of the driver
	At       time.Time `json:"at"`
	Instance string    `json:"instance,omitempty"` // the id of the instance that the node is
	Devices  []Device  `json:"devices"`            // every disk with a serial number
	Volumes  []Volume  `json:"volumes"`
	Unseen   []Unseen  `json:"unseen,omitempty"`
}

// Unseen is a part of the report that could not be filled, and why.
type Unseen struct {
	Part string `json:"part"`
	Why  string `json:"why"`
}

// The parts of a report that may be unseen.
const (
	PartInstance   = "instance"
	PartDevices    = "devices"
	PartRecord     = "record"
	PartDevice     = "device" // the fields that need an open device
	PartFilesystem = "filesystem"
	PartMounts     = "mounts"
	PartFlight     = "flight"
)

// Device is a disk of the instance.
type Device struct {
	Name       string `json:"name"` // such as nvme3n1
	Number     string `json:"number"`
	Serial     string `json:"serial"`
	SizeBytes  int64  `json:"sizeBytes"`
	BlockBytes int64  `json:"blockBytes,omitempty"` // of a volume's only device
	ReadOnly   bool   `json:"readOnly,omitempty"`   // of a volume's only device
}

// Volume is one volume on the node.
type Volume struct {
	ID string `json:"id"`
	// Serial is the serial number of the search, and From is its source.
	Serial string `json:"serial,omitempty"`
	From   string `json:"from,omitempty"`
	// Record is the driver's record of the volume, which it has while it is staged.
	Record *VolumeRecord `json:"record,omitempty"`
	// Devices are the disks with the serial number: one, if all is well.
	Devices     []Device       `json:"devices"`
	Filesystems []Filesystem   `json:"filesystems"`
	Mounts      []Mount        `json:"mounts"`
	Flight      []flight.Entry `json:"flight"` // the latest changes, the oldest first
	Open        []flight.Entry `json:"open"`   // the changes that are begun and not ended
	// Problems are the driver's own errors about the device and its content.
	Problems []Problem `json:"problems,omitempty"`
	Unseen   []Unseen  `json:"unseen,omitempty"`
}

// Problem is an error of the driver.
type Problem struct {
	Reason csierr.Reason `json:"reason"`
	Says   string        `json:"says"`
}

// VolumeRecord is the driver's record of a volume.
type VolumeRecord struct {
	Disk     string `json:"disk"`
	Instance string `json:"instance"`
	Block    bool   `json:"block,omitempty"`
}

// Filesystem is a filesystem that the driver could have made, as its superblock describes it.
type Filesystem struct {
	Type      string    `json:"type"`
	UUID      uuid.UUID `json:"uuid"`
	SizeBytes int64     `json:"sizeBytes"`
	Damaged   bool      `json:"damaged,omitempty"`
	// NotGrown reports that it is mounted and leaves a part of its disk unused.
	NotGrown bool `json:"notGrown,omitempty"`
}

// Mount is a mount of the volume's filesystem, or of its device's node.
type Mount struct {
	Path   string `json:"path"`
	FSType string `json:"fsType,omitempty"` // empty for a node
	// Failed is the filesystem's condition after errors; empty if there were none.
	Failed string `json:"failed,omitempty"`
	// Writable reports that the kernel takes writes to the filesystem here.
	Writable bool `json:"writable,omitempty"`
	// Process names the process in whose mount namespace it is; empty for the driver's own.
	Process string `json:"process,omitempty"`
}

// WhyUnseen returns why a part could not be seen, or "" if it was.
func WhyUnseen(parts []Unseen, part string) string {
	for _, u := range parts {
		if u.Part == part {
			return u.Why
		}
	}
	return ""
}

// Parse parses a report.
func Parse(data []byte) (Report, error) {
	if len(data) > MaxBytes {
		return Report{}, fmt.Errorf("has more than %d bytes", MaxBytes)
	}
	decoder := json.NewDecoder(bytes.NewReader(data))
	var r Report
	if err := decoder.Decode(&r); err != nil {
		return Report{}, fmt.Errorf("is not the output of oxide-csi-plugin inspect: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return Report{}, errors.New("is not the output of oxide-csi-plugin inspect: something follows it")
	}
	if r.Format != Format {
		return Report{}, fmt.Errorf("has the format %d, and this program reads %d; use the doctor of "+
			"the node's release", r.Format, Format)
	}
	return r, nil
}

// Asked names a volume that a report has to describe.
type Asked struct {
	ID   string
	Disk string // the disk's name, if it is known
}
