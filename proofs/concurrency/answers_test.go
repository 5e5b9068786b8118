//go:build linux

package concurrency

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// The limits of these controllers, which are shorter than the defaults. A late effect comes within
// lateLimit. Another controller leads after lease, which is longer than callLimit and lookLimit, as
// it is in the chart.
const (
	lateLimit  = 800 * time.Millisecond
	lateEffect = 250 * time.Millisecond
	lookLimit  = 400 * time.Millisecond
	callLimit  = 800 * time.Millisecond
	lease      = time.Second
)

// lanes is the number of trials that run at once.
const lanes = 6

// Each trial has an actor that disturbs a call: a proxy that answers in place of the rack, a rack
// that carries a request out after its answer, a person or another controller that makes the same
// change, a leader that is stopped right before its change while another one leads, or a token
// without its role for a moment.
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
		t.Errorf("%d of %d trials are void, because effects came too late", void, trials)
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
	rack, err := harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{})
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	a := &answerProof{t: t, p: p, rack: rack}
	for i := range lanes {
		l := &lane{answerProof: a, number: i, stopped: make(chan struct{}, 1)}
		for range 2 {
			through := newProxy(t, rack.URL, &l.lates)
			env := map[string]string{"OXIDE_HOST": through.URL, "OXIDE_LATE_LIMIT": lateLimit.String(),
				"OXIDE_LOOK_LIMIT": lookLimit.String()}
			maps.Copy(env, options.Env)
			plugin, err := rack.StartPlugin(t.Context(), harness.PluginOptions{
				Mode: harness.ModeController, Command: options.Command, Env: env})
			csitest.Must(t, err)
			t.Cleanup(func() { csitest.Must(t, plugin.Stop()) })
			l.leaders = append(l.leaders, leader{plugin, through})
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

// act is a disturbance of one request of a call.
type act struct {
	// The request is the first change if change is set, the first read of a disk or a snapshot if
	// object is set, and otherwise the first read.
	change, object bool
	effect         effect
	// answer replaces the rack's answer; nil closes the connection.
	answer *reply
	// meanwhile, if it is set, runs before the answer is sent.
	meanwhile func()
}

// reply is an answer to a request.
type reply struct {
	status int
	header http.Header
	body   string
}

func (r *reply) response() (*http.Response, error) {
	if r == nil {
		return nil, http.ErrAbortHandler
	}
	return &http.Response{StatusCode: r.status, Header: r.header.Clone(),
		Body: io.NopCloser(strings.NewReader(r.body))}, nil
}

type effect int

// The effects of a request.
const (
	normal  effect = iota // the caller gets the rack's answer
	before                // the rack gets the request, and the caller gets another answer
	instead               // the rack does not get the request
	later                 // the rack gets the request some time after the answer
)

// otherAnswer returns an answer that does not come from the rack, or reports a failure of the rack.
// nil is no answer.
func otherAnswer(r *rand.Rand) *reply {
	if r.IntN(6) == 0 {
		return nil
	}
	if r.IntN(6) == 0 {
		return &reply{http.StatusServiceUnavailable, http.Header{"X-Request-Id": {"r-1"}},
			`{"request_id":"r-1","error_code":"ServiceNotAvailable","message":"not now"}`}
	}
	statuses := []int{200, 201, 202, 204, 302, 400, 401, 403, 404, 407, 408, 409, 410, 413, 418, 429,
		431, 451, 499, 500, 501, 502, 503, 504, 507, 520}
	bodies := []string{"<html>blocked</html>", "{}", "null", "",
		`{"request_id":"r-2","error_code":"InvalidRequest","message":"no"}`,
		`{"request_id":"r-2","error_code":"ObjectNotFound","message":"no"}`,
		`{"error_code":"InsufficientCapacity","message":"no"}`}
	return &reply{statuses[r.IntN(len(statuses))], nil, bodies[r.IntN(len(bodies))]}
}

// noRole is the rack's answer to a token without a role on the project.
func noRole() *reply {
	return &reply{http.StatusNotFound, http.Header{"X-Request-Id": {"r-1"}},
		`{"request_id":"r-1","error_code":"ObjectNotFound","message":"not found"}`}
}

// proxy is between a controller and the rack.
type proxy struct {
	*httptest.Server
	lates *lates
	// queued disturbs the next request that it selects.
	queued atomic.Pointer[act]
}

// lates counts the requests that the rack gets after their answers.
type lates struct {
	sync.WaitGroup
	mu sync.Mutex
	// guarded by mu: the longest time from a request to its effect
	longest time.Duration
}

func newProxy(t *testing.T, rack string, l *lates) *proxy {
	to, err := url.Parse(rack)
	csitest.Must(t, err)
	p := &proxy{lates: l}
	p.Server = httptest.NewServer(&httputil.ReverseProxy{Transport: p,
		Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(to) },
		ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) }})
	t.Cleanup(p.Close)
	return p
}

// take returns the queued act if it selects the request.
func (p *proxy) take(r *http.Request) act {
	background := strings.HasPrefix(r.URL.Path, "/v1/me") ||
		strings.HasPrefix(r.URL.Path, "/v1/projects")
	object := strings.HasPrefix(r.URL.Path, "/v1/disks/") ||
		strings.HasPrefix(r.URL.Path, "/v1/snapshots/")
	a := p.queued.Load()
	if a != nil && !background && a.change == (r.Method != http.MethodGet) &&
		(object || !a.object) && p.queued.CompareAndSwap(a, nil) {
		return *a
	}
	return act{}
}

// RoundTrip sends a request to the rack, even if its caller has closed the connection.
func (p *proxy) RoundTrip(r *http.Request) (*http.Response, error) {
	came := time.Now()
	var body []byte
	if r.Body != nil {
		var err error
		if body, err = io.ReadAll(r.Body); err != nil {
			return nil, err
		}
	}
	pass := func() (*http.Response, error) {
		again, err := http.NewRequestWithContext(context.WithoutCancel(r.Context()), r.Method,
			r.URL.String(), bytes.NewReader(body))
		if err != nil {
			return nil, err
		}
		again.Header = r.Header
		return http.DefaultTransport.RoundTrip(again)
	}
	a := p.take(r)
	answer, err := a.answer.response()
	switch a.effect {
	case normal:
		answer, err = pass()
	case before:
		got, failed := pass()
		if failed != nil {
			return nil, failed
		}
		_ = got.Body.Close()
	case later:
		p.lates.Go(func() {
			<-time.After(lateEffect)
			if got, failed := pass(); failed == nil {
				_ = got.Body.Close()
			}
			p.lates.mu.Lock()
			defer p.lates.mu.Unlock()
			p.lates.longest = max(p.lates.longest, time.Since(came))
		})
	}
	if a.meanwhile != nil {
		a.meanwhile()
	}
	return answer, err
}
