package node

import (
	"log/slog"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	defaultDeviceTimeout  = 30 * time.Second
	defaultReleaseTimeout = 5 * time.Second
	DefaultSysfsRoot      = "/sys"
	DefaultDevRoot        = "/dev"
)

// Service is CSI's node service: it finds a volume's device on this instance, formats it once, mounts
// it and shows it to workloads. It never talks to the rack. What is mounted is in the kernel's
// mount tables, and every call reads them again; all that it keeps is which disk a volume is.
//
// On systems other than Linux every call answers UNIMPLEMENTED.
type Service struct {
	csi.UnimplementedNodeServer

	SysfsRoot     string // empty means /sys
	DevRoot       string // empty means /dev
	InstanceID    string
	MaxDisks      int // that the rack lets an instance have; 0 means 12
	Topology      map[string]string
	DeviceTimeout time.Duration // how long an attached disk may take to appear; 0 means 30 s
	// ReleaseTimeout is how long NodeUnstageVolume waits for others to let the device go: a
	// short-lived mount namespace or a probe may have it for a moment. 0 means 5 s.
	ReleaseTimeout time.Duration
	// StateDir is where it keeps which disk a volume is; empty means in memory only.
	StateDir string
	Log      *slog.Logger

	memory records
	scans  filesystem.ZeroScans
}

// Close stops what goes on without a call, and waits for its end.
func (n *Service) Close() { n.scans.Close() }

func (n *Service) deviceTimeout() time.Duration {
	if n.DeviceTimeout == 0 {
		return defaultDeviceTimeout
	}
	return n.DeviceTimeout
}

func (n *Service) releaseTimeout() time.Duration {
	if n.ReleaseTimeout == 0 {
		return defaultReleaseTimeout
	}
	return n.ReleaseTimeout
}

func (n *Service) log() *slog.Logger {
	if n.Log == nil {
		return slog.Default()
	}
	return n.Log
}
