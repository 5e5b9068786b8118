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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// wholeRacks is the number of racks, and shortRacks that of the short form. Each runs one cell at a
// time, which mostly waits.
const (
	wholeRacks = 6
	shortRacks = 2
)

// only is the environment variable with a pattern of the cells to run alone.
const only = "FAULTS_CELL"

func TestTheDriverAnswersEveryFaultOfARackCorrectly(t *testing.T) { // B-9, B-10, B-43, OX-8
	p := proof.New(t, "fault-matrix")
	run := harness.RunFor(t)
	m := &matrix{t: t, proof: p, run: run, environments: make([]*environment, wholeRacks)}
	if p.Short() {
		m.environments = m.environments[:shortRacks]
	}
	m.start()
	m.observe()
	m.choose()
	m.runCells()
	covered := map[string]bool{}
	for _, c := range m.cells {
		covered[c.operation] = true
	}
	p.Figure("operations", len(covered), "calls", len(scenarios), "phases", len(phases),
		"answers", len(answers), "cells", len(m.cells),
		"share", fmt.Sprintf("%.0f%%", 100*float64(len(m.cells))/float64(m.all)),
		"passed", m.passed.Load())
	if operations := len(driverOperations(t)) - 1; len(covered) < operations && os.Getenv(only) == "" {
		t.Errorf("%d of %d operations had a fault", len(covered), operations)
	}
}

// matrix is a run of the cells.
type matrix struct {
	t            *testing.T
	proof        *proof.Proof
	run          *harness.Run
	environments []*environment
	// pairs contains the operations of all scenarios, as cells without a phase and an answer.
	pairs []cell
	// all is the number of all cells. cells contains the cells of this run.
	all    int
	cells  []cell
	passed atomic.Int64
}

func (m *matrix) start() {
	m.t.Helper()
	errs := make([]error, len(m.environments))
	harness.AtOnce(len(errs), func(i int) {
		m.environments[i], errs[i] = newEnvironment(m.t.Context(), m.proof, m.run)
	})
	m.t.Cleanup(func() {
		for _, env := range m.environments {
			if env == nil {
				continue
			}
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			if err := env.shutDown(ctx); err != nil {
				m.t.Errorf("a rack's end: %v", err)
			}
			cancel()
		}
	})
	m.proof.Fatal(errors.Join(errs...))
}

// observe finds the operations of each scenario. It reports an error unless together they are the
// operations of the driver's source.
func (m *matrix) observe() {
	m.t.Helper()
	var mu sync.Mutex // guards m.pairs and seen
	seen := map[string]bool{}
	m.proof.Error(share(m, scenarios, func(env *environment, s scenario) error {
		operations, err := s.operations(m.t.Context(), env)
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
	for _, operation := range driverOperations(m.t) {
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

// share calls do for each job, on each rack for one after the other.
func share[J any](m *matrix, all []J, do func(*environment, J) error) error {
	return harness.Share(len(m.environments), all, func(i int, jobs <-chan J) error {
		var errs []error
		for job := range jobs {
			errs = append(errs, do(m.environments[i], job))
		}
		return errors.Join(errs...)
	})
}

// sampledPhases is the number of phases in which each operation and answer is tried, except in the
// long form.
const sampledPhases = 2

// choose chooses for each operation and answer one call in some of the phases. In the long form it
// chooses all cells, and in the short form one for each operation.
func (m *matrix) choose() {
	m.t.Helper()
	var all []cell
	for _, pair := range m.pairs {
		for _, ph := range phases {
			for _, a := range answers {
				if !a.suits(pair.operation, ph) {
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
	case m.proof.Long():
		m.cells = all
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
}

// some returns up to n cells of each kind, with different phases.
func some(all []cell, n int, kind func(cell) string) (chosen []cell) {
	taken := map[string][]phase{}
	for _, c := range all {
		if k := kind(c); len(taken[k]) < n && !slices.Contains(taken[k], c.phase) {
			taken[k] = append(taken[k], c.phase)
			chosen = append(chosen, c)
		}
	}
	return chosen
}

// runCells runs the cells. The long form repeats them in other orders until its time is over.
func (m *matrix) runCells() {
	for range m.proof.Rounds() {
		m.passed.Store(0)
		m.proof.Error(share(m, m.cells, func(env *environment, c cell) error {
			m.proof.SayOften("%d of %d cells", m.passed.Load(), len(m.cells))
			if err := c.run(m.t.Context(), env); err != nil {
				return fmt.Errorf("%s: %w\nrun just this cell: %s", c, err, c.repetition(env))
			}
			m.passed.Add(1)
			return nil
		}))
		m.proof.Rand().Shuffle(len(m.cells), func(i, j int) {
			m.cells[i], m.cells[j] = m.cells[j], m.cells[i]
		})
	}
}

func (c cell) repetition(env *environment) string {
	return fmt.Sprintf("%s='%s' make faults SEED=%d", only, c, env.proof.Seed)
}

// draw draws the page of a cell that failed at that time, and returns its path.
func (c cell) draw(ctx context.Context, env *environment, broken error, at time.Time) string {
	return env.proof.Draw(ctx, proof.Failure{Name: c.String(), Broken: broken, At: at,
		Repeat: c.repetition(env), Dir: env.run.Dir, Rack: env.Rack, Plugins: env.Plugins,
		History: env.Rack.History})
}

func TestACellWithAWrongCodeFailsAndIsDrawn(t *testing.T) {
	p := proof.New(t, "fault-matrix")
	env, err := newEnvironment(t.Context(), p, harness.RunFor(t))
	p.Fatal(err)
	t.Cleanup(func() { p.Error(env.shutDown(context.Background())) })
	c := cell{operation: "disk_create", phase: phases[0], scenario: scenarios[0]}
	i := slices.IndexFunc(answers, func(a answer) bool { return a.suits(c.operation, c.phase) })
	c.answer, c.scenario.want = answers[i], codes.DataLoss
	broken := c.run(t.Context(), env)
	if broken == nil {
		t.Fatal("the cell passes")
	}
	p.Error(p.CheckPage(env.page, broken.Error(), only+"='"+c.String(), "fault strikes disk_create",
		"CreateVolume"))
}

// background is an operation that the controller uses for a metric, and that no call uses.
const background = "current_user_access_token_list"

// driverOperations returns the operations that the driver's source uses, with the API's names:
// every method of Oxide's client that the source mentions.
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

// selected matches a method or a field in Go source, and humps a border of two words in its name.
var (
	selected = regexp.MustCompile(`\.\s*([A-Z]\w+)`)
	humps    = regexp.MustCompile(`([a-z])([A-Z])`)
)
