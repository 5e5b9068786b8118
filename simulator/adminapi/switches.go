package adminapi

import (
	"fmt"
	"time"
)

// Switches are the settings that can be changed while the rack runs.
type Switches struct {
	// Hotplug allows disks to be attached to and detached from a running instance.
	Hotplug bool `json:"hotplug"`
	// DeviceDelay is the time from an attach until the device appears in the guest.
	DeviceDelay Duration `json:"device_delay"`
	// CreateHold and SnapshotHold are the times for which the rack holds those requests open, even
	// when they are done. A change also applies to requests that are already open.
	CreateHold   Duration `json:"create_hold"`
	SnapshotHold Duration `json:"snapshot_hold"`
	// FreeDelay is the time from the deletion of a disk or a snapshot until its bytes and its share
	// of the quota are freed; 0 frees them within the request (A68).
	FreeDelay Duration `json:"free_delay"`
	// InstanceDelay is the time that an instance takes to start, stop or reboot.
	InstanceDelay Duration `json:"instance_delay"`
	// QuotaBytes is the silo's quota of storage.
	QuotaBytes int64 `json:"quota_bytes"`
	// Full makes the rack run out of physical space. It then refuses everything that needs space,
	// whatever the quota (A27).
	Full bool `json:"full"`
	// DiskLimit is the number of disks that an instance may have.
	DiskLimit int `json:"disk_limit"`
	// Role is the role of the token's bearer in the projects.
	Role string `json:"role"`
}

// These are the roles that the token's bearer may have in the rack's projects.
const (
	RoleCollaborator = "collaborator"
	RoleViewer       = "viewer"
	RoleNone         = "none"
)

// Duration is a time.Duration that JSON shows as "1.5s".
type Duration time.Duration

// MarshalText writes the duration as "1.5s".
func (d Duration) MarshalText() ([]byte, error) {
	return []byte(time.Duration(d).String()), nil
}

// UnmarshalText reads "1.5s" and refuses a negative duration.
func (d *Duration) UnmarshalText(text []byte) error {
	parsed, err := time.ParseDuration(string(text))
	if err == nil && parsed < 0 {
		err = fmt.Errorf("%s is negative", text)
	}
	*d = Duration(parsed)
	return err
}
