// Package dataplane has the bytes of a simulated rack and what its guests see: the files of disks,
// snapshots and images, the loop devices that carry the disks of running instances, and a directory
// for each guest that looks like its /sys and /dev. It knows nothing of projects, quotas or states.
//
// [Plane] plugs a disk into a guest and unplugs it, also by force; copies disks, with the guest's
// filesystem frozen while a snapshot is taken; and adopts or releases, with [Plane.Reconcile], what
// a simulator left that was killed. Its directory, which one process uses at a time, has
//
//	disks/<uuid>.img      the bytes of a disk; likewise snapshots/ and images/
//	identity              of the rack, which its devices carry
//	guests/<uuid>/sys     what the guest of that instance sees as /sys
//	guests/<uuid>/dev     and as /dev
//	guests/<uuid>/hidden  its disks that an equal serial hides until the guest restarts
//	guests/<uuid>/aside   entries that are being made or removed
//	frozen/<disk uuid>    a freeze in progress
//	tamper                what a [Tamper] keeps while it is in force
//	fuse-…                the disks in the guests, if they are such that can fail
//
// With Config.FlakyDisks a guest's devices lead to this process (package flakydisk), which passes
// reads, writes and flushes on to the disk's file or lets them fail. They end with the process, and
// the next one makes new ones: a guest that has one in use loses it.
//
// There is no other state: the kernel keeps each loop device's file and serial. The package needs
// Linux and root. On other systems it builds, and [Open] fails.
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

// Plane is a data plane in a directory. Open makes one.
type Plane struct {
	files
	freezer freezer
	seed    uint64
	// firstLoop is the lowest number of a loop device that may be taken.
	firstLoop int
	// owner is the rack's identity. Its devices carry it, for another rack may have the same paths in
	// a container of its own.
	owner string
	// device is the st_dev of the files in dir, which on an overlay need not be that of dir.
	device uint64

	// ctx ends with Stop; working are the devices that will appear later.
	ctx     context.Context
	cancel  context.CancelFunc
	working sync.WaitGroup

	// disks locks a disk's bytes while its device is made, removed or copied.
	disks keylock.Map

	guests    guests
	tampering tampering
	flaky     flaky
}

// Guest is what a guest's firmware reports of its instance.
type Guest struct{ InstanceID, Name string }

// Device is an attached disk, as its guest is to see it.
type Device struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
}

// serial is the serial number of the disk's NVMe controller: as much of the name as fits (A54).
func (d Device) serial() string { return d.DiskName[:min(len(d.DiskName), nvmeSerialBytes)] }

// Fault changes how a device appears: never, later, or with another size. Or the disk cannot be
// plugged at all. The zero value changes nothing.
type Fault struct {
	Never     bool
	Delay     time.Duration
	SizeBytes int64
	Fails     bool
}

// Config is where a data plane is, and what it may use of the machine.
type Config struct {
	// Dir is the directory; it exists.
	Dir string
	Log *slog.Logger
	// Seed decides in which order and under which names devices appear.
	Seed uint64
	// FirstLoop is the lowest number of a loop device that is used.
	FirstLoop int
	// ProcRoot is a procfs that shows the processes of all guests; "" is /proc.
	ProcRoot string
	// FlakyDisks makes disks that can fail, with [Plane.FailDisk].
	FlakyDisks bool
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
	if p.owner, err = identify(dir); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	if p.device, err = checkNodes(dir); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	if err := p.flaky.open(dir, c.FlakyDisks); err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p, nil
}

// Stop ends the plane's own work and leaves the guests their devices. The next plane adopts them.
func (p *Plane) Stop() {
	p.cancel()
	p.working.Wait()
}

// Close removes every device from its guest and releases it. A device that is in use stays, with
// its bytes, until its last user closes it, so that a filesystem on it can be unmounted properly;
// Close reports it.
func (p *Plane) Close() error {
	p.Stop()
	errs := []error{p.Tamper(Tamper{})}
	var devices []*plugged
	for _, g := range p.guests.all() {
		devices = append(devices, p.guests.devices(g)...)
	}
	// Wait once for all that are in use, not for each.
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Second)
	defer cancel()
	for _, d := range devices {
		errs = append(errs, p.hide(d))
		if d.loop != nil {
			errs = append(errs, d.loop.Detach(ctx))
		}
	}
	errs = append(errs, p.flaky.close())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("close the data plane: %w", err)
	}
	return nil
}
