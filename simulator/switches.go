package simulator

import (
	"fmt"
	"sync"
	"time"
)

// Switches are what can be changed while the rack serves.
type Switches struct {
	// Hotplug lets disks be attached to and detached from a running instance.
	Hotplug bool `json:"hotplug"`
	// DeviceDelay is how long after its attach a device shows in the guest.
	DeviceDelay Duration `json:"device_delay"`
	// CreateHold and SnapshotHold are how long those requests are held, done or not.
	CreateHold   Duration `json:"create_hold"`
	SnapshotHold Duration `json:"snapshot_hold"`
	// FreeDelay is how long after the deletion of a disk or a snapshot its bytes and its share of the
	// quota are freed; 0 is within the request (A68).
	FreeDelay Duration `json:"free_delay"`
	// InstanceDelay is how long an instance takes to start, stop or reboot.
	InstanceDelay Duration `json:"instance_delay"`
	// QuotaBytes is the silo's quota of storage.
	QuotaBytes int64 `json:"quota_bytes"`
	// DiskLimit is how many disks an instance may have.
	DiskLimit int `json:"disk_limit"`
	// Role is what the token's bearer may do in the projects: collaborator, viewer or none.
	Role string `json:"role"`
}

const (
	// A16: twelve disks for an instance, its boot disk among them.
	defaultDiskLimit = 12
	defaultQuota     = 64 * tebibyte
)

func (s Switches) check() error {
	switch {
	case s.QuotaBytes < 0:
		return fmt.Errorf("quota_bytes is %d; it cannot be negative", s.QuotaBytes)
	case s.DiskLimit < 0:
		return fmt.Errorf("disk_limit is %d; it cannot be negative", s.DiskLimit)
	}
	switch s.Role {
	case RoleCollaborator, RoleViewer, RoleNone:
		return nil
	}
	return fmt.Errorf("role is %q; use %s, %s or %s", s.Role, RoleCollaborator, RoleViewer,
		RoleNone)
}

// switchboard holds the switches in force.
type switchboard struct {
	mu sync.Mutex
	// mu guards now.
	now Switches
}

func (b *switchboard) get() Switches {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// change applies a change that leaves the switches in order, or none of it.
func (b *switchboard) change(apply func(*Switches) error) (Switches, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.now
	err := apply(&next)
	if err == nil {
		err = next.check()
	}
	if err == nil {
		b.now = next
	}
	return b.now, err
}

func (s *Server) initialSwitches() Switches {
	return Switches{
		Hotplug:       !s.ColdPlug,
		DeviceDelay:   Duration(s.DeviceDelay),
		CreateHold:    Duration(s.CreateHold),
		SnapshotHold:  Duration(s.SnapshotHold),
		FreeDelay:     Duration(s.FreeDelay),
		InstanceDelay: Duration(s.InstanceDelay),
		QuotaBytes:    orDefault(s.QuotaBytes, defaultQuota),
		DiskLimit:     orDefault(s.DiskLimit, defaultDiskLimit),
		Role:          orDefault(s.Role, RoleCollaborator),
	}
}

func orDefault[T comparable](given, otherwise T) T {
	var zero T
	if given == zero {
		return otherwise
	}
	return given
}

func (s *Server) hold(d Duration) { wait(s.life, time.Duration(d)) }
