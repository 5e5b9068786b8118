// Package node implements CSI's node service.
//
// Service answers the node RPCs. A request is parsed once; the device is found by its serial and
// kept open and locked from there to the answer; the mount table is read; package filesystem makes
// the volume's filesystem ready; package mount mounts it. What is mounted stays the kernel's
// knowledge, which every call reads again.
//
// The service keeps one record for each volume, in memory and in the state directory: which disk it
// is. NodeUnstageVolume and NodeUnpublishVolume get an id and a path and no more. Records only make
// answers stricter, so a lost one harms nobody.
//
// Inspect reports, beside a running service, what the node sees of its volumes, and changes
// nothing.
//
// InstanceID finds out which instance this is. The package never talks to the rack: a node needs no
// token. Its RPCs need Linux; elsewhere they answer UNIMPLEMENTED.
package node

import (
	"cmp"
	"log/slog"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
)

const (
	defaultDeviceTimeout  = 30 * time.Second
	defaultReleaseTimeout = 5 * time.Second
)

// The kernel's own trees, which are used unless Service names others.
const (
	DefaultSysfsRoot = "/sys"
	DefaultDevRoot   = "/dev"
)

// Service is CSI's node service. The zero value but for InstanceID is ready for use.
type Service struct {
	csi.UnimplementedNodeServer

	SysfsRoot     string // empty means /sys
	DevRoot       string // empty means /dev
	InstanceID    string
	MaxDisks      int // that the rack lets an instance have; 0 means 12
	Topology      map[string]string
	DeviceTimeout time.Duration // how long an attached disk may take to appear; 0 means 30 s
	// ReleaseTimeout is how long NodeUnstageVolume waits for others to release the device, such as a
	// short-lived mount namespace or a probe. 0 means 5 s.
	ReleaseTimeout time.Duration
	// StateDir holds the records of volumes; empty means that they are kept in memory only.
	StateDir string
	Log      *slog.Logger

	once  sync.Once
	store *recordStore
	scans filesystem.ZeroScans
	// told has the ids of volumes whose caller has heard that something could not be written when
	// they were unpublished or unstaged. The next stage or publish begins a use that it has not heard
	// of.
	told sync.Map
}

// Close stops the reads of whole disks, which go on without a call, and waits for their end.
func (n *Service) Close() {
	n.scans.Close()
}

func (n *Service) log() *slog.Logger { return cmp.Or(n.Log, slog.Default()) }

// Use is how much of a node is in use.
type Use struct {
	Volumes int // staged or published
	Disks   int // of the instance, the boot disk included
	Limit   int // of disks that the rack lets an instance have
}
