//go:build linux

package concurrency

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// actor disturbs one call of a trial.
type actor string

const (
	aProxy           actor = "a proxy answers"
	aLateRack        actor = "the rack is late"
	aPerson          actor = "a person or another controller makes the same change"
	aStoppedLeader   actor = "the leader is stopped before its change"
	noRoleForAMoment actor = "the token has no role for a moment"
)

var actors = []actor{aProxy, aLateRack, aPerson, aStoppedLeader, noRoleForAMoment}

// leader is a controller, with its token.
type leader struct {
	*harness.Plugin
	token string
}

// stop stops the controller. It returns when every thread has stopped: on a busy machine a thread
// may run on for a while after the signal, and send its change when it is continued.
func (l leader) stop() error {
	if err := l.Signal(syscall.SIGSTOP); err != nil {
		return err
	}
	for {
		err := unix.Waitid(unix.P_PID, l.PID(), nil, unix.WSTOPPED|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// lane runs one trial at a time, with two controllers, of which one leads.
type lane struct {
	*answerProof
	number int
	// leaders are the controllers. The first one leads.
	leaders []leader
	// seen is the number of a request in the rack's log, before those of the next trial.
	seen int
	// stopped receives a value when the first controller was stopped.
	stopped chan struct{}
}

// life is one volume, with what the answers have told its orchestrator.
type life struct {
	*lane
	seed uint64
	rand *rand.Rand
	name string
	// id is the acknowledged ID of the volume, and snapshot that of its snapshot, or "".
	id, snapshot string
	volume       *csi.Volume
	limit        time.Duration // of a call
	// node is the node of the last publish.
	node      string
	published bool
	// left contains functions that wait for the calls of a controller that was stopped.
	left []func()
	// late is the fault by which the rack carries a request out after its answer, or "".
	late string
	// missed means that the call ended before the actor acted.
	missed bool
}

// step is a call of the orchestrator, with the operations of the rack that it uses: reads, and then
// a change.
type step struct {
	call   func(*life, context.Context) error
	reads  []string
	change string
}

// trial makes some calls for a volume, of which an actor disturbs one. Then it compares the rack
// with what was acknowledged.
func (l *lane) trial(seed uint64, with []actor) {
	r := rand.New(rand.NewPCG(seed, 0))
	v := &life{lane: l, seed: seed, rand: r, limit: callLimit,
		name: fmt.Sprintf("answers-%d-%d", l.number, seed)}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	who := with[r.IntN(len(with))]
	v.live(ctx, who)
	v.trials.Add(1)
}

func (v *life) live(ctx context.Context, who actor) {
	attach := []string{"instance_disk_list", "disk_view"}
	steps := []step{
		{(*life).create, nil, "disk_create"},
		{(*life).publish, attach, "instance_disk_attach"},
		{(*life).unpublish, []string{"disk_view"}, "instance_disk_detach"},
		{(*life).takeSnapshot, []string{"disk_view"}, "snapshot_create"},
		{(*life).deleteSnapshot, []string{"snapshot_view"}, "snapshot_delete"},
		{(*life).delete, []string{"disk_view"}, "disk_delete"},
	}
	if v.rand.IntN(2) == 0 {
		steps = slices.Insert(steps, 3,
			step{(*life).publishAgain, attach, "instance_disk_attach"}, steps[2])
	}
	steps = steps[:1+v.rand.IntN(len(steps))]
	// A disturbance of one of the last calls shows in the state at the end.
	disturbed := max(0, len(steps)-1-v.rand.IntN(3))
	for i, s := range steps {
		end := func() {}
		if i == disturbed {
			if who == aPerson && v.node == "" {
				who = aLateRack // there is nothing to detach
			}
			end = v.disturb(ctx, who, s)
		}
		err := s.call(v, ctx)
		end()
		if err != nil {
			v.report(&v.leaked, v.seed, "%s: step %d does not converge: %v", who, i, err)
			break
		}
	}
	for _, l := range v.leaders {
		_ = l.Signal(syscall.SIGCONT)
	}
	for _, end := range v.left {
		end()
	}
	v.elect() // if the leader was stopped after the last answer
	if v.lateness(ctx) > lateLimit || v.missed {
		v.void.Add(1)
	} else {
		v.check(ctx, who)
	}
	v.cleanUp(ctx)
}

// disturb makes the actor act on a request of the leader's next call, until end is called.
func (v *life) disturb(ctx context.Context, who actor, s step) (end func()) {
	f := adminapi.Fault{Bearer: v.leaders[0].token, Operation: s.change, Times: 1,
		Phase: adminapi.After, Response: wrongAnswer(v.rand)}
	f.Cut = f.Response == nil
	read := who == noRoleForAMoment || who == aStoppedLeader || who == aProxy && v.rand.IntN(4) == 0
	switch n := len(s.reads); {
	case read && n == 0:
		return func() {}
	case read:
		f.Operation = s.reads[v.rand.IntN(n)]
	}
	var meanwhile func()
	switch who {
	case aProxy:
		f.Phase = []adminapi.Phase{adminapi.Instead, adminapi.After}[v.rand.IntN(2)]
	case aLateRack:
		f.Phase, f.Delay = adminapi.Deferred, adminapi.Duration(lateEffect)
	case aPerson:
		f.Phase, f.Delay = adminapi.Deferred, adminapi.Duration(lateEffect)
		f.Response, f.Cut, f.Hang = nil, false, adminapi.Duration(pause)
		meanwhile = v.detachByHand(ctx)
	case noRoleForAMoment:
		f.Phase, f.Cut = adminapi.Instead, false
		f.Response = &adminapi.Response{Status: http.StatusNotFound, ErrorCode: "ObjectNotFound",
			Message: "not found"}
	case aStoppedLeader:
		f.Response, f.Cut, f.Delay = nil, false, adminapi.Duration(pause)
		if f.Operation == s.reads[len(s.reads)-1] && v.rand.IntN(3) > 0 {
			v.limit = 10 * time.Second // the caller waits for longer than the lease
		}
		leads := v.leaders[0]
		meanwhile = func() {
			if err := leads.stop(); err != nil {
				v.t.Errorf("stop a controller: %v", err)
			}
			v.stopped <- struct{}{}
		}
	}
	return v.inject(ctx, f, meanwhile)
}

// inject adds a fault. When it fires, meanwhile is called, unless it is nil. end removes the fault.
func (v *life) inject(ctx context.Context, f adminapi.Fault, meanwhile func()) (end func()) {
	admin := v.rack.Admin
	id, err := admin.AddFault(ctx, f)
	if err != nil {
		v.t.Errorf("add a fault: %v", err)
		return func() {}
	}
	polling, stop := context.WithCancel(ctx)
	var watch sync.WaitGroup
	acted := meanwhile == nil
	watch.Go(func() {
		backoff := harness.Backoff{Max: 5 * time.Millisecond}
		for !acted && backoff.Wait(polling) == nil {
			fired, err := admin.Fired(polling, id)
			if err != nil && polling.Err() == nil {
				v.t.Errorf("ask whether a fault has fired: %v", err)
				return
			}
			if err == nil && fired > 0 {
				meanwhile()
				acted = true
			}
		}
	})
	return func() {
		stop()
		watch.Wait()
		fired, err := admin.Fired(ctx, id)
		if err = errors.Join(err, admin.RemoveFault(ctx, id)); err != nil {
			v.t.Errorf("remove a fault: %v", err)
		}
		if acted {
			v.acts.Add(int64(fired))
		}
		v.missed = !acted && fired > 0
		if fired > 0 && f.Phase == adminapi.Deferred {
			v.late = id
		}
	}
}

// lateness waits for the late effect of a request, and returns how long after the request it came.
func (v *life) lateness(ctx context.Context) (late time.Duration) {
	if v.late == "" {
		return 0
	}
	if err := harness.Await(ctx, 10*time.Second, func() error {
		requests, err := v.rack.Admin.Requests(ctx, v.seen)
		var came time.Time
		for _, r := range requests {
			switch {
			case !slices.Contains(r.Faults, v.late):
			case !r.Deferred:
				came = r.Time
			default:
				v.seen, late = r.Seq, r.Time.Sub(came)+time.Duration(r.DurationMS*float64(time.Millisecond))
			}
		}
		if err == nil && late == 0 {
			err = errors.New("it has not come")
		}
		return err
	}); err != nil {
		v.t.Errorf("trial %d: the late effect of a request: %v", v.seed, err)
	}
	return late
}

// detachByHand returns a function that detaches the disk as a person or another controller does.
func (v *life) detachByHand(ctx context.Context) func() {
	volume, node, other := v.volume, v.node, v.leaders[1].Controller()
	if v.rand.IntN(2) == 0 {
		return func() { _ = v.rack.DetachDisk(ctx, volume.GetVolumeId(), node) }
	}
	return func() {
		_, _ = other.ControllerUnpublishVolume(ctx, harness.UnpublishRequest(volume, node))
	}
}

// call makes a call as an orchestrator does: until it succeeds or ends with a final code, or only
// once. If the leader is stopped before it answers, call asks the other controller.
func (v *life) call(ctx context.Context, once bool, req proto.Message) (proto.Message, error) {
	for {
		one, cancel := context.WithTimeout(ctx, v.limit)
		var answer proto.Message
		var err error
		answered := make(chan struct{})
		go func(asked csi.ControllerClient) {
			defer close(answered)
			answer, err = csitest.Answer(one, asked, req)
		}(v.leaders[0].Controller())
		select {
		case <-answered:
			v.elect()
		case <-v.stopped:
			v.stopped <- struct{}{}
			v.elect()
			v.left = append(v.left, func() {
				<-answered
				cancel()
			})
			continue
		}
		cancel()
		if err == nil || once || !slices.Contains([]codes.Code{codes.Aborted, codes.Unavailable,
			codes.Canceled, codes.DeadlineExceeded}, status.Code(err)) {
			return answer, err
		}
		select {
		case <-ctx.Done():
			return answer, fmt.Errorf("%w: %w", ctx.Err(), err)
		case <-time.After(30 * time.Millisecond):
		}
	}
}

// elect makes the other controller lead after the lease if the leader was stopped.
func (l *lane) elect() {
	select {
	case <-l.stopped:
		slices.Reverse(l.leaders)
		<-time.After(lease)
	default:
	}
}

func (v *life) create(ctx context.Context) error {
	made, err := v.call(ctx, false, harness.CreateRequest(v.name))
	if err == nil {
		v.volume = made.(*csi.CreateVolumeResponse).GetVolume()
		v.id = v.volume.GetVolumeId()
	}
	return err
}

func (v *life) publish(ctx context.Context) error {
	v.node = v.rack.Instances[v.rand.IntN(2)].ID
	return v.publishAgain(ctx)
}

// publishAgain publishes the volume on the same node. Sometimes the orchestrator makes the call
// only once, and unpublishes the volume if it fails.
func (v *life) publishAgain(ctx context.Context) error {
	_, err := v.call(ctx, v.rand.IntN(3) == 0, harness.PublishRequest(v.volume, v.node))
	if v.published = err == nil; err != nil {
		return v.unpublish(ctx)
	}
	return nil
}

func (v *life) unpublish(ctx context.Context) error {
	v.published = false
	_, err := v.call(ctx, false, harness.UnpublishRequest(v.volume, v.node))
	return err
}

// delete deletes the volume. Sometimes the orchestrator makes the call only once, and creates the
// volume again if it fails.
func (v *life) delete(ctx context.Context) error {
	_, err := v.call(ctx, v.rand.IntN(2) == 0, &csi.DeleteVolumeRequest{VolumeId: v.id})
	if v.id = ""; err != nil {
		return v.create(ctx)
	}
	return nil
}

func (v *life) takeSnapshot(ctx context.Context) error {
	taken, err := v.call(ctx, false, harness.SnapshotRequest(v.name, v.id))
	if err == nil {
		v.snapshot = taken.(*csi.CreateSnapshotResponse).GetSnapshot().GetSnapshotId()
	}
	return err
}

func (v *life) deleteSnapshot(ctx context.Context) error {
	_, err := v.call(ctx, v.rand.IntN(2) == 0, &csi.DeleteSnapshotRequest{SnapshotId: v.snapshot})
	if v.snapshot = ""; err != nil {
		return v.takeSnapshot(ctx)
	}
	return nil
}

// check compares the rack with what was acknowledged.
func (v *life) check(ctx context.Context, who actor) {
	disks, snapshots := v.ofName(ctx)
	for _, d := range disks {
		switch holder := d.State.Instance; {
		case d.ID != v.id:
			v.report(&v.leaked, v.seed, "%s: the orchestrator does not know disk %s (%s)", who, d.ID,
				d.State.State)
		case v.published && holder != v.node:
			v.report(&v.undone, v.seed, "%s: a published disk is %s at %q", who, d.State.State, holder)
		case !v.published && holder != "":
			v.report(&v.undone, v.seed, "%s: a disk that is not published is %s at %s", who,
				d.State.State, holder)
		}
	}
	if v.id != "" && len(disks) == 0 {
		v.report(&v.undone, v.seed, "%s: the disk %s was returned, but is lost", who, v.id)
	}
	for _, s := range snapshots {
		if s.ID != v.snapshot {
			v.report(&v.leaked, v.seed, "%s: the orchestrator does not know snapshot %s", who, s.ID)
		}
	}
	if v.snapshot != "" && len(snapshots) == 0 {
		v.report(&v.undone, v.seed, "%s: the snapshot %s was returned, but is lost", who, v.snapshot)
	}
}

// ofName lists the disks and snapshots of the volume's name.
func (v *life) ofName(ctx context.Context) (disks []adminapi.Disk, snapshots []adminapi.Snapshot) {
	state, err := v.rack.Admin.State(ctx)
	if err != nil {
		v.t.Errorf("list the rack's disks and snapshots: %v", err)
	}
	return slices.DeleteFunc(state.Disks, func(d adminapi.Disk) bool {
			return harness.NameIn(d.Description) != v.name
		}), slices.DeleteFunc(state.Snapshots, func(s adminapi.Snapshot) bool {
			return harness.NameIn(s.Description) != v.name
		})
}

// cleanUp removes what is left of the volume.
func (v *life) cleanUp(ctx context.Context) {
	disks, snapshots := v.ofName(ctx)
	var err error
	for _, s := range snapshots {
		err = errors.Join(err, v.rack.Client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{
			Snapshot: oxide.NameOrId(s.ID)}))
	}
	for _, d := range disks {
		if holder := d.State.Instance; holder != "" {
			err = errors.Join(err, v.rack.DetachDisk(ctx, d.ID, holder))
		}
		err = errors.Join(err, v.rack.DeleteDisk(ctx, d.ID))
	}
	if err != nil {
		v.t.Errorf("trial %d: remove its objects: %v", v.seed, err)
	}
}
