// Package data checks the bytes of volumes: after a volume was mounted again, moved, restored, or
// detached while it was mounted, it contains what was written, and nothing else.
//
// Each [Check] of the table [Checks] creates volumes through the driver's controller on a [Bench],
// uses them in the Bench's instances through package guest, and removes what it created, whether it
// succeeds or not. Its error names the wrong block of the volume and describes the difference.
//
// The package uses driver and rack through their APIs only. It imports neither Ginkgo nor testing.
package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// These lists have calls that most checks make: RPCs of CSI, and operations of the rack's API.
var (
	ofVolume = []string{"CreateVolume", "DeleteVolume", "disk_create", "disk_delete"}
	ofAttach = append([]string{"ControllerPublishVolume", "ControllerUnpublishVolume",
		"instance_disk_attach", "instance_disk_detach"}, ofVolume...)
	ofUse = append([]string{"NodeStageVolume", "NodePublishVolume", "NodeUnpublishVolume",
		"NodeUnstageVolume"}, ofAttach...)
	ofSnapshot = append([]string{"CreateSnapshot", "DeleteSnapshot", "snapshot_create",
		"snapshot_delete"}, ofUse...)
	ofRestart = []string{"instance_stop", "instance_start"}

	needHotplug, needB = Needs{Hotplug: true}, Needs{Hotplug: true, Second: true}
)

// Checks returns the table of checks.
func Checks() []Check { return slices.Clone(checks) }

var checks = []Check{
	{ID: "D01", Needs: needHotplug, Calls: ofUse, Run: eachAccess(checkReturn),
		Says:   "a volume keeps every block over unpublish, unstage and detach, and back",
		Source: "CSI 1.13, NodeUnstageVolume and ControllerUnpublishVolume"},
	{ID: "D02", Needs: needB, Calls: ofUse, Run: eachAccess(checkMove),
		Says: "a volume that moves to another instance and back has what both wrote, and only one " +
			"instance at a time has its device",
		Source: "CSI 1.13, SINGLE_NODE_WRITER; RFD 595"},
	{ID: "D03", Needs: needB, Calls: slices.Concat(ofUse, ofRestart), Run: eachAccess(checkRestart),
		Says:   "what fsync acknowledged is there after the instance was stopped and started",
		Source: "fsync(2); Oxide API, instance_stop is a hard halt"},
	{ID: "D04", Needs: needHotplug, Calls: ofSnapshot, Run: eachAccess(checkSnapshot),
		Says: "a snapshot that is taken while a writer runs has a gapless prefix of its records, " +
			"with every one that was acknowledged before",
		Source: "CSI 1.13, CreateSnapshot; Oxide API, snapshot_create"},
	{ID: "D05", Needs: needHotplug, Calls: ofSnapshot, Run: eachAccess(checkRestore),
		Says: "a volume that is restored has the blocks of its snapshot and no others, " +
			"and a larger one is as large for its workload",
		Source: "CSI 1.13, CreateVolume with a snapshot as its source"},
	{ID: "D06", Needs: needB, Calls: ofUse, Run: eachAccess(checkCut),
		Says: "what fsync acknowledged is there after a detach under a running workload, " +
			"and nothing that was not written",
		Source: "CSI 1.13, ControllerUnpublishVolume; fsync(2)"},
	{ID: "D07", Needs: needHotplug, Calls: ofUse, Run: eachAccess(checkNeighbours),
		Says:   "volumes that are used side by side have only their own bytes",
		Source: "RFD 595: a device is found by its serial"},
	{ID: "D08", Needs: needHotplug, Calls: ofUse, Run: rawOnly(checkBlank),
		Says:   "a new volume is zero, also after another was written and deleted",
		Source: "Oxide API, DiskSource blank; CSI 1.13, CreateVolume"},
	{ID: "D09", Needs: needHotplug, Calls: ofUse, Run: rawOnly(checkWhole),
		Says:   "a raw volume has the same checksum, over all of it, when it comes back",
		Source: "CSI 1.13, BlockVolume"},
	{ID: "D10", Needs: needHotplug, Calls: append([]string{"disk_view"}, ofAttach...),
		Run: once(checkDevices),
		Says: "an instance shows one device for a volume that is attached to it, " +
			"with the serial, the size and the block size of the rack's disk, and none after",
		Source: "RFD 595: the serial is the first 20 bytes of the disk's name"},
	{ID: "D11", Needs: Needs{Helper: true},
		Calls: slices.Concat(ofUse, ofRestart, []string{"instance_disk_list"}), Run: once(checkHelper),
		Says: "volumes that are attached to a stopped instance are its devices when it runs, " +
			"and keep what was written when it is stopped again",
		Source: "Oxide API, instance_disk_attach; RFD 595"},
	{ID: "D12", Needs: needHotplug, Calls: ofSnapshot, Run: rawOnly(checkLineage),
		Says: "a volume, its snapshots and what is restored from them keep their own blocks when " +
			"another one of them is written or deleted; behind a smaller snapshot all is zero",
		Source: "CSI 1.13, DeleteVolume and DeleteSnapshot; Oxide API, DiskSource snapshot"},
	{ID: "D13", Needs: needHotplug, Calls: ofSnapshot, Run: rawOnly(checkRecreated),
		Says: "a volume with the name of a deleted one is zero, a snapshot of the deleted one keeps " +
			"its blocks, and one with the name of a deleted snapshot has its own",
		Source: "CSI 1.13, CreateVolume and DeleteVolume"},
	{ID: "D14", Needs: needHotplug, Calls: ofUse, GiB: largeTimes, Run: rawOnly(checkLarge),
		Says:   "a volume of 17 GiB is zero, and keeps blocks from its first to its last byte",
		Source: "CSI 1.13, BlockVolume; Oxide API, DiskSource blank"},
	{ID: "D15", Needs: needHotplug, Calls: ofSnapshot, GiB: 3 * restoredTimes,
		Run:    rawOnly(checkRestoredLarge),
		Says:   "a volume of 3 GiB that is restored has every block of its snapshot",
		Source: "CSI 1.13, CreateVolume with a snapshot as its source"},
}

// Bench is the environment of the checks.
type Bench struct {
	Controller csi.ControllerClient
	// A is the agent in this instance. B is nil, or the agent in an instance that checks may stop.
	A, B *guest.AgentClient
	// Helper is nil or a stopped instance that checks may start.
	Helper *Helper
	// MayStop is called right before a stop, and fails if somebody else uses the instance.
	MayStop func(ctx context.Context, instance string) error
	// Oxide is the API client with which checks stop and start instances and read disks' properties.
	Oxide   *oxide.Client
	Hotplug bool
	// Name returns a unique name for an object.
	Name func(what string) string
	// Seed makes the data of one run differ from that of another.
	Seed uint64
	// Accesses are the kinds of access to test. Nil means ext4, xfs, btrfs and block.
	Accesses []string
	// Blocks is the number of blocks of one write; 0 means 512.
	Blocks int64
	// Log records which blocks the checks compare; nil records nothing.
	Log *Log
	// SampleTime limits how long a check reads samples of a blank disk over 1 GiB; 0 means 10 s.
	SampleTime time.Duration
	// DeviceTimeout limits how long a device takes to appear or to disappear; 0 means 30 s.
	DeviceTimeout time.Duration
	// CheckTimeout limits a check for one kind of access; 0 means an hour.
	CheckTimeout time.Duration
}

// Helper is an instance that is stopped when a check begins and when it ends.
type Helper struct {
	InstanceID string
	// Started means that a check started the instance, and so may stop it.
	Started bool
	Connect func(context.Context) (*guest.AgentClient, error)
}

// Check is one check of data.
type Check struct {
	// ID is D01, D02, …. An ID is never used for another check.
	ID string
	// Says states what the check proves, and Source names the document that promises it.
	Says, Source string
	Needs        Needs
	// GiB is the most that the check's volumes take at one time; 0 means a few GiB.
	GiB int64
	// Calls lists the RPCs of CSI and the operations of the rack's API that the check must call.
	Calls []string
	Run   func(ctx context.Context, b *Bench) error
}

// Needs lists what a check needs in addition to the controller and the instance A of a Bench.
type Needs struct{ Hotplug, Second, Helper bool }

// Blocked returns why the check cannot run on a Bench, or "".
func (c Check) Blocked(b *Bench) string {
	switch {
	case c.Needs.Hotplug && !b.Hotplug:
		return "not tested: this rack attaches or detaches disks of stopped instances only"
	case c.Needs.Second && b.B == nil:
		return "not tested: it takes a second instance, and none was given"
	case c.Needs.Helper && b.Helper == nil:
		return "not tested: it takes a stopped instance that may be started, and none was given"
	}
	return ""
}

func (b *Bench) accesses() []string {
	if b.Accesses == nil {
		return []string{"ext4", "xfs", "btrfs", "block"}
	}
	return b.Accesses
}

// startTimeout limits how long an instance takes to stop, or to start and answer.
const startTimeout = 5 * time.Minute

const volumeBytes = harness.GiB

// once() returns a function that runs the check with only the first kind of access.
func once(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		return b.runCheck(ctx, b.accesses()[0], check)
	}
}

func eachAccess(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		for _, access := range b.accesses() {
			if err := b.runCheck(ctx, access, check); err != nil {
				return fmt.Errorf("%s: %w", access, err)
			}
		}
		return nil
	}
}

func rawOnly(check func(*checkRun)) func(context.Context, *Bench) error {
	return func(ctx context.Context, b *Bench) error {
		if !slices.Contains(b.accesses(), "block") {
			return nil
		}
		return b.runCheck(ctx, "block", check)
	}
}

// ErrHangs is in the error of a check that took longer than its limit. Later checks may hang, too.
var ErrHangs = errors.New("a disk, the rack or the driver hangs, or is too slow")

const (
	cleanTimeout = 5 * time.Minute
	retryTimeout = 2 * time.Minute
)

// checkRun is one running check. A failing step panics and so ends the check. Methods with a
// context return errors instead, because cleanUp calls them and continues after an error.
type checkRun struct {
	*Bench
	Log *Log
	ctx context.Context
	// access is ext4, xfs, btrfs or block.
	access string
	// last has functions that run at the end of the check, before cleanUp.
	last []func(context.Context) error
	// undo has functions that remove what the check created, the oldest first.
	undo []func(context.Context) error
	uses []*use
}

type volume struct {
	*csi.Volume
	name, access string
	// kind is Blank, Restored, Larger or Again. The field disk is nil unless the volume is raw.
	kind string
	disk *disk
	// like is nil, or the scan that a restored volume must equal.
	like *guest.Scan
	seed uint64
	// If Volume is nil and deleted is false, it is unknown whether the volume exists.
	request *csi.CreateVolumeRequest
	deleted bool
}

// seeds numbers the volumes. A volume's number is part of its seed, so no two have the same data.
var seeds atomic.Uint64

func (b *Bench) runCheck(ctx context.Context, access string, check func(*checkRun)) error {
	timeout, began := cmp.Or(b.CheckTimeout, time.Hour), time.Now()
	limited, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	s := &checkRun{Bench: b, Log: cmp.Or(b.Log, &Log{}), ctx: limited, access: access}
	err := ended(func() { check(s) })
	if err != nil && ctx.Err() == nil && time.Since(began) >= timeout {
		err = fmt.Errorf("the check was ended after %s: %w: %w", timeout, ErrHangs, err)
	}
	finally := func(step func(context.Context) error) error {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
		defer cancel()
		return step(clean)
	}
	for _, step := range s.last {
		err = errors.Join(err, finally(step))
	}
	return errors.Join(err, harness.Wrap(finally(s.cleanUp), "remove what the check made"))
}

func (s *checkRun) fail(format string, args ...any) { harness.Must(fmt.Errorf(format, args...)) }

// ended() runs a part of a check, and returns the error of the step that failed.
func ended(part func()) (err error) {
	defer harness.Catch(&err)
	part()
	return nil
}

// during runs a part of a check, and adds the name of the step to its error.
func (s *checkRun) during(step string, part func()) {
	harness.Must(harness.Wrap(ended(part), "%s", step))
}

// cleanUp removes what the check created, the newest first, and continues after an error. A removal
// may repeat a creation to learn the ID, so the snapshot to be restored must still exist then.
func (s *checkRun) cleanUp(ctx context.Context) (err error) {
	for _, undo := range slices.Backward(s.undo) {
		err = errors.Join(err, undo(ctx))
	}
	return err
}

// mayExist reports whether a failed creation may have taken effect.
func mayExist(err error) bool {
	return slices.Contains([]codes.Code{codes.Canceled, codes.DeadlineExceeded, codes.Unavailable,
		codes.Aborted, codes.Unknown, codes.Internal}, status.Code(errors.Unwrap(err)))
}

// repeat repeats a call while its error asks for a retry, as an orchestrator does.
func repeat(ctx context.Context, call func() error) error {
	ctx, cancel := context.WithTimeout(ctx, retryTimeout)
	defer cancel()
	for backoff := (harness.Backoff{Max: 2 * time.Second}); ; {
		err := call()
		code := status.Code(errors.Unwrap(err))
		if code != codes.Aborted && code != codes.Unavailable || backoff.Wait(ctx) != nil {
			return err
		}
	}
}

// create creates a volume of the given size in GiB. If a snapshot is given, create restores it.
func (s *checkRun) create(times int64, from *snapshot) *volume {
	v := &volume{name: s.Name("volume"), kind: Blank, access: s.access,
		seed: s.Seed<<20 + seeds.Add(1)}
	v.request = harness.CreateRequest(v.name, harness.Access(s.access))
	v.request.CapacityRange.RequiredBytes = times * volumeBytes
	if from != nil {
		harness.FromSnapshot(v.request, from.id)
		v.like = from.whole
		if v.kind = Restored; times > from.times {
			v.kind = Larger
		}
	}
	s.undo = append(s.undo, func(ctx context.Context) error { return s.delete(ctx, v) })
	harness.Must(s.make(s.ctx, v))
	return v
}

// make creates the volume, or finds it if an earlier call has created it.
func (s *checkRun) make(ctx context.Context, v *volume) error {
	err := repeat(ctx, func() error {
		resp, err := s.Controller.CreateVolume(ctx, v.request)
		v.Volume = resp.GetVolume()
		return harness.Wrap(err, "create volume %s", v.name)
	})
	v.deleted = err != nil && !mayExist(err)
	if err == nil && v.access == "block" && v.disk == nil {
		v.disk = s.Log.disk(v.kind, v.GetCapacityBytes())
	}
	return err
}

// delete deletes the volume. If its ID is unknown, delete first repeats the creation to learn it.
func (s *checkRun) delete(ctx context.Context, v *volume) (err error) {
	defer harness.Catch(&err)
	if v.Volume == nil && !v.deleted {
		harness.Must(s.make(ctx, v))
	}
	if v.deleted {
		return nil
	}
	return repeat(ctx, func() error {
		_, err := s.Controller.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: v.GetVolumeId()})
		v.deleted = err == nil
		return harness.Wrap(err, "delete volume %s", v.name)
	})
}

// newInUse creates a volume of the usual size, and attaches and mounts it.
func (s *checkRun) newInUse(g *guest.AgentClient) *use { return s.inUse(s.create(1, nil), g) }

func (s *checkRun) inUse(v *volume, g *guest.AgentClient) *use {
	u := s.attach(v, g)
	u.mount()
	return u
}

func (s *checkRun) attach(v *volume, g *guest.AgentClient) *use {
	u := s.publish(v, s.facts(g).InstanceID)
	u.guest = g
	return u
}

func (s *checkRun) facts(g *guest.AgentClient) guest.Facts {
	return harness.Got(guest.ReadFacts(s.ctx, g, guest.Nothing{}))
}

func (s *checkRun) publish(v *volume, instance string) *use {
	u := &use{checkRun: s, volume: v, instance: instance, attached: true}
	u.Placement = harness.Placement{Volume: v.Volume, Capability: harness.Access(v.access)}
	s.uses, s.undo = append(s.uses, u), append(s.undo, u.end)
	harness.Must(u.publish(s.ctx))
	return u
}

// Log records which blocks of raw volumes a check compared. The zero value is ready to use.
type Log struct {
	Looks []*Look
	more  report.Extent
}

// Look records which blocks a check compared on the disks of one kind and size.
type Look struct {
	// Kind is one of the constants below. Bytes is the size of each disk.
	Kind  string
	Bytes int64
	// Seen marks the blocks that a check compared and had not yet written in that attachment.
	// Seen["new"] is for the first attachment of a disk, and Seen["kept"] for later attachments.
	// Written marks the blocks of Seen["kept"] that the check wrote in an earlier attachment.
	Seen    map[string][]bool
	Written []bool
}

// These are the kinds of disks, by their origin.
const (
	Blank    = "a blank disk"
	Restored = "a disk restored from a snapshot"
	Larger   = "a disk restored from a smaller snapshot"
	Again    = "a disk with the name of a deleted one"
)

// disk records which blocks of one raw volume a check writes and compares. Goroutines may call
// write() at the same time for different disks.
type disk struct {
	look *Look
	// visit numbers the attachments, from 1. written[i] is the last visit that wrote block i, or 0.
	visit   int32
	written []int32
}

func (l *Log) disk(kind string, bytes int64) *disk {
	n := bytes / guest.BlockBytes
	i := slices.IndexFunc(l.Looks, func(k *Look) bool { return k.Kind == kind && k.Bytes == bytes })
	if i < 0 {
		i = len(l.Looks)
		l.Looks = append(l.Looks, &Look{Kind: kind, Bytes: bytes, Written: make([]bool, n),
			Seen: map[string][]bool{"new": make([]bool, n), "kept": make([]bool, n)}})
	}
	return &disk{look: l.Looks[i], visit: 1, written: make([]int32, n)}
}

// read() marks the blocks as compared, except those that this attachment has written.
func (d *disk) read(r guest.Range) {
	d.each(r, func(block int64) {
		switch last := d.written[block]; {
		case d.visit == 1:
			d.look.Seen["new"][block] = d.look.Seen["new"][block] || last == 0
		case last < d.visit:
			d.look.Seen["kept"][block] = true
			d.look.Written[block] = d.look.Written[block] || last > 0
		}
	})
}

func (d *disk) write(r guest.Range) {
	d.each(r, func(block int64) { d.written[block] = d.visit })
}

func (d *disk) each(r guest.Range, do func(block int64)) {
	last := min((r.To+guest.BlockBytes-1)/guest.BlockBytes, int64(len(d.written)))
	for block := r.From / guest.BlockBytes; block < last; block++ {
		do(block)
	}
}

// Extent returns how many bytes of each kind of disk the check compared.
func (l *Log) Extent() (all report.Extent) {
	for _, look := range l.Looks {
		for _, moment := range []string{"new", "kept"} {
			// Leave out blank disks of 1 GiB that were not compared: other checks compare such disks.
			usual := look.Kind == Blank && look.Bytes <= harness.GiB
			if looked := look.Looked(moment); looked > 0 || !usual {
				all.Look(report.Measure{What: look.What(moment), Looked: looked, Of: look.Bytes, Unit: "bytes"})
			}
		}
	}
	return append(all, l.more...)
}

// What returns a text such as "a blank disk of 1 GiB, new". The moment is a key of Seen.
func (l Look) What(moment string) string {
	after := "new"
	if moment == "kept" {
		after = "detached and attached again"
	}
	return fmt.Sprintf("%s of %d GiB, %s", l.Kind, l.Bytes/harness.GiB, after)
}

// Looked returns how many bytes were compared. The parameter is a key of Seen.
func (l Look) Looked(moment string) (bytes int64) {
	for _, seen := range l.Seen[moment] {
		if seen {
			bytes += guest.BlockBytes
		}
	}
	return bytes
}
