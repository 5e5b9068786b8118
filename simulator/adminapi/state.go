package adminapi

import "time"

// State is everything that a rack has at one moment.
type State struct {
	Projects    []Project    `json:"projects"`
	Instances   []Instance   `json:"instances"`
	Disks       []Disk       `json:"disks"`
	Snapshots   []Snapshot   `json:"snapshots"`
	Images      []Image      `json:"images"`
	Attachments []Attachment `json:"attachments"`
	LoopDevices []LoopDevice `json:"loop_devices"`
	Machines    []Machine    `json:"machines,omitempty"`
	// StorageBytes is the quota that disks and snapshots use, including deleted ones until they are
	// freed.
	StorageBytes int64 `json:"storage_bytes"`
}

// Identity has the fields that every named object of the rack has.
type Identity struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	TimeCreated  time.Time `json:"time_created"`
	TimeModified time.Time `json:"time_modified"`
}

// Project is a project of the rack.
type Project struct{ Identity }

// Instance is an instance in any run state.
type Instance struct {
	Identity
	ProjectID           string    `json:"project_id"`
	NCPUs               int       `json:"ncpus"`
	Memory              int64     `json:"memory"`
	Hostname            string    `json:"hostname"`
	RunState            string    `json:"run_state"`
	TimeRunStateUpdated time.Time `json:"time_run_state_updated"`
	BootDiskID          *string   `json:"boot_disk_id"`
}

// Machine is the virtual machine of an instance. SSH is a local address that is forwarded to its
// sshd, and Console has the last bytes of its serial console.
type Machine struct {
	InstanceID string `json:"instance_id"`
	SSH        string `json:"ssh"`
	Console    string `json:"console"`
}

// Disk is a disk in any state.
type Disk struct {
	Identity
	ProjectID  string    `json:"project_id"`
	SnapshotID *string   `json:"snapshot_id"`
	ImageID    *string   `json:"image_id"`
	Size       int64     `json:"size"`
	BlockSize  int       `json:"block_size"`
	State      DiskState `json:"state"`
	DevicePath string    `json:"device_path"`
	DiskType   string    `json:"disk_type"`
	ReadOnly   bool      `json:"read_only"`
}

// DiskState is the name of a state, with the instance's ID if the state has one.
type DiskState struct {
	State    string `json:"state"`
	Instance string `json:"instance,omitempty"`
}

// Snapshot is a snapshot in any state.
type Snapshot struct {
	Identity
	ProjectID string `json:"project_id"`
	DiskID    string `json:"disk_id"`
	State     string `json:"state"`
	Size      int64  `json:"size"`
	BlockSize int    `json:"block_size"`
}

// Image is an image of a project, or of the silo if it has no project.
type Image struct {
	Identity
	ProjectID *string `json:"project_id"`
	OS        string  `json:"os"`
	Version   string  `json:"version"`
	Digest    *string `json:"digest"`
	BlockSize int     `json:"block_size"`
	Size      int64   `json:"size"`
}

// Attachment is a disk that is attached to an instance.
type Attachment struct {
	InstanceID string `json:"instance_id"`
	DiskID     string `json:"disk_id"`
}

// LoopDevice is the loop device through which a guest sees a disk.
type LoopDevice struct {
	Path        string `json:"path"`
	Serial      string `json:"serial"`
	BackingFile string `json:"backing_file"`
}
