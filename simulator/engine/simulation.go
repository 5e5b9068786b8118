// Package engine carries out the requests that a rack gets. It checks the rules in the rack's order
// and with the rack's messages, changes the records and drives the data plane.
//
// [Open] opens a [Simulation]: it completes the unfinished work of an earlier simulator, and gives
// running instances their devices. The operations are methods of [Disks], [Snapshots], [Images],
// [Instances], [Attachments], [Silo], [Pools], and [Resources] for objects that are only records.
// Each gets a [Call], which has the request and the faults that apply to it. A refusal is an
// [Error] in the rack's form; in a transaction, [store.Tx.Check] ends the transaction with it. If
// an operation needs only the records, it runs in a transaction of [Reading] or [Changing].
//
// Any other operation first checks the rules and changes records in a transaction. It then works on
// the data plane while it holds the locks of its objects. If this work takes long, or if callers
// can see it half done, the record has a state for it, as on a rack. Every rule cites an assumption
// (A01, A02, …). conformance/rules/ASSUMPTIONS.md names the sources of the assumptions.
//
// The package does not know HTTP requests, paths or pages.
package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Config configures a rack. The zero value is a rack in a temporary directory, which Close removes.
type Config struct {
	// Dir is the rack's directory. A rack that is opened there again has all its earlier objects.
	Dir string
	// Volatile makes writes faster: records and new disks survive the end of the simulator, even a
	// kill, but not a power cut of the host.
	Volatile bool
	// Projects exist from the start; nil means one project, "default". Instances and disks that name
	// no project are in the first one.
	Projects  []string
	Instances []InstanceSpec
	Images    []ImageSpec
	Disks     []DiskSpec
	// Token is the only accepted token; "" accepts every token that begins with oxide-token-.
	Token string
	// APIHosts and AdminHosts are names by which clients reach the API and the admin listener, besides
	// localhost.
	APIHosts, AdminHosts []string
	// TokenExpires is the expiry that the rack reports for the token; the zero time means never.
	TokenExpires time.Time
	// Hotplug determines whether disks can be attached to and detached from running instances (A17);
	// "" means adminapi.HotplugFull. Present racks behave like adminapi.HotplugNone.
	Hotplug adminapi.Hotplug
	// QuotaBytes is the silo's storage quota; 0 means 64 TiB. DiskLimit is how many disks an instance
	// may have; 0 means 12, or 11 for a virtual machine that boots from its own root disk.
	QuotaBytes int64
	DiskLimit  int
	// Role is the token's role in the projects; "" means adminapi.RoleCollaborator.
	Role string
	// DeviceDelay is the time from an attach until the guest sees the device. CreateHold and
	// SnapshotHold are the minimum durations of the creation of a disk and of a snapshot.
	// InstanceDelay is the time that an instance takes to start, stop or reboot.
	DeviceDelay, CreateHold, SnapshotHold, InstanceDelay time.Duration
	// FreeDelay makes deletion soft, as on future racks. A disk or a snapshot is gone when its DELETE
	// is answered, but its bytes and its share of the quota are freed after the delay. With 0 they are
	// freed before the answer, as on present racks (A68).
	FreeDelay time.Duration
	// QuotaFirst frees the quota of a deleted object before the answer, and its bytes after FreeDelay.
	QuotaFirst bool
	// Seed determines the names of the devices in the guests, and the delays before they appear.
	Seed uint64
	// Log is the rack's logger; nil means slog.Default.
	Log *slog.Logger
	// FirstLoop is the lowest number for the rack's loop devices. A container's /dev may have nodes
	// only for low numbers, so a high FirstLoop leaves these to other programs.
	FirstLoop int
	// KeepDevices leaves the devices in the guests when the rack is closed. The next rack on Dir
	// adopts the devices. A real rack's guests also keep theirs when the control plane ends.
	KeepDevices bool
	// Devices determines whether guests see their disks as devices; "" requires devices, which need
	// Linux and root.
	Devices dataplane.Devices
	// NoDiscards makes distributed disks refuse discards, so that a discard changes no bytes. A real
	// rack accepts discards, and does not change the bytes either (A69).
	NoDiscards bool
	// Machines is the directory of an image (tools/vm-image) for instances that are virtual machines.
	// With "" an instance is only a directory that looks like the /sys and /dev of a guest.
	Machines string
	// MachineType is "pc" or "q35". The default is "pc", as on a rack.
	MachineType string
	// FlakyDisks creates disks that can fail (adminapi.DiskFault). This process serves their devices.
	FlakyDisks bool
}

// InstanceSpec is an instance that the rack has from the start. Without an ID, the rack derives the
// ID from the names of project and instance, so the ID is the same on every machine.
type InstanceSpec struct {
	Name, ID string
	// Project is the instance's project; "" means the first project of the Config.
	Project string
	Stopped bool
}

// ImageSpec is an image that the rack has from the start, with the content of File or, without a
// file, with SizeBytes zeroes. An image without a Project belongs to the silo.
type ImageSpec struct {
	Name, Project string
	SizeBytes     int64 `yaml:"-"`
	BlockSize     int   `yaml:"block_size"`
	File          string
}

// DiskSpec is a disk that the rack has from the start: a copy of Image, which belongs to the disk's
// project or to the silo, or a blank disk. It is attached to Instance, if that is set.
type DiskSpec struct {
	Name string
	// Project is the disk's project; "" means the first project of the Config.
	Project   string
	SizeBytes int64 `yaml:"-"`
	// BlockSize is 512, 2048 or 4096; 0 means 4096 or, with an Image, the image's block size.
	BlockSize       int `yaml:"block_size"`
	Image, Instance string
}

// Simulation is an open rack: its records, its data plane and its switches. The operations on it
// are the methods of Disks, Snapshots, Images, Instances, Attachments, Silo, Pools and Resources.
type Simulation struct {
	config    Config
	temporary bool
	// boot has the IDs of the instances that restore() starts: those of the Config, and those whose
	// virtual machines an earlier simulator stopped when it closed.
	boot     []string
	log      *slog.Logger
	store    *store.Store
	plane    *dataplane.Plane
	switches switchboard
	// locks has a lock for each object, which a call holds while it works on the data plane. An
	// instance is locked before a disk, and a disk before a snapshot, so that calls cannot deadlock.
	// The records need no locks, because only one transaction at a time changes them.
	locks keylock.Map
	// creating has a lock for each disk that is being created.
	creating keylock.Map
	// repairs has the IDs of the disks with the rack's "volume repair lock", which a disk has while a
	// snapshot of it is taken (A39).
	repairs sync.Map
	// unfreed counts the bytes of deleted objects that still take space but no quota.
	unfreed atomic.Int64
	// ctx ends when the rack closes or is reset. work counts the calls and goroutines in progress.
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	// Reset and Close hold life while they run. If released is set, a further Close does nothing.
	life     sync.Mutex
	released bool
	mu       sync.Mutex
	// mu guards the fields below, and every call of work.Add and work.Go.
	closed   bool
	deferred *deferredWork
}

// ErrClosed is the error of a call to a rack that is closed or being reset.
var ErrClosed = errors.New("the simulator is closed")

// Open opens the rack. It creates the objects of the Config that the directory lacks, gives the
// running instances their devices, and completes the unfinished work of an earlier simulator.
func Open(ctx context.Context, c Config) (*Simulation, error) {
	r := &Simulation{config: c, log: cmp.Or(c.Log, slog.Default()),
		deferred: newDeferredWork(), switches: switchboard{changed: make(chan struct{})}}
	if len(c.Projects) == 0 {
		r.config.Projects = []string{"default"}
	}
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := r.open(ctx); err != nil {
		// Keep virtual machines running, as after a kill of the simulator.
		r.config.KeepDevices = r.config.KeepDevices || r.config.Machines != "" && !r.temporary
		return nil, errors.Join(fmt.Errorf("start a rack in %s: %w", r.config.Dir, err), r.release())
	}
	return r, nil
}

func (r *Simulation) open(ctx context.Context) (err error) {
	if err := r.resetSwitches(); err != nil {
		return err
	}
	if r.config.Dir == "" {
		r.removeLeft(ctx)
		if r.config.Dir, err = os.MkdirTemp("", temporaryPrefix); err != nil {
			return err
		}
		r.temporary = true
	}
	if r.config.Dir, err = filepath.Abs(r.config.Dir); err != nil {
		return err
	}
	process := ""
	if r.temporary {
		process = thisProcess()
	}
	if err := prepareDir(r.config.Dir, process); err != nil {
		return err
	}
	r.store, err = store.Open(filepath.Join(r.config.Dir, recordsFile), r.config.Volatile)
	if err != nil {
		return err
	}
	r.plane, err = dataplane.Open(dataplane.Config{Dir: r.config.Dir, Log: r.log, Seed: r.config.Seed,
		FirstLoop: r.config.FirstLoop, Devices: r.config.Devices, FlakyDisks: r.config.FlakyDisks,
		NoDiscards: r.config.NoDiscards, Volatile: r.config.Volatile,
		Removed:  func(id string) { r.store.Gone(id) },
		Machines: r.config.Machines, MachineType: r.config.MachineType, Temporary: r.temporary,
		Ended: func(id string, poweredOff bool) {
			r.background(func() { Instances{r}.ended(id, poweredOff) })
		}})
	if err != nil {
		return err
	}
	return r.restore(ctx)
}

// Close cancels delays, waits for the calls and goroutines in progress, and releases every device
// unless Config.KeepDevices is set. The directory has every change that was acknowledged.
func (r *Simulation) Close() error {
	r.life.Lock()
	defer r.life.Unlock()
	if r.released {
		return nil
	}
	r.released = true
	r.end()
	return r.release()
}

// end refuses further calls, cancels delays and waits for the calls and goroutines in progress. It
// returns false if the rack was closed already.
func (r *Simulation) end() bool {
	r.mu.Lock()
	wasClosed := r.closed
	r.closed = true
	r.mu.Unlock()
	if wasClosed {
		return false
	}
	r.cancel()
	r.plane.Flaky.HealAll() // hanging disk operations may block the work
	r.work.Wait()
	return true
}

func (r *Simulation) release() error {
	r.cancel()
	var errs []error
	switch {
	case r.plane != nil && r.config.KeepDevices:
		r.plane.Stop()
	case r.plane != nil:
		errs = append(errs, r.plane.Close())
	}
	if r.store != nil {
		errs = append(errs, r.store.Close())
	}
	if r.temporary {
		errs = append(errs, dataplane.RemoveTree(r.config.Dir))
	}
	return errors.Join(errs...)
}

func (r *Simulation) logFailure(what, kind, id string, err error) {
	if err != nil {
		r.log.Error(what, slog.String(kind, id), slog.String("error", err.Error()))
	}
}

// Begin registers a call. Close waits until end() is called. After Close, ok is false.
func (r *Simulation) Begin() (end func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, false
	}
	r.work.Add(1)
	return r.work.Done, true
}

// background runs work() in a goroutine, for which Close waits.
func (r *Simulation) background(work func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.work.Go(work)
	}
}

// Pause waits for d. It returns false if ctx ends or the rack closes first.
func (r *Simulation) Pause(ctx context.Context, d time.Duration) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	if d <= 0 {
		return ctx.Err() == nil
	}
	select {
	case <-time.After(d):
		return true
	case <-ctx.Done():
		return false
	}
}

// hold waits for the duration that long() returns. It calls long() again if the switches change.
func (r *Simulation) hold(call *Call, long func(adminapi.Switches) adminapi.Duration) {
	if call.Resumed {
		return
	}
	for began := time.Now(); ; {
		now, changed := r.switches.watch()
		select {
		case <-changed:
			continue
		case <-time.After(time.Duration(long(now)) - time.Since(began)):
		case <-r.ctx.Done():
		}
		return
	}
}

// InstanceSpecs returns the instances of the Config with their IDs.
func (r *Simulation) InstanceSpecs() []InstanceSpec { return r.config.Instances }

// Dir returns the rack's directory.
func (r *Simulation) Dir() string { return r.config.Dir }

// Records returns the rack's records. A caller that changes them bypasses the rules.
func (r *Simulation) Records() *store.Store { return r.store }

// Plane returns the rack's data plane.
func (r *Simulation) Plane() *dataplane.Plane { return r.plane }

// deferredWork counts the unfinished work that DeferWork started after the last RunDeferred.
// RunDeferred closes the channel "now" to end the delays of this work.
type deferredWork struct {
	now  chan struct{}
	work sync.WaitGroup
}

func newDeferredWork() *deferredWork { return &deferredWork{now: make(chan struct{})} }

// DeferWork starts a goroutine, which waits for the end of ctx, then for the delay, and then calls
// do(). If the rack closes first, it does not call do().
func (r *Simulation) DeferWork(ctx context.Context, delay time.Duration, do func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return
	}
	w := r.deferred
	w.work.Add(1)
	r.work.Go(func() {
		defer w.work.Done()
		select {
		case <-ctx.Done():
		case <-r.ctx.Done():
		}
		select {
		case <-time.After(delay):
		case <-w.now:
		case <-r.ctx.Done():
		}
		if r.ctx.Err() == nil {
			do()
		}
	})
}

// RunDeferred ends the delays of the deferred work, and returns when all of it is done.
func (r *Simulation) RunDeferred(ctx context.Context) error {
	r.mu.Lock()
	w := r.deferred
	r.deferred = newDeferredWork()
	r.mu.Unlock()
	close(w.now)
	done := make(chan struct{})
	go func() {
		w.work.Wait() // this returns at the latest when the rack closes
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("run deferred work: %w", ctx.Err())
	}
}

// free removes a deleted object's bytes, now or after FreeDelay (A68). Then it frees the object's
// share of the quota if release() has not. If the rack closes first, its next start does both.
func (r *Simulation) free(call *Call, id string, size int64, remove func(id string) error,
	now adminapi.Switches) error {
	if now.FreeDelay <= 0 {
		return remove(id)
	}
	if now.QuotaFirst {
		r.unfreed.Add(size)
	}
	r.DeferWork(call.Context, time.Duration(now.FreeDelay), func() {
		defer r.locks.Lock(id)()
		err := remove(id)
		switch {
		case err != nil:
		case now.QuotaFirst:
			r.unfreed.Add(-size)
		default:
			err = r.store.Update(func(tx *store.Tx) { tx.ReleaseDeferred(id) })
		}
		r.logFailure("cannot free what was deleted", "id", id, err)
	})
	return nil
}

// release frees a deleted object's share of the quota, or records that free() must do so (A68).
func release(tx *store.Tx, id string, size int64, now adminapi.Switches) {
	if now.FreeDelay > 0 && !now.QuotaFirst {
		tx.DeferRelease(id, size)
	} else {
		tx.AddStorage(-size)
	}
}

// noSpace reports whether the rack lacks physical space for the bytes that the quota counts and for
// "more" bytes in addition (A27). A deleted object takes space until its bytes are freed (A68).
func (r *Simulation) noSpace(more int64) bool {
	now, unfreed := r.Switches(), r.unfreed.Load()
	if now.Full || unfreed == 0 {
		return now.Full
	}
	used, err := Reading(r, (*store.Tx).Storage)
	return err != nil || used+more > int64(now.QuotaBytes)-unfreed
}

// Reset returns the rack to its start: it has only the objects and the switches of the Config, with
// the same IDs. The guests lose all disks, even disks in use; the guest views keep their paths.
// Calls that come in the meantime get ErrClosed.
func (r *Simulation) Reset(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // a rack that is reset only in part cannot be used
	r.life.Lock()
	defer r.life.Unlock()
	if !r.end() {
		return ErrClosed
	}
	// After end() no other goroutine uses these fields, so they need no lock.
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(r.ctx))
	r.unfreed.Store(0)
	err := r.plane.Empty()
	if err == nil {
		err = r.resetSwitches()
	}
	if err == nil {
		err = r.restore(ctx, (*store.Tx).Clear)
	}
	r.mu.Lock()
	r.closed = false
	r.mu.Unlock()
	if err != nil {
		return fmt.Errorf("reset the rack in %s: %w", r.config.Dir, err)
	}
	return nil
}
