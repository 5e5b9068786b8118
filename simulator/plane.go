package simulator

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"time"
)

// errWritersNotHeld says that a snapshot would have been torn: the filesystem under the
// simulator's directory has no reflinks, and the disk was written to while it was copied.
var errWritersNotHeld = errors.New("the disk's writers could not be held")

// plane is the rack's data plane: the bytes of disks, snapshots and images, the loop devices that
// carry attached disks, and the guest trees in which instances see them.
type plane struct {
	dir         string
	log         *slog.Logger
	deviceDelay time.Duration
	seed        uint64
}

// guestSpec is an instance as its guest's firmware describes it.
type guestSpec struct{ InstanceID, Name string }

// deviceSpec is an attached disk as its guest shall see it.
type deviceSpec struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
}

// deviceFault is what goes wrong on purpose when a device appears. The zero value is nothing.
type deviceFault struct {
	Never     bool
	Delay     time.Duration
	SizeBytes int64
}

var errPlaneStub = errors.New("the data plane is not there yet")

func openPlane(dir string, log *slog.Logger) (*plane, error) {
	return &plane{dir: dir, log: log}, nil
}

func (p *plane) createDisk(id string, size int64) error { return errPlaneStub }

func (p *plane) cloneDisk(ctx context.Context, id, source string, size int64) error {
	return errPlaneStub
}

func (p *plane) removeDisk(id string) error { return errPlaneStub }

func (p *plane) snapshotDisk(ctx context.Context, snapshotID, diskID string) error {
	return errPlaneStub
}

func (p *plane) removeSnapshot(id string) error { return errPlaneStub }

func (p *plane) importImage(ctx context.Context, id, file string, size int64) error {
	return errPlaneStub
}

func (p *plane) snapshotPath(id string) string {
	return filepath.Join(p.dir, "snapshots", id+".img")
}

func (p *plane) imagePath(id string) string { return filepath.Join(p.dir, "images", id+".img") }

func (p *plane) addGuest(g guestSpec) error { return errPlaneStub }

func (p *plane) removeGuest(id string) error { return errPlaneStub }

func (p *plane) guestDir(id string) string { return filepath.Join(p.dir, "guests", id) }

func (p *plane) plug(spec deviceSpec, f deviceFault) error { return errPlaneStub }

func (p *plane) unplug(instanceID, diskID string) error { return errPlaneStub }

func (p *plane) reconcile(ctx context.Context, attached []deviceSpec, disks, snapshots []string) error {
	return errPlaneStub
}

func (p *plane) close() error { return nil }
