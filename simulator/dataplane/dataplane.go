// Package dataplane has the bytes of a simulated rack and the view of its guests: the files of
// disks, snapshots and images, the loop devices of the disks of running instances, and for each
// guest a directory that looks like its /sys and /dev. It knows nothing of projects, quotas or
// states.
//
// [Plane] plugs a disk into a guest and unplugs it, also by force. It copies disks, and freezes
// the guest's filesystem while it takes a snapshot. After a simulator was killed,
// [Plane.Reconcile] adopts or releases what it left. One process at a time uses the directory of
// a plane, which contains
//
//	disks/<uuid>.img      the bytes of a disk; likewise snapshots/ and images/
//	identity              the identity of the rack, which its devices carry
//	guests/<uuid>/sys     the /sys of that instance's guest
//	guests/<uuid>/dev     its /dev
//	guests/<uuid>/hidden  its disks that an equal serial hides until the guest restarts
//	guests/<uuid>/aside   entries that are being created or removed
//	frozen/<disk uuid>    a freeze in progress
//	tamper                files of the active [Tamper]
//	fuse-…                the disks in the guests, if the disks can fail
//
// With Config.FlakyDisks a guest's devices lead to this process (package flakydisk), which passes
// reads, writes and flushes on to the disk's file or makes them fail. These devices end with the
// process, and the next process creates new ones. A guest that uses a device then loses it.
//
// There is no other state: the kernel keeps the file and serial of each loop device. The package
// needs Linux and root. On other systems it builds, and [Open] fails.
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

// Plane is a data plane in a directory. Open returns one.
type Plane struct {
	files
	freezer freezer
	seed    uint64
	// firstLoop is the lowest number of a loop device that the plane may use.
	firstLoop int
	// owner is the rack's identity. Its devices carry it, because another rack may have the same
	// paths in a container of its own.
	owner string
	// device is the st_dev of the files in dir. On an overlay it may differ from that of dir.
	device uint64

	// ctx ends with Stop. working counts the devices that will appear later.
	ctx     context.Context
	cancel  context.CancelFunc
	working sync.WaitGroup

	// disks locks a disk's bytes while its device is created, removed or copied.
	disks keylock.Map

	guests    guests
	tampering tampering
	flaky     flaky
}

// Firmware has the values that a guest's firmware reports about its instance.
type Firmware struct{ InstanceID, Name string }

// Device describes an attached disk as its guest must see it.
type Device struct {
	InstanceID, DiskID, DiskName string
	SizeBytes                    int64
	BlockSize                    int
	ReadOnly                     bool
}

// serial returns the serial number of the disk's NVMe controller: as much of the name as fits
// (A54).
func (d Device) serial() string { return d.DiskName[:min(len(d.DiskName), nvmeSerialBytes)] }

// Fault changes a device: it never appears, appears later, or has another size. Or the disk
// cannot be plugged at all. The zero value changes nothing.
type Fault struct {
	Never     bool
	Delay     time.Duration
	SizeBytes int64
	Fails     bool
}

// Config configures a data plane.
type Config struct {
	// Dir is an existing directory.
	Dir string
	Log *slog.Logger
	// Seed determines the order and the names in which devices appear.
	Seed uint64
	// FirstLoop is the lowest number of a loop device that the plane uses.
	FirstLoop int
	// ProcRoot is a procfs that shows the processes of all guests; "" is /proc.
	ProcRoot string
	// FlakyDisks creates disks that [Plane.FailDisk] can make fail.
	FlakyDisks bool
}

// Open prepares the directory. It returns an error if no disk could be attached in this directory
// or on this machine.
func Open(c Config) (*Plane, error) {
	dir, err := filepath.Abs(c.Dir)
	if err != nil {
		return nil, fmt.Errorf("open the data plane: %w", err)
	}
	// The kernel shows the files of its loop devices without symbolic links.
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

// Stop ends the plane's own work. The guests keep their devices, and the next plane adopts them.
func (p *Plane) Stop() {
	p.cancel()
	p.working.Wait()
}

// Close removes every device from its guest and releases it. A device in use stays, with its
// bytes, until its last user closes it, so that a filesystem on it can be unmounted properly;
// Close returns an error that names it.
func (p *Plane) Close() error {
	p.Stop()
	errs := []error{p.Tamper(Tamper{})}
	var devices []*plugged
	for _, g := range p.guests.all() {
		devices = append(devices, p.guests.devices(g)...)
	}
	// Wait once for all devices in use instead of once for each.
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
