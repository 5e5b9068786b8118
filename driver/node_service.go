package driver

import (
	"log/slog"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
)

const (
	defaultDeviceTimeout  = 30 * time.Second
	defaultReleaseTimeout = 5 * time.Second
	// defaultMaxDisks is what a rack lets an instance have, the boot disk included.
	defaultMaxDisks  = 12
	defaultSysfsRoot = "/sys"
	defaultDevRoot   = "/dev"
)

// Node is CSI's node service: it finds a volume's device on this instance, formats it once, mounts
// it and shows it to workloads. It never talks to the rack and keeps nothing on disk: what is
// mounted is in the kernel's mount table, and every call reads it again.
//
// On systems other than Linux every call answers UNIMPLEMENTED.
type Node struct {
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
	Log            *slog.Logger

	seen seenVolumes
}

// seenVolumes remembers which disk belongs to a volume id, from the requests that said so. It only
// makes answers stricter. After a restart it is empty, and then NodeGetVolumeStats can only say
// that the path shows some disk of this instance, not that it shows this volume's, and
// NodeUnstageVolume cannot look whether a block volume is published still.
type seenVolumes struct {
	mu sync.Mutex
	// guarded by mu
	disks map[string]string
}

func (s *seenVolumes) remember(volumeID, diskName string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.disks == nil {
		s.disks = map[string]string{}
	}
	s.disks[volumeID] = diskName
}

func (s *seenVolumes) forget(volumeID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.disks, volumeID)
}

func (s *seenVolumes) disk(volumeID string) (name string, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name, ok = s.disks[volumeID]
	return name, ok
}

func (n *Node) deviceTimeout() time.Duration {
	if n.DeviceTimeout == 0 {
		return defaultDeviceTimeout
	}
	return n.DeviceTimeout
}

func (n *Node) releaseTimeout() time.Duration {
	if n.ReleaseTimeout == 0 {
		return defaultReleaseTimeout
	}
	return n.ReleaseTimeout
}

func (n *Node) log() *slog.Logger {
	if n.Log == nil {
		return slog.Default()
	}
	return n.Log
}
