//go:build linux

package concurrency

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// The limits of these controllers, which are shorter than the defaults. A late effect comes within
// lateLimit. Another controller leads after lease, which is longer than callLimit and lookLimit, as
// it is in the chart.
const (
	lateLimit  = 800 * time.Millisecond
	lateEffect = 250 * time.Millisecond
	lookLimit  = 400 * time.Millisecond
	// pause is the time for which an answer is held back, so that something happens before it.
	pause     = 150 * time.Millisecond
	callLimit = 800 * time.Millisecond
	lease     = time.Second
)

// lanes is the number of trials that run at once.
const lanes = 6

// Each trial has an actor that disturbs a call: a proxy that answers wrongly with a request ID as a
// rack's, a rack that carries a request out after its answer, a person or another controller that
// makes the same change, a leader that is stopped right before its change while another one leads,
// or a token without its role for a moment. The rack's faults do all that happens to a request.
func TestNoMissingLateOrWrongAnswerUndoesAcknowledgedWork(t *testing.T) {
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

// answerRules contains rules of the controller, and the actors that reveal a controller without the
// rule.
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

func TestAControllerWithoutOneOfItsRulesIsNoticed(t *testing.T) {
	t.Parallel()
	var guards []proof.Guard
	for _, rule := range answerRules {
		guards = append(guards, rule.Guard)
	}
	program, err := proof.BuildMutant(t.Context(), t.TempDir(), guards)
	csitest.Must(t, err)
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

// answerProof is a rack with controllers, and the results of the trials.
type answerProof struct {
	t    *testing.T
	p    *proof.Proof
	rack *harness.Rack
	all  []*lane

	trials, void, acts, undone, leaked atomic.Int64
	// mu guards wrong, the failures of trials.
	mu    sync.Mutex
	wrong []string
}

func newAnswers(t *testing.T, p *proof.Proof, options harness.PluginOptions) *answerProof {
	t.Helper()
	// The rack accepts any token. Faults select a controller by its own one.
	rack, err := harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{
		Args: []string{"--token="}})
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	a := &answerProof{t: t, p: p, rack: rack}
	for i := range lanes {
		l := &lane{answerProof: a, number: i, stopped: make(chan struct{}, 1)}
		for n := range 2 {
			token := fmt.Sprintf("oxide-token-%d-%d", i, n)
			env := map[string]string{"OXIDE_TOKEN": token, "OXIDE_LATE_LIMIT": lateLimit.String(),
				"OXIDE_LOOK_LIMIT": lookLimit.String()}
			maps.Copy(env, options.Env)
			plugin, err := rack.StartPlugin(t.Context(), harness.PluginOptions{
				Mode: harness.ModeController, Command: options.Command, Env: env})
			csitest.Must(t, err)
			t.Cleanup(func() { csitest.Must(t, plugin.Stop()) })
			l.leaders = append(l.leaders, leader{plugin, token})
		}
		a.all = append(a.all, l)
	}
	return a
}

// run runs n trials, each with one of the actors, until some have failed.
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

// report records a failure of a trial, and counts it.
func (a *answerProof) report(count *atomic.Int64, seed uint64, format string, args ...any) {
	count.Add(1)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.wrong = append(a.wrong, fmt.Sprintf("trial %d: ", seed)+fmt.Sprintf(format, args...))
}

// wrongAnswer returns an answer that does not come from the rack, or reports a failure of the rack.
// nil is no answer. The answers have the rack's request ID, so 204 is not among their statuses: a
// delete has been done after it.
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
