package simulator

import (
	"fmt"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	// A16: twelve disks for an instance, its boot disk among them.
	defaultDiskLimit = 12
	defaultQuota     = 64 * tebibyte
)

func checkSwitches(s adminapi.Switches) error {
	switch {
	case s.QuotaBytes < 0:
		return fmt.Errorf("quota_bytes is %d; it cannot be negative", s.QuotaBytes)
	case s.DiskLimit < 0:
		return fmt.Errorf("disk_limit is %d; it cannot be negative", s.DiskLimit)
	}
	switch s.Role {
	case adminapi.RoleCollaborator, adminapi.RoleViewer, adminapi.RoleNone:
		return nil
	}
	return fmt.Errorf("role is %q; use %s, %s or %s", s.Role, adminapi.RoleCollaborator,
		adminapi.RoleViewer,
		adminapi.RoleNone)
}

// switchboard holds the switches in force.
type switchboard struct {
	mu sync.Mutex
	// mu guards now.
	now adminapi.Switches
}

func (b *switchboard) get() adminapi.Switches {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.now
}

// change applies a change that leaves the switches in order, or none of it.
func (b *switchboard) change(apply func(*adminapi.Switches) error) (adminapi.Switches, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	next := b.now
	err := apply(&next)
	if err == nil {
		err = checkSwitches(next)
	}
	if err == nil {
		b.now = next
	}
	return b.now, err
}

func (s *Server) initialSwitches() adminapi.Switches {
	return adminapi.Switches{
		Hotplug:       !s.ColdPlug,
		DeviceDelay:   adminapi.Duration(s.DeviceDelay),
		CreateHold:    adminapi.Duration(s.CreateHold),
		SnapshotHold:  adminapi.Duration(s.SnapshotHold),
		FreeDelay:     adminapi.Duration(s.FreeDelay),
		InstanceDelay: adminapi.Duration(s.InstanceDelay),
		QuotaBytes:    orDefault(s.QuotaBytes, defaultQuota),
		DiskLimit:     orDefault(s.DiskLimit, defaultDiskLimit),
		Role:          orDefault(s.Role, adminapi.RoleCollaborator),
	}
}

func orDefault[T comparable](given, otherwise T) T {
	var zero T
	if given == zero {
		return otherwise
	}
	return given
}

func (s *Server) hold(d adminapi.Duration) { wait(s.life, time.Duration(d)) }
