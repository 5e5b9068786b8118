package adminapi

import (
	"fmt"
	"time"
)

// Switches are the settings that can be changed while the rack runs.
type Switches struct {
	// Hotplug is what the rack does with the disks of running instances (A17).
	Hotplug Hotplug `json:"hotplug"`
	// DeviceDelay is the time from an attach until the device appears in the guest.
	DeviceDelay Duration `json:"device_delay"`
	// CreateHold and SnapshotHold are the times for which the rack holds those requests open, even
	// when they are done. A change also applies to requests that are already open.
	CreateHold   Duration `json:"create_hold"`
	SnapshotHold Duration `json:"snapshot_hold"`
	// FreeDelay is the time from the deletion of a disk or a snapshot until its bytes and its share
	// of the quota are freed; 0 frees them within the request (A68).
	FreeDelay Duration `json:"free_delay"`
	// QuotaFirst frees the quota of what is deleted within the request, and only its space after
	// FreeDelay. The rack then has as much space as the quota allows. A creation that needs the
	// space that is not free yet finds none, although the quota has room (A68).
	QuotaFirst bool `json:"quota_first"`
	// InstanceDelay is the time that an instance takes to start, stop or reboot.
	InstanceDelay Duration `json:"instance_delay"`
	// QuotaBytes is the silo's quota of storage.
	QuotaBytes Size `json:"quota_bytes"`
	// Full makes the rack run out of physical space. It then refuses everything that needs space,
	// whatever the quota (A27).
	Full bool `json:"full"`
	// Replacing means that the rack replaces a region of every disk, as after the loss of a drive. It
	// takes no snapshots in the meantime, which may last (A39).
	Replacing bool `json:"replacing"`
	// DiskLimit is the number of disks that an instance may have.
	DiskLimit int `json:"disk_limit"`
	// Role is the role of the token's bearer in the projects.
	Role string `json:"role"`
}

// These are the roles that the token's bearer may have in the rack's projects. A collaborator
// is one of the silo, and may create projects. An administrator of the fleet may do that too, and
// has the operations on the pools of the fleet.
const (
	RoleCollaborator = "collaborator"
	RoleViewer       = "viewer"
	RoleNone         = "none"
	RoleFleetAdmin   = "fleet-admin"
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
