// Package engine decides as a rack does. It finds the objects of a call, checks the rules in the
// rack's order and with the rack's messages, keeps the records and drives the data plane.
//
// [Open] opens a [Simulation]: it completes the unfinished work of an earlier simulator, and gives
// running instances their devices. The operations are grouped: [Disks], [Snapshots], [Images],
// [Instances], [Attachments], [Silo] and [Resources], which are only records. Each operation gets a
// [Call], which has the request, and the faults that apply to it. A refusal is an [Error] in the
// rack's form. In a transaction it ends the transaction ([store.Tx.Check]). An operation that needs
// only the records runs in a transaction of its caller ([Reading], [Changing]).
//
// An operation decides in a transaction over the records, and then works on the data plane while it
// holds the locks of its objects. Work that takes long, or that callers see half done, has a state
// in the records, as on a rack. Every rule cites an assumption (A01, A02, …) of package rules,
// whose ASSUMPTIONS.md names its source.
//
// The package knows nothing of HTTP requests, paths or pages.
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

// Config configures a rack. The zero value is a rack in a new directory, which is removed when
// the rack is closed.
type Config struct {
	// Dir is the rack's directory. A rack that is opened on it again has all its earlier objects.
	Dir string
	// Volatile makes writes faster: records and new disks survive a kill of the simulator, but not a
	// power cut of the machine.
	Volatile bool
	// Projects exist from the start; nil means one project, "default". Instances and disks without a
	// project are in the first one.
	Projects  []string
	Instances []InstanceSpec
	Images    []ImageSpec
	Disks     []DiskSpec
	// Token is the only accepted token; "" accepts every oxide-token-….
	Token string
	// APIHosts and AdminHosts are names by which clients reach the API and the admin listener, besides
	// localhost.
	APIHosts, AdminHosts []string
	// TokenExpires is the expiry that the rack reports for the token; the zero time means never.
	TokenExpires time.Time
	// Hotplug is what the rack does with the disks of running instances (A17); "" means
	// adminapi.HotplugFull. Present racks are adminapi.HotplugNone.
	Hotplug adminapi.Hotplug
	// QuotaBytes is the silo's storage quota; 0 means 64 TiB. DiskLimit is the number of disks that an
	// instance may have; 0 means 12, or 11 for virtual machines, which also have a root disk.
	QuotaBytes int64
	DiskLimit  int
	// Role is the role of the token's bearer in the projects; "" means adminapi.RoleCollaborator.
	Role string
	// DeviceDelay is the time from an attach until the device appears in the guest. CreateHold and
	// SnapshotHold delay the answers of those requests, as the rack's sagas do. InstanceDelay is the
	// time that an instance takes to start, stop or reboot.
	DeviceDelay, CreateHold, SnapshotHold, InstanceDelay time.Duration
	// FreeDelay makes deletion soft, as in a coming release. A disk or a snapshot is gone when its
	// DELETE is answered, and its bytes and its share of the quota are freed after the delay. With 0
	// they are freed before the answer, as on present racks (A68).
	FreeDelay time.Duration
	// QuotaFirst frees the quota of a deleted object before the answer, and only its bytes later.
	QuotaFirst bool
	// Seed determines the order and the numbers of the devices.
	Seed uint64
	// Log is the rack's logger; nil means slog.Default.
	Log *slog.Logger
	// FirstLoop is the lowest number of a loop device that the rack uses. A container's /dev may have
	// nodes only for low numbers, which other programs need.
	FirstLoop int
	// KeepDevices leaves the devices in the guests when the rack is closed, as when the control
	// plane of a real rack ends. The next rack that is opened on Dir adopts them.
	KeepDevices bool
	// Devices determines whether guests see their disks as devices; "" requires devices, which need
	// Linux and root.
	Devices dataplane.Devices
	// NoDiscards makes distributed disks refuse discards, so that the bytes stay. A rack accepts them,
	// and keeps the bytes, too (A69).
	NoDiscards bool
	// Machines is the directory of an image (tools/vm-image) for instances that are virtual machines.
	// "" means that an instance is a directory that looks like a guest's /sys and /dev.
	Machines string
	// MachineType is the type of the virtual machines: "pc", as a rack has them (the default), or
	// "q35".
	MachineType string
	// FlakyDisks creates disks that can fail (adminapi.DiskFault). Their devices end with the process.
	FlakyDisks bool
}

// InstanceSpec is an instance that the rack has from the start. A missing ID is derived from the
// names of project and instance, so it is the same on every machine.
type InstanceSpec struct {
	Name, ID string
	// Project is the instance's project; "" means the first project of the Config.
	Project string
	Stopped bool
}

// ImageSpec is an image that the rack has from the start, with the content of File or, without a
// file, SizeBytes of zeroes. An image without a Project belongs to the silo.
type ImageSpec struct {
	Name, Project string
	SizeBytes     int64 `yaml:"-"`
	BlockSize     int   `yaml:"block_size"`
	File          string
}

// DiskSpec is a disk that the rack has from the start. It is blank, or has the bytes of an Image of
// its project or the silo. It may be attached to an Instance of its project, running or stopped.
type DiskSpec struct {
	Name string
	// Project is the disk's project; "" means the first project of the Config.
	Project   string
	SizeBytes int64 `yaml:"-"`
	// BlockSize is 512, 2048 or 4096; 0 means 4096, or that of the image.
	BlockSize       int `yaml:"block_size"`
	Image, Instance string
}

// Simulation carries out the requests of the API: it decides by the rules, keeps the records and
// drives the data plane. Its operations are grouped by object, as methods of Disks, Snapshots,
// Images, Instances, Attachments, Silo and Resources.
type Simulation struct {
	config    Config
	temporary bool
	// boot has the IDs of the instances that Open starts: those of the Config, and those whose
	// machines the last simulator stopped when it was closed.
	boot     []string
	log      *slog.Logger
	store    *store.Store
	plane    *dataplane.Plane
	switches switchboard
	// locks serialises the work on the data plane for each object. An instance is always locked
	// before a disk, and a disk before a snapshot, so that no two calls wait for each other. The
	// records need no locks, because their transactions are serial.
	locks keylock.Map
	// creating locks each disk that is being created.
	creating keylock.Map
	// repairs has the IDs of the disks that hold the rack's "volume repair lock", which permits one
	// snapshot at a time (A39).
	repairs sync.Map
	// unfreed is the space of deleted objects that is not free yet and that no quota counts.
	unfreed atomic.Int64
	// ctx ends when the rack closes, or is reset. work counts the work that is still in progress then.
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	// life is held while the rack is reset or closed. It guards released, which Close sets.
	life     sync.Mutex
	released bool
	mu       sync.Mutex
	// mu guards closed and deferred. closed must not change while work is added.
	closed   bool
	deferred *deferredWork
}

// ErrClosed is the error of a call to a closed rack.
var ErrClosed = errors.New("the simulator is closed")

// Open opens the rack. It creates the objects of the config that the directory lacks, gives the
// running instances their devices, and completes the unfinished work of an earlier simulator.
func Open(ctx context.Context, c Config) (*Simulation, error) {
	r := &Simulation{config: c, log: cmp.Or(c.Log, slog.Default()),
		deferred: newDeferredWork(), switches: switchboard{changed: make(chan struct{})}}
	if len(c.Projects) == 0 {
		r.config.Projects = []string{"default"}
	}
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := r.open(ctx); err != nil {
		// Running machines continue, as if the simulator had been killed.
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

// Close ends the delays of the work in progress, waits for the work, and releases every device
// unless Config.KeepDevices. Everything that was acknowledged is in the directory.
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

// end refuses further work, cancels the present work and waits for it. It returns false if an
// earlier call has done so.
func (r *Simulation) end() bool {
	r.mu.Lock()
	wasClosed := r.closed
	r.closed = true
	r.mu.Unlock()
	if wasClosed {
		return false
	}
	r.cancel()
	r.plane.Flaky.HealAll() // a disk that hangs may block work
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

// logFailure logs what has failed for an object; a nil error is ignored.
func (r *Simulation) logFailure(what, kind, id string, err error) {
	if err != nil {
		r.log.Error(what, slog.String(kind, id), slog.String("error", err.Error()))
	}
}

// Begin registers work that Close waits for, unless the rack is closed.
func (r *Simulation) Begin() (end func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, false
	}
	r.work.Add(1)
	return r.work.Done, true
}

// background runs work that continues after its request; Close waits for the work.
func (r *Simulation) background(work func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed {
		r.work.Go(work)
	}
}

// Pause waits for d. It returns false if ctx or the rack ended before.
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

// hold delays an answer for the duration of a switch. It obeys a change of the switch in the
// meantime.
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

// Records returns the rack's records. A change of the records bypasses the rules.
func (r *Simulation) Records() *store.Store { return r.store }

// Plane returns the rack's data plane.
func (r *Simulation) Plane() *dataplane.Plane { return r.plane }

// deferredWork counts the work that was deferred since the last RunDeferred. RunDeferred closes
// now, which ends the delays of the work.
type deferredWork struct {
	now  chan struct{}
	work sync.WaitGroup
}

func newDeferredWork() *deferredWork { return &deferredWork{now: make(chan struct{})} }

// DeferWork waits for the end of ctx and then for the delay, and calls do. If the rack closes
// before, it does not call do.
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

// RunDeferred carries out the deferred work at once. It returns when all of it is done, including
// work that was already in progress.
func (r *Simulation) RunDeferred(ctx context.Context) error {
	r.mu.Lock()
	w := r.deferred
	r.deferred = newDeferredWork()
	r.mu.Unlock()
	close(w.now)
	done := make(chan struct{})
	go func() {
		w.work.Wait() // it ends with the rack at the latest
		close(done)
	}()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("run deferred work: %w", ctx.Err())
	}
}

// free removes the bytes of a deleted object and frees its share of the quota, now or some time
// after the response (A68). If the rack is closed before, its next start frees them.
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

// release frees the quota of a deleted object, now or after the delay (A68).
func release(tx *store.Tx, id string, size int64, now adminapi.Switches) {
	if now.FreeDelay > 0 && !now.QuotaFirst {
		tx.DeferRelease(id, size)
	} else {
		tx.AddStorage(-size)
	}
}

// noSpace reports whether the rack lacks physical space for a number of bytes in addition to what
// the quota counts (A27). Deleted objects use their space until it is freed (A68).
func (r *Simulation) noSpace(more int64) bool {
	now, unfreed := r.Switches(), r.unfreed.Load()
	if now.Full || unfreed == 0 {
		return now.Full
	}
	used, err := Reading(r, (*store.Tx).Storage)
	return err != nil || used+more > int64(now.QuotaBytes)-unfreed
}

// Reset puts the rack back to its start: it has the objects and the switches of the Config, with
// the same IDs, and nothing else. The guests lose their disks even if they use them; their views
// stay where they are. Calls that come in the meantime get ErrClosed.
func (r *Simulation) Reset(ctx context.Context) error {
	ctx = context.WithoutCancel(ctx) // a rack that is half reset cannot be used
	r.life.Lock()
	defer r.life.Unlock()
	if !r.end() {
		return ErrClosed
	}
	// No call and no work is in progress, so the fields below can be changed without a lock.
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
