package adminapi

import (
	"slices"
	"time"
)

// Identity has the first JSON fields of every named object, in the rack's order. All answers about
// an object contain its record, so they show the same values (A72).
type Identity struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	TimeCreated  Timestamp `json:"time_created"`
	TimeModified Timestamp `json:"time_modified"`
}

// Ident returns the identity. This method makes each type that embeds Identity a store.Record.
func (i Identity) Ident() Identity { return i }

// Touch sets the time of modification to now.
func (i *Identity) Touch() { i.TimeModified = Now() }

// Timestamp is a time as the rack's database stores it: UTC, in microseconds (A02).
type Timestamp struct{ time.Time }

// Now returns the present time.
func Now() Timestamp { return Timestamp{time.Now().UTC().Truncate(time.Microsecond)} }

// MarshalJSON writes the timestamp as RFC 3339 with its microseconds.
func (t Timestamp) MarshalJSON() ([]byte, error) {
	return []byte(t.UTC().Format(`"2006-01-02T15:04:05.000000Z"`)), nil
}

// Project is a project.
type Project struct{ Identity }

// Disk is a disk in the form of the API.
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

// DiskState is the state of a disk. An attached disk's state has the ID of the instance.
type DiskState struct {
	State    string `json:"state"`
	Instance string `json:"instance,omitempty"`
}

// AttachedTo reports whether the disk is attached to the instance with this ID.
func (d Disk) AttachedTo(instanceID string) bool {
	return d.State == DiskState{"attached", instanceID}
}

// Snapshot is a snapshot in the form of the API.
type Snapshot struct {
	Identity
	ProjectID string `json:"project_id"`
	DiskID    string `json:"disk_id"`
	State     string `json:"state"`
	Size      int64  `json:"size"`
}

// SnapshotRecord is a snapshot with the fields that the API does not show (A40).
type SnapshotRecord struct {
	Snapshot
	BlockSize int `json:"block_size"`
}

// Image is an image in the form of the API.
type Image struct {
	Identity
	ProjectID *string `json:"project_id"`
	OS        string  `json:"os"`
	Version   string  `json:"version"`
	Digest    *string `json:"digest"`
	BlockSize int     `json:"block_size"`
	Size      int64   `json:"size"`
}

// Instance is an instance in the form of the API.
type Instance struct {
	Identity
	ProjectID             string     `json:"project_id"`
	NCPUs                 int        `json:"ncpus"`
	Memory                int64      `json:"memory"`
	Hostname              string     `json:"hostname"`
	RunState              string     `json:"run_state"`
	TimeRunStateUpdated   Timestamp  `json:"time_run_state_updated"`
	AutoRestartEnabled    bool       `json:"auto_restart_enabled"`
	AutoRestartPolicy     *string    `json:"auto_restart_policy"`
	AutoRestartCooldown   *Timestamp `json:"auto_restart_cooldown_expiration"`
	TimeLastAutoRestarted *Timestamp `json:"time_last_auto_restarted"`
	BootDiskID            *string    `json:"boot_disk_id"`
	CPUPlatform           *string    `json:"cpu_platform"`
	EnableJumboFrames     bool       `json:"enable_jumbo_frames"`
}

// Active reports whether the instance has a VMM.
func (i Instance) Active() bool {
	return slices.Contains([]string{"starting", "running", "stopping", "rebooting"}, i.RunState)
}

// HasGuest reports whether a guest sees the instance's disks. A stopping instance has no guest.
func (i Instance) HasGuest() bool { return i.Active() && i.RunState != "stopping" }

// SetRunState sets the run state, and the time of its change to now.
func (i *Instance) SetRunState(state string) {
	i.RunState, i.TimeRunStateUpdated = state, Now()
}
