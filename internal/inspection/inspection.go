// Package inspection defines the JSON report on a node's volumes. "oxide-csi-plugin inspect" writes
// it in the node's pod, and "oxide-csi-plugin doctor" reads it.
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

// Format is the version of the report's JSON format.
const Format = 1

// MaxBytes limits the reports that Parse accepts. No node's report is that large.
const MaxBytes = 16 << 20

// Report describes a node's disks and volumes. It contains no mount flags, because they may be
// secret, and no token, because a node has none.
type Report struct {
	Format   int       `json:"format"`
	Version  string    `json:"version"` // of the driver
	At       time.Time `json:"at"`
	Instance string    `json:"instance,omitempty"` // the id of the node's instance
	Devices  []Device  `json:"devices"`            // every disk with a serial number
	Volumes  []Volume  `json:"volumes"`
	Unseen   []Unseen  `json:"unseen,omitempty"`
}

// Unseen names a part that the report lacks, with the reason.
type Unseen struct {
	Part string `json:"part"`
	Why  string `json:"why"`
}

// The parts that a report may lack.
const (
	PartInstance   = "instance"
	PartDevices    = "devices"
	PartRecord     = "record"
	PartDevice     = "device" // the fields that need an open device
	PartFilesystem = "filesystem"
	PartMounts     = "mounts"
	PartFlight     = "flight"
)

// Device is a disk of the instance, as the node sees it.
type Device struct {
	Name       string `json:"name"` // such as nvme3n1
	Number     string `json:"number"`
	Serial     string `json:"serial"`
	SizeBytes  int64  `json:"sizeBytes"`
	BlockBytes int64  `json:"blockBytes,omitempty"` // set only in a Volume with one device
	ReadOnly   bool   `json:"readOnly,omitempty"`   // set only in a Volume with one device
}

// Volume describes a volume on the node.
type Volume struct {
	ID string `json:"id"`
	// Serial is the serial number of the volume's disk. From names the source of the number.
	Serial string `json:"serial,omitempty"`
	From   string `json:"from,omitempty"`
	// Record is the driver's record of the volume, which exists while the volume is staged.
	Record *VolumeRecord `json:"record,omitempty"`
	// Devices are the disks with this serial number. A healthy volume has exactly one.
	Devices     []Device       `json:"devices"`
	Filesystems []Filesystem   `json:"filesystems"`
	Mounts      []Mount        `json:"mounts"`
	Flight      []flight.Entry `json:"flight"` // the latest changes, the oldest first
	Open        []flight.Entry `json:"open"`   // changes that were begun and not ended
	// Problems are errors of the driver about the device or its content.
	Problems []Problem `json:"problems,omitempty"`
	Unseen   []Unseen  `json:"unseen,omitempty"`
}

// Problem is an error of the driver: its reason and its text.
type Problem struct {
	Reason csierr.Reason `json:"reason"`
	Says   string        `json:"says"`
}

// VolumeRecord is the part of the driver's record that a diagnosis reads.
type VolumeRecord struct {
	Disk     string `json:"disk"`
	Instance string `json:"instance"`
	Block    bool   `json:"block,omitempty"`
}

// Filesystem describes an ext, xfs or btrfs filesystem by its superblock.
type Filesystem struct {
	Type      string    `json:"type"`
	UUID      uuid.UUID `json:"uuid"`
	SizeBytes int64     `json:"sizeBytes"`
	Damaged   bool      `json:"damaged,omitempty"`
	// NotGrown reports whether the filesystem is mounted and smaller than its disk.
	NotGrown bool `json:"notGrown,omitempty"`
}

// Mount is a mount of the volume's filesystem or, for a raw block volume, of its device node.
type Mount struct {
	Path   string `json:"path"`
	FSType string `json:"fsType,omitempty"` // empty for a device node
	// Failed is "read-only after errors", for example. Failed and Writable need an empty Process.
	Failed   string `json:"failed,omitempty"`
	Writable bool   `json:"writable,omitempty"`
	// Process names a process in the mount's namespace. It is "" for the driver's own namespace.
	Process string `json:"process,omitempty"`
}

// WhyUnseen returns why the report lacks the part, or "" if the report contains it.
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

// Asked is a volume that the report must describe.
type Asked struct {
	ID   string
	Disk string // the disk's name, if it is known
}
