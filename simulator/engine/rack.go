// Package engine decides as a rack does. It finds the objects that a call names, checks the rules
// in the rack's order and with its words, keeps the records and drives the data plane.
//
// [Open] opens a [Rack]: it finishes or undoes what an earlier simulator left half done, and gives
// running instances their devices. The operations are grouped: [Disks], [Snapshots], [Instances],
// [Attachments] and [Silo]. Each gets a [Call], which has what matters of the request: whether it
// may change anything and which faults apply. A refusal is an [Error] as the rack sends it.
//
// An operation decides in a transaction over the records, and then works on the data plane while it
// holds the locks of its objects. What takes long, and everything that a caller may see half done,
// has a state in the records, as on the rack. Every rule cites an assumption (A01, A02, …) of
// ASSUMPTIONS.md, which says where it comes from.
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
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/keylock"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// Config says what kind of rack it is. The zero value is one, in a directory of its own that is
// removed when the rack is closed.
type Config struct {
	// Dir is the rack's directory. A rack that is opened on it again has everything that it had.
	Dir string
	// Projects exist from the start; nil is one, "default". The first has the Instances.
	Projects  []string
	Instances []InstanceSpec
	Images    []ImageSpec
	// Token is the only token accepted; "" accepts every oxide-token-….
	Token string
	// TokenExpires is when the rack says that the token expires; the zero time is never.
	TokenExpires time.Time
	// ColdPlug allows attach and detach only while the instance is stopped, as on racks of today
	// (A17).
	ColdPlug bool
	// QuotaBytes is the silo's storage, 64 TiB when 0; DiskLimit the disks of an instance, 12.
	QuotaBytes int64
	DiskLimit  int
	// Role is what the token's bearer may do in the projects; "" is adminapi.RoleCollaborator.
	Role string
	// DeviceDelay is the time from an attach until the device appears in the guest. CreateHold and
	// SnapshotHold keep those requests open, as the rack's sagas do. InstanceDelay is how long an
	// instance takes to start, stop or reboot.
	DeviceDelay, CreateHold, SnapshotHold, InstanceDelay time.Duration
	// FreeDelay makes deletion soft, as in a coming release: a disk or a snapshot is gone when its
	// DELETE is answered, and its bytes and its share of the quota are freed after the delay. With 0
	// they are freed first, as on racks of today (A68).
	FreeDelay time.Duration
	// Seed decides in which order and under which numbers devices appear.
	Seed uint64
	// Log is where the rack logs; nil is slog.Default.
	Log *slog.Logger
	// FirstLoop is the lowest number of a loop device that the rack uses. In a container whose /dev
	// has only the nodes of its start, others need the low numbers.
	FirstLoop int
	// ProcRoot is a procfs that shows the processes of all guests, to find the mounts that are
	// frozen while a snapshot is taken; "" is /proc.
	ProcRoot string
	// KeepDevices leaves the disks with their guests when the rack is closed, as when a rack's
	// control plane ends. The next rack that is opened on Dir adopts them.
	KeepDevices bool
	// FlakyDisks makes disks that can fail (adminapi.DiskFault). They end with the process.
	FlakyDisks bool
}

// InstanceSpec is an instance that the rack has from the start. An ID that is not given is derived
// from the names of project and instance, so it is the same on every machine.
type InstanceSpec struct {
	Name, ID string
	// Project is the first of the Config when empty.
	Project string
	Stopped bool
}

// ImageSpec is an image that the rack has from the start, with the content of File or, without one,
// SizeBytes of zeroes. Without a Project it is the silo's.
type ImageSpec struct {
	Name, Project string
	SizeBytes     int64
	BlockSize     int
	File          string
}

// Rack carries out what the API asks for: it decides by the rules, keeps the records and drives the
// data plane. Its operations are grouped by what they are about.
type Rack struct {
	Disks       Disks
	Snapshots   Snapshots
	Instances   Instances
	Attachments Attachments
	Silo        Silo

	config    Config
	temporary bool
	log       *slog.Logger
	store     *store.Store
	plane     *dataplane.Plane
	switches  switchboard
	// locks serialises the work on the data plane, object by object: always an instance before a
	// disk before a snapshot, so that no two calls wait for each other. The records need no locks,
	// as their transactions are serial.
	locks    keylock.Map
	creating pending
	repairs  repairs
	deferred deferredWork
	// ctx ends when the rack closes; work is what is still in progress then.
	ctx    context.Context
	cancel context.CancelFunc
	work   sync.WaitGroup

	mu sync.Mutex
	// mu guards closed and keeps it from changing while work is added.
	closed bool
}

// ErrClosed is returned for a call to a closed rack.
var ErrClosed = errors.New("the simulator is closed")

// Open opens the rack. It finishes or undoes what an earlier simulator left half done, gives the
// running instances their devices, and makes what the config names and the directory lacks.
func Open(ctx context.Context, c Config) (*Rack, error) {
	r := &Rack{config: c, log: cmp.Or(c.Log, slog.Default())}
	r.Disks, r.Snapshots, r.Silo = Disks{r}, Snapshots{r}, Silo{r}
	r.Instances, r.Attachments = Instances{r}, Attachments{r}
	r.ctx, r.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if err := r.open(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("start a rack in %s: %w", r.config.Dir, err), r.release())
	}
	return r, nil
}

func (r *Rack) open(ctx context.Context) (err error) {
	if _, err := r.ChangeSwitches(func(now *adminapi.Switches) error {
		*now = r.config.switches()
		return nil
	}); err != nil {
		return err
	}
	if r.config.Dir == "" {
		if r.config.Dir, err = os.MkdirTemp("", "oxide-simulator-"); err != nil {
			return err
		}
		r.temporary = true
	}
	if r.config.Dir, err = filepath.Abs(r.config.Dir); err != nil {
		return err
	}
	if err := prepareDir(r.config.Dir); err != nil {
		return err
	}
	if r.store, err = store.Open(filepath.Join(r.config.Dir, recordsFile)); err != nil {
		return err
	}
	r.plane, err = dataplane.Open(dataplane.Config{Dir: r.config.Dir, Log: r.log, Seed: r.config.Seed,
		FirstLoop: r.config.FirstLoop, ProcRoot: r.config.ProcRoot,
		FlakyDisks: r.config.FlakyDisks})
	if err != nil {
		return err
	}
	return r.restore(ctx)
}

// Close waits for the work in progress, cutting its delays short, and releases every device unless
// Config.KeepDevices. What was acknowledged is in the directory.
func (r *Rack) Close() error {
	r.mu.Lock()
	wasClosed := r.closed
	r.closed = true
	r.mu.Unlock()
	if wasClosed {
		return nil
	}
	r.cancel()
	r.plane.HealDisks() // work may wait for one that hangs
	r.work.Wait()
	return r.release()
}

func (r *Rack) release() error {
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
		errs = append(errs, os.RemoveAll(r.config.Dir))
	}
	return errors.Join(errs...)
}

// Begin registers work that Close waits for, unless the rack is closed.
func (r *Rack) Begin() (end func(), ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.closed {
		return nil, false
	}
	r.work.Add(1)
	return r.work.Done, true
}

// background does work that outlives its request; Close waits for it.
func (r *Rack) background(work func()) {
	end, ok := r.Begin()
	if !ok {
		return
	}
	go func() {
		defer end()
		work()
	}()
}

// Pause waits. It reports whether the whole time passed before the end of ctx or of the rack.
func (r *Rack) Pause(ctx context.Context, d time.Duration) bool {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(r.ctx, cancel)()
	if d <= 0 {
		return ctx.Err() == nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// hold keeps a request open for as long as a switch says, which may change meanwhile.
func (r *Rack) hold(long func(adminapi.Switches) adminapi.Duration) {
	for began := time.Now(); ; {
		now, changed := r.switches.watch()
		timer := time.NewTimer(time.Duration(long(now)) - time.Since(began))
		select {
		case <-changed:
			timer.Stop()
			continue
		case <-timer.C:
		case <-r.ctx.Done():
		}
		timer.Stop()
		return
	}
}

// InstanceSpecs lists the instances of the Config, with their IDs.
func (r *Rack) InstanceSpecs() []InstanceSpec { return r.config.Instances }

// Records are the rack's records. A change bypasses the rules.
func (r *Rack) Records() *store.Store { return r.store }

// Plane is the rack's data plane.
func (r *Rack) Plane() *dataplane.Plane { return r.plane }
