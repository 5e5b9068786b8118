package faults_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// These are numbers of racks. Each rack runs one cell at a time, and mostly waits.
const (
	wholeRacks = 6
	shortRacks = 2
)

const only = "FAULTS_CELL"

func TestEveryCallConvergesAfterAWrongOrMissingRackAnswer(t *testing.T) { // B-9, B-10, B-43, OX-8
	p := proof.New(t, "fault-matrix")
	m := &matrix{t: t, proof: p, environments: make([]*environment, wholeRacks)}
	if p.Short() {
		m.environments = m.environments[:shortRacks]
	}
	run, errs := harness.RunFor(t), make([]error, len(m.environments))
	harness.AtOnce(len(errs), func(i int) { m.environments[i], errs[i] = newEnvironment(t, p, run) })
	p.Fatal(errors.Join(errs...))
	used := driverOperations(t)
	m.observe(used)
	m.choose()
	m.runCells()
	covered := map[string]bool{}
	for _, c := range m.cells {
		covered[c.operation] = true
	}
	p.Figure("operations", len(covered), "calls", len(scenarios), "phases", len(phases),
		"answers", len(answers), "cells", m.tried.Load(),
		"share", fmt.Sprintf("%.0f%%", 100*float64(m.tried.Load())/float64(m.all)),
		"passed", m.passed.Load())
	if operations := len(used) - 1; len(covered) < operations && os.Getenv(only) == "" {
		t.Errorf("%d of %d operations had a fault", len(covered), operations)
	}
}

type matrix struct {
	t            *testing.T
	proof        *proof.Proof
	environments []*environment
	// pairs contains each operation of each scenario. choose() adds the phases and the answers.
	pairs []cell
	// all is the number of possible cells. least is the number of cells that run even after the time
	// of the long form is over.
	all, least    int
	cells         []cell
	tried, passed atomic.Int64
}

// observe finds the operations of each scenario, and compares them with the driver's source.
func (m *matrix) observe(used []string) {
	m.t.Helper()
	var mu sync.Mutex // guards m.pairs and seen
	seen := map[string]bool{}
	m.proof.Error(share(m, scenarios, func(env *environment, s scenario) error {
		operations, err := s.operations(env)
		mu.Lock()
		defer mu.Unlock()
		for _, operation := range operations {
			seen[operation] = true
			m.pairs = append(m.pairs, cell{operation: operation, scenario: s})
		}
		return err
	}))
	slices.SortFunc(m.pairs, func(a, b cell) int { // so that the seed chooses the same cells
		return strings.Compare(a.operation+"/"+a.scenario.name, b.operation+"/"+b.scenario.name)
	})
	for _, operation := range used {
		if !seen[operation] && operation != background {
			m.t.Errorf("the driver's source uses %s, and no scenario does; add one", operation)
		}
		delete(seen, operation)
	}
	for operation := range seen {
		m.t.Errorf("a scenario uses %s, which is not found in the driver's source", operation)
	}
	if m.t.Failed() {
		m.t.FailNow()
	}
}

func share[J any](m *matrix, all []J, do func(*environment, J) error) error {
	return harness.Share(len(m.environments), all, func(i int, jobs <-chan J) error {
		var errs []error
		for job := range jobs {
			errs = append(errs, do(m.environments[i], job))
		}
		return errors.Join(errs...)
	})
}

const sampledPhases = 2

// choose selects cells at random: for each operation and answer, sampledPhases of the phases. The
// long form adds all other cells. The short form selects one cell for each operation.
func (m *matrix) choose() {
	m.t.Helper()
	var all []cell
	for _, pair := range m.pairs {
		for _, ph := range phases {
			for _, a := range answers {
				if a.phases != nil && !slices.Contains(a.phases, ph) {
					continue
				}
				c := cell{operation: pair.operation, phase: ph, answer: a, scenario: pair.scenario}
				all = append(all, c)
				if slices.Contains([]string{"instance_disk_attach", "instance_disk_detach"}, c.operation) {
					for _, rack := range otherRacks {
						all = append(all, c.on(rack))
					}
				}
			}
		}
	}
	m.all = len(all)
	random := rand.New(rand.NewPCG(m.proof.Seed, 0))
	random.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	switch pattern := os.Getenv(only); {
	case pattern != "":
		m.cells = slices.DeleteFunc(all, func(c cell) bool {
			matched, err := path.Match(pattern, c.String())
			if err != nil {
				m.t.Fatalf("%s=%s: %v", only, pattern, err)
			}
			return !matched
		})
		if len(m.cells) == 0 {
			m.t.Fatalf("%s=%s: there is no such cell", only, pattern)
		}
	default:
		m.cells = some(all, sampledPhases, func(c cell) string {
			return c.operation + "/" + c.answer.name + "/" + string(c.hotplug)
		})
		if m.proof.Short() {
			one := some(m.cells, 1, func(c cell) string { return c.operation })
			short.Left(m.t, len(m.cells)-len(one))
			m.cells = one
		}
	}
	m.least = len(m.cells)
	if m.proof.Long() && os.Getenv(only) == "" {
		chosen := map[string]bool{}
		for _, c := range m.cells {
			chosen[c.String()] = true
		}
		m.cells = append(m.cells, slices.DeleteFunc(all, func(c cell) bool {
			return chosen[c.String()]
		})...)
	}
}

// some() returns up to n cells of each kind, with different phases.
func some(all []cell, n int, kind func(cell) string) (chosen []cell) {
	taken := map[string][]adminapi.Phase{}
	for _, c := range all {
		if k := kind(c); len(taken[k]) < n && !slices.Contains(taken[k], c.phase) {
			taken[k] = append(taken[k], c.phase)
			chosen = append(chosen, c)
		}
	}
	return chosen
}

func (m *matrix) runCells() {
	m.proof.Error(share(m, m.cells, func(env *environment, c cell) error {
		if m.tried.Load() >= int64(m.least) && m.proof.Over() {
			return nil
		}
		m.proof.SayOften("%d of %d cells", m.tried.Add(1), len(m.cells))
		if err := c.run(env); err != nil {
			return fmt.Errorf("%s: %w\nrun just this cell: %s", c, err, c.repetition(env))
		}
		m.passed.Add(1)
		return nil
	}))
}

func (c cell) repetition(env *environment) string {
	return fmt.Sprintf("%s='%s' make faults SEED=%d", only, c, env.proof.Seed)
}

func TestACallWithAnUnexpectedCodeFailsAndGetsAFailurePage(t *testing.T) {
	p := proof.New(t, "fault-matrix")
	env, err := newEnvironment(t, p, harness.RunFor(t))
	p.Fatal(err)
	c := cell{operation: "disk_create", phase: phases[0], scenario: scenarios[0], answer: answers[0]}
	c.scenario.want = codes.DataLoss
	broken := c.run(env)
	if broken == nil {
		t.Fatal("the cell passes")
	}
	p.Error(p.CheckPage(env.page, broken.Error(), only+"='"+c.String(), "fault strikes disk_create",
		"CreateVolume"))
}

// background is a request that the controller makes only for a metric. No CSI call makes it.
const background = "current_user_access_token_list"

// driverOperations returns the operations whose client methods the driver's source mentions.
func driverOperations(t *testing.T) []string {
	t.Helper()
	methods := map[string]bool{}
	client := reflect.TypeFor[*oxide.Client]()
	for i := range client.NumMethod() {
		methods[client.Method(i).Name] = true
	}
	var files []string
	for _, pattern := range []string{"driver/*.go", "driver/*/*.go", "internal/*/*.go",
		"operate/*/*.go"} {
		found, err := filepath.Glob("../../" + pattern)
		csitest.Must(t, err)
		files = append(files, found...)
	}
	asked := map[string]bool{}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		source, err := os.ReadFile(file)
		csitest.Must(t, err)
		for _, called := range selected.FindAllSubmatch(source, -1) {
			if name := string(called[1]); methods[name] && name != "Host" {
				words := humps.ReplaceAllString(strings.TrimSuffix(name, "AllPages"), "${1}_$2")
				asked[strings.ToLower(words)] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(asked))
}

// These patterns find selectors such as .DiskView, and the word boundaries in their names.
var (
	selected = regexp.MustCompile(`\.\s*([A-Z]\w+)`)
	humps    = regexp.MustCompile(`([a-z])([A-Z])`)
)

// cell is a cell of the matrix: a scenario in which the rack answers an operation wrongly.
type cell struct {
	operation string
	phase     adminapi.Phase
	answer    answer
	scenario  scenario
	// hotplug is the rack's hot-plug mode; "" means adminapi.HotplugFull.
	hotplug adminapi.Hotplug
}

func (c cell) String() string {
	parts := []string{c.operation, string(c.phase), c.answer.name, c.scenario.name}
	if c.hotplug != "" {
		parts = append(parts, string(c.hotplug))
	}
	return strings.Join(parts, "/")
}

// The cells of attach and detach also run with these hot-plug modes.
var otherRacks = []adminapi.Hotplug{adminapi.HotplugAttachOnly,
	adminapi.HotplugFull.With(adminapi.RecordFirst, adminapi.RefusalsAs500)}

// on returns the cell in a hot-plug mode. In some modes the driver must answer with another code.
func (c cell) on(rack adminapi.Hotplug) cell {
	c.hotplug = rack
	switch {
	case !rack.Detaches() && (c.scenario.name == "unpublish-from-a-running-node" ||
		c.scenario.name == "unpublish-without-a-device"):
		c.scenario.want = codes.FailedPrecondition // CU-7
	case rack.Has(adminapi.RefusalsAs500) && c.scenario.name == "publish-to-a-full-node":
		c.scenario.want = codes.Unavailable // OX-8
	}
	return c
}

const (
	shortLimit = 250 * time.Millisecond
	longLimit  = 20 * time.Second
)

// errNotFired means that the call ended before the driver made the request that the fault affects.
var errNotFired = errors.New("the fault did not apply")

// run runs a cell. If the call's deadline passes before the fault takes effect, run repeats the
// cell with twice the deadline.
func (c cell) run(env *environment) error {
	limit := longLimit
	if c.answer.code == codes.DeadlineExceeded {
		limit = shortLimit
	}
	for {
		env.Rack.History.Begin()
		err := c.runOnce(env, limit)
		ended := time.Now()
		if err != nil {
			// The next cell must run without this cell's faults.
			err = errors.Join(err, env.Rack.Admin.ClearFaults(env.ctx),
				env.Rack.Admin.RunDeferred(env.ctx))
		}
		err = errors.Join(err, env.cleanUp())
		if !errors.Is(err, errNotFired) || limit >= longLimit {
			if err != nil {
				env.page = env.proof.Draw(env.ctx, proof.Failure{Name: c.String(), Broken: err, At: ended,
					Repeat: c.repetition(env), Dir: env.run.Dir, Rack: env.Rack, Plugins: env.Plugins,
					History: env.Rack.History})
			}
			return err
		}
		limit *= 2
	}
}

// cellRun is a run of a cell, with the rack's state before the call and the right state after it.
type cellRun struct {
	cell
	*environment
	request proto.Message
	start   rackState
	want    rackState
	answer  proto.Message
	err     error
}

func (c cell) runOnce(env *environment, limit time.Duration) (err error) {
	defer harness.Catch(&err)
	r := c.prepare(env)
	if c.hotplug != "" {
		env.hotplug(c.hotplug)
		defer env.hotplug(adminapi.HotplugFull)
	}
	r.callWithFault(limit)
	r.checkResult()
	if c.phase == adminapi.Deferred {
		harness.Must(env.Rack.Admin.RunDeferred(env.ctx))
	}
	r.repeat("the repeated call, after " + outcome(r.err))
	if c.phase == later {
		harness.Must(env.Rack.Admin.RunDeferred(env.ctx))
		r.checkState("after the late effect")
		r.repeat("the call repeated once more")
	}
	return nil
}

func fail(format string, args ...any) { harness.Must(fmt.Errorf(format, args...)) }

func (c cell) prepare(env *environment) *cellRun {
	effect := c.scenario.prepare(env)
	r := &cellRun{cell: c, environment: env, request: effect.request, start: env.state()}
	if r.want = maps.Clone(r.start); effect.apply != nil && c.scenario.want == codes.OK {
		effect.apply(r.want)
	}
	return r
}

func (r *cellRun) callWithFault(limit time.Duration) {
	admin := r.Rack.Admin
	r.Rack.History.Mark(history.Rack, "fault: "+r.cell.answer.name+" "+string(r.phase))
	rule := harness.Got(admin.AddFault(r.ctx, r.fault()))
	r.answer, r.err = r.callOnce(limit)
	fired := harness.Got(admin.Fired(r.ctx, rule))
	harness.Must(admin.ClearFaults(r.ctx))
	if fired == 0 {
		fail("%w; the call %s", errNotFired, outcome(r.err))
	}
}

func (r *cellRun) callOnce(limit time.Duration) (proto.Message, error) {
	ctx, cancel := context.WithTimeout(r.ctx, limit)
	defer cancel()
	done := r.Rack.History.Step(r.scenario.name)
	answer, err := csitest.Answer(ctx, r.ctl, r.request)
	done(err)
	return answer, err
}

func (r *cellRun) checkResult() {
	code := status.Code(r.err)
	if allowed := r.allowed(); !slices.Contains(allowed, code) {
		fail("the call %s; want one of %v", outcome(r.err), allowed)
	}
	if r.deniesObject() {
		return
	}
	now := r.now()
	undone := now.differs(r.want)
	switch {
	case undone == "":
	case code == r.scenario.want:
		fail("the call %s, and the rack has (+) where it should have (-):\n%s", outcome(r.err), undone)
	case now.differs(r.start) != "":
		fail("the call %s and had a part of its effect; the rack before (-) and after it (+):\n%s",
			outcome(r.err), now.differs(r.start))
	}
}

func (r *cellRun) now() rackState { return r.state().since(r.start) }

// repeat makes the call again, as an orchestrator does, until the error is neither EffectUnknown
// nor Aborted. If the first call succeeded, the first and the last answer must be equal.
func (r *cellRun) repeat(what string) {
	var again proto.Message
	var err error
	_ = harness.Await(r.ctx, patience, func() error {
		again, err = r.callOnce(longLimit)
		if strings.HasPrefix(status.Convert(err).Message(), "EffectUnknown: ") ||
			status.Code(err) == codes.Aborted {
			return err
		}
		return nil
	})
	if status.Code(err) != r.scenario.want {
		fail("%s: it %s; want %s", what, outcome(err), r.scenario.want)
	}
	if r.err == nil && !r.deniesObject() && !proto.Equal(r.answer, again) {
		fail("%s: the answer is %v; with the fault it was %v", what, again, r.answer)
	}
	r.checkState(what)
}

func (r *cellRun) checkState(what string) {
	if difference := r.now().differs(r.want); difference != "" {
		fail("%s: the rack has (+) where it should have (-):\n%s", what, difference)
	}
}

func outcome(err error) string {
	if err == nil {
		return "answered OK"
	}
	return fmt.Sprintf("failed with %s (%s)", status.Code(err), status.Convert(err).Message())
}

func (s scenario) operations(env *environment) (operations []string, err error) {
	defer harness.Catch(&err)
	r := cell{scenario: s}.prepare(env)
	harness.Must(env.Rack.Admin.ClearRequests(env.ctx))
	if r.answer, r.err = r.callOnce(longLimit); status.Code(r.err) != s.want {
		return nil, fmt.Errorf("%s %s; want %s", s.name, outcome(r.err), s.want)
	}
	requests := harness.Got(env.Rack.Admin.Requests(env.ctx, 0))
	r.checkState(s.name + " without a fault")
	harness.Must(env.cleanUp())
	for _, request := range requests {
		if !slices.Contains(operations, request.Operation) {
			operations = append(operations, request.Operation)
		}
	}
	return operations, nil
}
