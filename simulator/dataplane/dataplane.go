package dataplane

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
)

// Plane is the rack's data plane: the bytes of disks, snapshots and images, the loop devices that
// carry the disks of running instances, and the guest trees in which instances see them. It knows
// nothing of projects, quotas or states.
//
// Under dir, which one process uses at a time, lie
//
//	disks/<uuid>.img      the bytes of a disk; likewise snapshots/ and images/
//	guests/<uuid>/sys     what the guest of that instance sees as /sys
//	guests/<uuid>/dev     and as /dev
//	guests/<uuid>/hidden  its disks that an equal serial hides until the guest restarts
//	guests/<uuid>/aside   entries that are being made or removed
//	frozen/<disk uuid>    a freeze that is under way
//
// What the kernel holds (a loop device's file and serial) and what lies in dir is all the memory it
// needs: reconcile brings any leftovers together.
type Plane struct {
	files
	freezer freezer
	seed    uint64
	// firstLoop is the lowest number of a loop device that may be taken.
	firstLoop int
	// device is the st_dev of the files in dir, which on an overlay need not be that of dir.
	device uint64

	// life ends with close; working are the devices that will appear later.
	life    context.Context
	die     context.CancelFunc
	working sync.WaitGroup

	// disks holds a disk's bytes still while its device is made, taken away or copied.
	disks keylock.Map

	guests guests
}

// Guest is an instance as its guest's firmware describes it.
type Guest struct{ InstanceID, Name string }

// Device is an attached disk as its guest shall see it.
type Device struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
}

// serial is what the disk's NVMe controller answers: as much of the name as fits (A54).
func (d Device) serial() string { return d.DiskName[:min(len(d.DiskName), nvmeSerialBytes)] }

// Fault is how a device appears. The zero value is at once and as it should be.
type Fault struct {
	Never     bool
	Delay     time.Duration
	SizeBytes int64
}

// Config says where a data plane lives, and what it may use of the machine.
type Config struct {
	// Dir is the directory that has everything; it exists.
	Dir string
	Log *slog.Logger
	// Seed decides in which order and under which names devices appear.
	Seed uint64
	// FirstLoop is the lowest number of a loop device that is used.
	FirstLoop int
	// ProcRoot is a procfs that shows the processes of all guests; "" is /proc.
	ProcRoot string
}

// Open prepares the directory. It fails in a directory, or on a machine, where no disk could be
// attached.
func Open(c Config) (*Plane, error) {
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	// The kernel names the files of its loop devices without symbolic links.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	p := &Plane{files: files{dir, c.Log}, seed: c.Seed, firstLoop: c.FirstLoop,
		freezer: newFreezer(filepath.Join(dir, "frozen"), cmp.Or(c.ProcRoot, "/proc"), c.Log)}
	for _, sub := range []string{"disks", "snapshots", "images", "guests", "frozen"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return nil, fmt.Errorf("open the data plane: %w", err)
		}
	}
	if err := errors.Join(FlushDir(dir), loopdev.Available()); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	if p.device, err = checkNodes(dir); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	p.life, p.die = context.WithCancel(context.Background())
	return p, nil
}

// Stop ends the plane's own work and leaves the guests their devices, for the next one to adopt.
func (p *Plane) Stop() {
	p.die()
	p.working.Wait()
}

// Close takes every device from its guest and gives it back to the kernel. One that somebody still
// holds stays until its last holder leaves, with its bytes, so that a filesystem on it can be
// unmounted in good order; close reports it.
func (p *Plane) Close() error {
	p.Stop()
	var devices []*plugged
	for _, g := range p.guests.all() {
		devices = append(devices, p.guests.devices(g)...)
	}
	// One wait for all that are held, not one for each.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	var errs []error
	for _, d := range devices {
		errs = append(errs, p.hide(d))
		if d.loop != nil {
			errs = append(errs, d.loop.Detach(ctx))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close the data plane: %w", err)
	}
	return nil
}
