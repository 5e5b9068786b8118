package simulator

import (
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

// identity is what every named object of the rack begins with, in the rack's order of fields.
type identity struct {
	ID           string    `json:"id"`
	Name         string    `json:"name"`
	Description  string    `json:"description"`
	TimeCreated  timestamp `json:"time_created"`
	TimeModified timestamp `json:"time_modified"`
}

func newIdentity(id, name, description string) identity {
	t := now()
	return identity{id, name, description, t, t}
}

// timestamp is a moment as the rack's database keeps it: UTC, in microseconds (A02).
type timestamp struct{ time.Time }

func now() timestamp { return timestamp{time.Now().UTC().Truncate(time.Microsecond)} }

// MarshalJSON writes the timestamp as RFC 3339 with its microseconds.
func (t timestamp) MarshalJSON() ([]byte, error) {
	return []byte(t.UTC().Format(`"2006-01-02T15:04:05.000000Z"`)), nil
}

type project struct{ identity }

type disk struct {
	identity
	ProjectID  string    `json:"project_id"`
	SnapshotID *string   `json:"snapshot_id"`
	ImageID    *string   `json:"image_id"`
	Size       int64     `json:"size"`
	BlockSize  int       `json:"block_size"`
	State      diskState `json:"state"`
	DevicePath string    `json:"device_path"`
	DiskType   string    `json:"disk_type"`
	ReadOnly   bool      `json:"read_only"`
}

// diskState names the instance where the state has one.
type diskState struct {
	State    string `json:"state"`
	Instance string `json:"instance,omitempty"`
}

// The states that this rack's disks have.
const (
	stateCreating    = "creating"
	stateDetached    = "detached"
	stateAttached    = "attached"
	stateMaintenance = "maintenance"
	stateImportReady = "import_ready"
	stateFaulted     = "faulted"
)

const (
	typeDistributed = "distributed"
	typeLocal       = "local"
)

func (d disk) attachedTo(instanceID string) bool {
	return d.State == diskState{stateAttached, instanceID}
}

type snapshot struct {
	identity
	ProjectID string `json:"project_id"`
	DiskID    string `json:"disk_id"`
	State     string `json:"state"`
	Size      int64  `json:"size"`
}

const (
	snapshotCreating = "creating"
	snapshotReady    = "ready"
	snapshotFaulted  = "faulted"
)

// snapshotRecord is a snapshot with what the rack knows of it and does not show (A40).
type snapshotRecord struct {
	snapshot
	BlockSize int `json:"block_size"`
}

type image struct {
	identity
	ProjectID *string `json:"project_id"`
	OS        string  `json:"os"`
	Version   string  `json:"version"`
	Digest    *string `json:"digest"`
	BlockSize int     `json:"block_size"`
	Size      int64   `json:"size"`
}

type instance struct {
	identity
	ProjectID             string     `json:"project_id"`
	NCPUs                 int        `json:"ncpus"`
	Memory                int64      `json:"memory"`
	Hostname              string     `json:"hostname"`
	RunState              string     `json:"run_state"`
	TimeRunStateUpdated   timestamp  `json:"time_run_state_updated"`
	AutoRestartEnabled    bool       `json:"auto_restart_enabled"`
	AutoRestartPolicy     *string    `json:"auto_restart_policy"`
	AutoRestartCooldown   *timestamp `json:"auto_restart_cooldown_expiration"`
	TimeLastAutoRestarted *timestamp `json:"time_last_auto_restarted"`
	BootDiskID            *string    `json:"boot_disk_id"`
	CPUPlatform           *string    `json:"cpu_platform"`
	EnableJumboFrames     bool       `json:"enable_jumbo_frames"`
}

// The run states that this rack's instances have.
const (
	runStarting  = "starting"
	runRunning   = "running"
	runStopping  = "stopping"
	runStopped   = "stopped"
	runRebooting = "rebooting"
	runFailed    = "failed"
)

// active says that the instance has a VMM.
func (i instance) active() bool {
	switch i.RunState {
	case runStarting, runRunning, runStopping, runRebooting:
		return true
	}
	return false
}

// sees says that the instance has a guest that sees its disks. One that is stopping was halted.
func (i instance) sees() bool { return i.active() && i.RunState != runStopping }

func (i *instance) become(state string) {
	i.RunState, i.TimeRunStateUpdated = state, now()
}

// device is the disk as the guest of its instance shall see it.
func (d disk) device(instanceID string) dataplane.Device {
	return dataplane.Device{
		InstanceID: instanceID, DiskID: d.ID, DiskName: d.Name,
		SizeBytes: d.Size, BlockSize: d.BlockSize, ReadOnly: d.ReadOnly,
	}
}

const (
	gibibyte = 1 << 30
	tebibyte = 1 << 40
)

// devicePath is always this; the guest knows nothing of it (A03).
func devicePath(name string) string { return fmt.Sprintf("/mnt/%s", name) }
