//go:build linux

package concurrency

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// lateLimit and lookLimit replace longer defaults. lookLimit is the maximum time from a read to the
// change that depends on it. callLimit and lookLimit are shorter than the lease, as in the chart.
const (
	lateLimit  = 800 * time.Millisecond // how long a rack may take for an unanswered change
	lateEffect = 250 * time.Millisecond // how late the rack carries out a change
	lookLimit  = 400 * time.Millisecond
	// pause is how long a fault delays a request, so that the trial's actor can act in this time.
	pause     = 150 * time.Millisecond
	callLimit = 800 * time.Millisecond
	lease     = time.Second
)

const lanes = 6

// In each trial an actor disturbs one call.
func TestAcknowledgedChangesSurviveMissingLateAndWrongRackAnswers(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "answers")
	n := 240
	if p.Short() {
		n = 36
	}
	a := newAnswers(t, p, harness.PluginOptions{})
	for range p.Rounds() {
		a.run(n, actors)
		p.Say("%d trials, %d of them void", a.trials.Load(), a.void.Load())
	}
	trials, void := a.trials.Load(), a.void.Load()
	p.Figure("trials", trials, "void", void, "actors", len(actors), "acts", a.acts.Load(), "undone",
		a.undone.Load(), "leaked", a.leaked.Load())
	for _, what := range a.results() {
		t.Error(what)
	}
	if void > trials/4 {
		t.Errorf("%d of %d trials are void, because effects or actors came too late", void, trials)
	}
}

// answerRules contains guards. A controller without a guard must fail a trial with one of shownBy.
var answerRules = []struct {
	proof.Guard
	shownBy []actor
}{
	{proof.Guard{Name: "an answer that is not the rack's is no refusal", Edits: []proof.Edit{{
		Place: "rack.own", Text: `r != nil && r.ErrorCode != "" && r.RequestId != "" &&
		r.RequestId == answer.HTTPResponse.Header.Get("X-Request-Id")`,
		With: "(REMOVED || (TEXT))"}, {
		Place: "rack.Definite", Text: "!own(answer)", With: proof.NotAsked}}},
		[]actor{aProxy, aLateRack}},
	{proof.Guard{Name: "a change without an answer is remembered", Edits: []proof.Edit{{
		Place: "controller.changes.latest", Text: "c.blocks(like) && end.After(until)",
		With: proof.NotAsked}}}, []actor{aProxy, aLateRack}},
	{proof.Guard{Name: "an observed state does not end an unanswered change", Edits: []proof.Edit{{
		Place: "controller.attachment.confirmDetached", Text: "err := a.checkDetached(ctx, disk)",
		With: `if REMOVED {
		a.changes.open = nil
	}
	TEXT`}}}, []actor{aPerson}},
	{proof.Guard{Name: "a change is made soon after the read that it depends on", Edits: []proof.Edit{{
		Place: "rack.attempt.left", Text: "left := a.limit",
		With: "left := zeroIf(!REMOVED, time.Hour) + a.limit"}}},
		[]actor{aStoppedLeader}},
	{proof.Guard{Name: "a missing object is read twice", Edits: []proof.Edit{{
		Place: "rack.Client.Gone", Text: "err := again()", With: `if REMOVED {
		return nil
	}
	TEXT`}}}, []actor{noRoleForAMoment}},
}

func TestATrialFailsIfOneSafetyCheckOfTheControllerIsRemoved(t *testing.T) {
	t.Parallel()
	var guards []proof.Guard
	for _, rule := range answerRules {
		guards = append(guards, rule.Guard)
	}
	program := csitest.Got(proof.BuildMutant(t.Context(), t.TempDir(), guards))(t)
	for _, rule := range short.Some(t, 1, answerRules) {
		t.Run(rule.Name, func(t *testing.T) {
			a := newAnswers(t, proof.New(t, "answers-guards"), harness.PluginOptions{
				Command: []string{program}, Env: map[string]string{proof.RemovedGuard: rule.Name}})
			for range 8 {
				a.run(24, rule.shownBy)
				if wrong := a.results(); len(wrong) > 0 {
					t.Logf("in %d trials: %s", a.trials.Load(), wrong[0])
					return
				}
			}
			t.Errorf("no trial of %d fails", a.trials.Load())
		})
	}
}

type answerProof struct {
	t    *testing.T
	p    *proof.Proof
	rack *harness.Rack
	all  []*lane

	trials, void, acts, undone, leaked atomic.Int64
	// mu guards the descriptions of the trials that failed.
	mu    sync.Mutex
	wrong []string
}

func newAnswers(t *testing.T, p *proof.Proof, options harness.PluginOptions) *answerProof {
	t.Helper()
	// The rack accepts any token. A fault selects the requests of one controller by their token.
	rack := csitest.Got(harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{
		Args: []string{"--token="}}))(t)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	a := &answerProof{t: t, p: p, rack: rack}
	for i := range lanes {
		l := &lane{answerProof: a, stopped: make(chan struct{}, 1)}
		for n := range 2 {
			token := fmt.Sprintf("oxide-token-%d-%d", i, n)
			env := map[string]string{"OXIDE_TOKEN": token, "OXIDE_LATE_LIMIT": lateLimit.String(),
				"OXIDE_LOOK_LIMIT": lookLimit.String()}
			maps.Copy(env, options.Env)
			plugin := csitest.Got(rack.StartPlugin(t.Context(), harness.PluginOptions{
				Mode: harness.ModeController, Command: options.Command, Env: env}))(t)
			t.Cleanup(func() { csitest.Must(t, plugin.Stop()) })
			l.leaders = append(l.leaders, leader{plugin, token})
		}
		a.all = append(a.all, l)
	}
	return a
}

// run runs n trials with a random actor each, and stops after six failures.
func (a *answerProof) run(n int, with []actor) {
	seeds := make([]uint64, n)
	for i := range seeds {
		seeds[i] = a.p.Rand().Uint64()
	}
	csitest.Must(a.t, harness.Share(len(a.all), seeds, func(i int, seeds <-chan uint64) error {
		for seed := range seeds {
			if len(a.results()) <= 5 {
				a.all[i].trial(seed, with)
			}
		}
		return nil
	}))
}

func (a *answerProof) results() []string {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.wrong
}

func (v *life) report(count *atomic.Int64, format string, args ...any) {
	count.Add(1)
	v.mu.Lock()
	defer v.mu.Unlock()
	v.wrong = append(v.wrong, fmt.Sprintf("trial %d: %s: %s", v.seed, v.who,
		fmt.Sprintf(format, args...)))
}

// wrongAnswer returns an answer of a proxy, a 503 of the rack, or nil to cut the connection. Each
// answer gets the request ID of the rack's own answer. No status is 204, because a 204 with this ID
// is the right answer to a delete.
func wrongAnswer(r *rand.Rand) *adminapi.Response {
	if r.IntN(6) == 0 {
		return nil
	}
	if r.IntN(6) == 0 {
		return &adminapi.Response{Status: http.StatusServiceUnavailable,
			ErrorCode: "ServiceNotAvailable", Message: "not now"}
	}
	statuses := []int{200, 201, 202, 302, 400, 401, 403, 404, 407, 408, 409, 410, 413, 418, 429,
		431, 451, 499, 500, 501, 502, 503, 504, 507, 520}
	bodies := []string{"<html>blocked</html>", "{}", "null", " ",
		`{"request_id":"r-2","error_code":"InvalidRequest","message":"no"}`,
		`{"request_id":"r-2","error_code":"ObjectNotFound","message":"no"}`,
		`{"error_code":"InsufficientCapacity","message":"no"}`}
	return &adminapi.Response{Status: statuses[r.IntN(len(statuses))],
		Body: bodies[r.IntN(len(bodies))]}
}

type actor string

const (
	aProxy           actor = "a proxy answers"
	aLateRack        actor = "the rack is late"
	aPerson          actor = "a person or another controller makes the same change"
	aStoppedLeader   actor = "the leader is stopped before its change"
	noRoleForAMoment actor = "the token has no role for a moment"
)

var actors = []actor{aProxy, aLateRack, aPerson, aStoppedLeader, noRoleForAMoment}

type leader struct {
	*harness.Plugin
	token string
}

// stop sends SIGSTOP and waits until all threads have stopped. On a busy machine a thread may run
// for a while after the signal, and send a request.
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

// lane runs trials one after another, with two controllers of its own.
type lane struct {
	*answerProof
	// The first of the two controllers leads.
	leaders []leader
	// seen is a request's number in the rack's log. lateness() reads only the later requests.
	seen int
	// stopped receives a value when the leader was stopped.
	stopped chan struct{}
}

// If the leader was stopped, elect() waits until the lease ends. Then the other controller leads.
func (l *lane) elect() {
	select {
	case <-l.stopped:
		slices.Reverse(l.leaders)
		<-time.After(lease)
	default:
	}
}

// life is one volume's trial, with the results that the driver has acknowledged.
type life struct {
	*lane
	ctx  context.Context
	seed uint64
	rand *rand.Rand
	who  actor
	name string
	// These are the acknowledged IDs of the volume and of its snapshot, or "".
	id, snapshot string
	volume       *csi.Volume
	limit        time.Duration // of a call
	// node is the node on which the volume was last published.
	node      string
	published bool
	// left waits for the calls to controllers that were stopped before they answered.
	left sync.WaitGroup
	// late is the ID of the fault that makes the rack answer before it makes the change, or "".
	late string
	// missed is set if the call ended between the fault and the actor's reaction. The trial is void.
	missed bool
}

// step is a CSI call. The driver sends the requests in reads to the rack, then the one in change.
type step struct {
	call   func(*life) error
	reads  []string
	change string
}

var (
	publishing = step{(*life).publish, []string{"instance_disk_list", "disk_view"},
		"instance_disk_attach"}
	unpublishing = step{(*life).unpublish, []string{"disk_view"}, "instance_disk_detach"}
	steps        = []step{
		{(*life).create, nil, "disk_create"}, publishing, unpublishing,
		{(*life).takeSnapshot, []string{"disk_view"}, "snapshot_create"},
		{(*life).deleteSnapshot, []string{"snapshot_view"}, "snapshot_delete"},
		{(*life).delete, []string{"disk_view"}, "disk_delete"},
	}
)

func (l *lane) trial(seed uint64, with []actor) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	r := rand.New(rand.NewPCG(seed, 0))
	v := &life{lane: l, ctx: ctx, seed: seed, rand: r, limit: callLimit, who: with[r.IntN(len(with))],
		name: fmt.Sprint("answers-", seed)}
	v.live()
	v.trials.Add(1)
}

func (v *life) live() {
	all := steps
	if v.rand.IntN(2) == 0 { // publish once more, on the same node
		all = slices.Insert(slices.Clone(steps), 3, publishing, unpublishing)
	}
	all = all[:1+v.rand.IntN(len(all))]
	// Disturb one of the last three calls: more than two later calls could repair the damage.
	disturbed := max(0, len(all)-1-v.rand.IntN(3))
	for i, s := range all {
		end := func() {}
		if i == disturbed {
			if v.who == aPerson && v.node == "" {
				v.who = aLateRack // there is nothing to detach
			}
			end = v.disturb(s)
		}
		err := s.call(v)
		end()
		if err != nil {
			v.report(&v.leaked, "step %d does not converge: %v", i, err)
			break
		}
	}
	for _, l := range v.leaders {
		_ = l.Signal(syscall.SIGCONT)
	}
	v.left.Wait()
	v.elect() // if the leader was stopped after the last answer
	if err := v.end(v.lateness() > lateLimit || v.missed); err != nil {
		v.t.Errorf("trial %d: list and remove its objects: %v", v.seed, err)
	}
}

// disturb adds the actor's fault to one request of the leader's next call. end() removes the fault.
func (v *life) disturb(s step) (end func()) {
	f := adminapi.Fault{Bearer: v.leaders[0].token, Operation: s.change, Times: 1,
		Phase: adminapi.After, Response: wrongAnswer(v.rand)}
	f.Cut = f.Response == nil
	read := v.who == noRoleForAMoment || v.who == aStoppedLeader ||
		v.who == aProxy && v.rand.IntN(4) == 0
	switch n := len(s.reads); {
	case read && n == 0:
		return func() {}
	case read:
		f.Operation = s.reads[v.rand.IntN(n)]
	}
	var meanwhile func()
	switch v.who {
	case aProxy:
		f.Phase = []adminapi.Phase{adminapi.Instead, adminapi.After}[v.rand.IntN(2)]
	case aLateRack:
		f.Phase, f.Delay = adminapi.Deferred, adminapi.Duration(lateEffect)
	case aPerson:
		f.Phase, f.Delay = adminapi.Deferred, adminapi.Duration(lateEffect)
		f.Response, f.Cut, f.Hang = nil, false, adminapi.Duration(pause)
		volume, node, other := v.volume, v.node, v.leaders[1].Controller()
		meanwhile = func() { _ = v.rack.DetachDisk(v.ctx, volume.GetVolumeId(), node) }
		if v.rand.IntN(2) > 0 {
			meanwhile = func() {
				_, _ = other.ControllerUnpublishVolume(v.ctx, harness.UnpublishRequest(volume, node))
			}
		}
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
	return v.inject(f, meanwhile)
}

// inject adds a fault, and calls meanwhile() when the fault fires. end() removes the fault.
func (v *life) inject(f adminapi.Fault, meanwhile func()) (end func()) {
	admin := v.rack.Admin
	id, err := admin.AddFault(v.ctx, f)
	if err != nil {
		v.t.Errorf("add a fault: %v", err)
		return func() {}
	}
	polling, stop := context.WithCancel(v.ctx)
	var watch sync.WaitGroup
	acted := meanwhile == nil
	watch.Go(func() {
		backoff := harness.Backoff{Max: 5 * time.Millisecond}
		for !acted && backoff.Wait(polling) == nil {
			switch fired, err := admin.Fired(polling, id); {
			case err != nil && polling.Err() == nil:
				v.t.Errorf("ask whether a fault has fired: %v", err)
				return
			case err == nil && fired > 0:
				meanwhile()
				acted = true
			}
		}
	})
	return func() {
		stop()
		watch.Wait()
		fired, err := admin.Fired(v.ctx, id)
		if err = errors.Join(err, admin.RemoveFault(v.ctx, id)); err != nil {
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

// lateness waits until the rack has carried the delayed request out, and returns the delay.
func (v *life) lateness() (late time.Duration) {
	if v.late == "" {
		return 0
	}
	if err := harness.Await(v.ctx, 10*time.Second, func() error {
		requests, err := v.rack.Admin.Requests(v.ctx, v.seen)
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

// call sends a request until it succeeds or gets a final code; with once = true, it sends only one
// request. If the leader is stopped before it answers, the new leader gets the request.
func (v *life) call(once bool, req proto.Message) (answer proto.Message, err error) {
	for {
		ctx, cancel := context.WithTimeout(v.ctx, v.limit)
		var said proto.Message
		answered := make(chan error, 1)
		go func(asked csi.ControllerClient) {
			var err error
			said, err = csitest.Answer(ctx, asked, req)
			answered <- err
		}(v.leaders[0].Controller())
		select {
		case err = <-answered:
			answer = said
			v.elect()
		case <-v.stopped:
			v.stopped <- struct{}{}
			v.elect()
			v.left.Go(func() {
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
		case <-v.ctx.Done():
			return answer, fmt.Errorf("%w: %w", v.ctx.Err(), err)
		case <-time.After(30 * time.Millisecond):
		}
	}
}

func (v *life) create() error {
	made, err := v.call(false, harness.CreateRequest(v.name))
	if err == nil {
		v.volume = made.(*csi.CreateVolumeResponse).GetVolume()
		v.id = v.volume.GetVolumeId()
	}
	return err
}

func (v *life) publish() error {
	if v.node == "" {
		v.node = v.rack.Instances[v.rand.IntN(2)].ID
	}
	_, err := v.call(v.rand.IntN(3) == 0, harness.PublishRequest(v.volume, v.node))
	if v.published = err == nil; err != nil {
		return v.unpublish()
	}
	return nil
}

func (v *life) unpublish() error {
	v.published = false
	_, err := v.call(false, harness.UnpublishRequest(v.volume, v.node))
	return err
}

func (v *life) delete() error {
	_, err := v.call(v.rand.IntN(2) == 0, &csi.DeleteVolumeRequest{VolumeId: v.id})
	if v.id = ""; err != nil {
		return v.create()
	}
	return nil
}

func (v *life) takeSnapshot() error {
	taken, err := v.call(false, harness.SnapshotRequest(v.name, v.id))
	if err == nil {
		v.snapshot = taken.(*csi.CreateSnapshotResponse).GetSnapshot().GetSnapshotId()
	}
	return err
}

func (v *life) deleteSnapshot() error {
	_, err := v.call(v.rand.IntN(2) == 0, &csi.DeleteSnapshotRequest{SnapshotId: v.snapshot})
	if v.snapshot = ""; err != nil {
		return v.takeSnapshot()
	}
	return nil
}

// end removes the volume and its snapshots. If the trial is not void, end compares the rack's state
// before the removal with the acknowledged results.
func (v *life) end(void bool) error {
	state, err := v.rack.Admin.State(v.ctx)
	// The keys are IDs. The value for a disk is the disk's node, and for a snapshot aSnapshot.
	const aSnapshot = "a snapshot"
	want, got := map[string]string{v.id: "", v.snapshot: aSnapshot}, map[string]string{}
	if v.published {
		want[v.id] = v.node
	}
	delete(want, "")
	for _, s := range state.Snapshots {
		if harness.NameIn(s.Description) == v.name {
			got[s.ID] = aSnapshot
			err = errors.Join(err, v.rack.Client.SnapshotDelete(v.ctx,
				oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(s.ID)}))
		}
	}
	for _, d := range state.Disks {
		if harness.NameIn(d.Description) != v.name {
			continue
		}
		if got[d.ID] = d.State.Instance; got[d.ID] != "" {
			err = errors.Join(err, v.rack.DetachDisk(v.ctx, d.ID, d.State.Instance))
		}
		err = errors.Join(err, v.rack.DeleteDisk(v.ctx, d.ID))
	}
	if void {
		v.void.Add(1)
		return err
	}
	for id, at := range got {
		if where, known := want[id]; !known {
			v.report(&v.leaked, "the orchestrator does not know %s (%q)", id, at)
		} else if at != where {
			v.report(&v.undone, "the disk %s is at %q, acknowledged is %q", id, at, where)
		}
	}
	for id, where := range want {
		if _, exists := got[id]; !exists {
			v.report(&v.undone, "%s (%q) was returned, but is lost", id, where)
		}
	}
	return err
}
