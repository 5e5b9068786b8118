//go:build linux

package model

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// wholeHistories is the number of histories, and shortHistories in the short form. longest is the
// maximum number of wishes in a history.
const (
	wholeHistories = 7
	shortHistories = 1
	longest        = 50
)

// runner runs histories in one environment. After a failed history it makes a new environment.
type runner struct {
	proof *proof.Proof
	run   *harness.Run
	env   *Environment
	// formats counts the formats of the environment.
	formats proof.Formats
	// page is the page of the last history that failed.
	page string
}

func newRunner(t testing.TB, name string) *runner {
	t.Helper()
	r := &runner{proof: proof.New(t, name), run: harness.RunFor(t)}
	t.Cleanup(func() {
		if r.env != nil {
			if err := r.env.Close(); err != nil {
				t.Errorf("end the environment: %v", err)
			}
		}
	})
	return r
}

// runHistory runs the steps of a history, and then undoes everything that they have made.
func (r *runner) runHistory(ctx context.Context, name string, seed uint64, m *manipulation,
	steps func(*History) error) (*History, error) {
	if r.env == nil {
		if err := r.newEnvironment(ctx); err != nil {
			return nil, fmt.Errorf("make an environment: %w", err)
		}
	}
	r.env.Rack.History.Begin()
	h := NewHistory(r.env)
	h.manipulation = m
	err := steps(h)
	if err == nil {
		err = h.TearDown(ctx, true)
	}
	if err != nil {
		r.page = r.proof.Draw(ctx, proof.Failure{Name: name, Seed: seed, Broken: err,
			Repeat: fmt.Sprintf("make model SEED=%d", seed), Dir: r.run.Dir, Rack: r.env.Rack,
			Plugins: r.env.Plugins, History: r.env.Rack.History})
		_, _ = h.dropAll(), r.env.Abandon(ctx) // the history's failure has been reported
		r.env = nil
	}
	return h, err
}

func (r *runner) newEnvironment(ctx context.Context) error {
	dir, err := os.MkdirTemp(r.run.Dir, "tools-")
	if err != nil {
		return err
	}
	tools := filepath.Join(dir, "bin")
	if r.formats, err = proof.CountFormats(tools); err != nil {
		return err
	}
	r.env, err = NewEnvironment(ctx, r.run, r.proof, "c", proof.BtrfsMember, harness.PluginOptions{
		Args: []string{"--device-timeout=1s"},
		Env:  map[string]string{"PATH": tools + ":" + os.Getenv("PATH")}})
	if err != nil {
		return err
	}
	return r.env.TakeBaseline(ctx)
}

// replay runs a history that is given as text, and then the functions.
func (r *runner) replay(t *testing.T, m *manipulation, text string,
	then ...func(*History) error) (*History, error) {
	t.Helper()
	steps, err := ParseHistory(text)
	if err != nil {
		t.Fatal(err)
	}
	return r.runHistory(t.Context(), t.Name(), r.proof.Seed, m, func(h *History) error {
		err := h.runSteps(t.Context(), steps)
		for _, do := range then {
			if err == nil {
				err = do(h)
			}
		}
		return err
	})
}

func TestTheModelAllowsEveryStateOfEveryHistory(t *testing.T) { // B-38
	r := newRunner(t, "model")
	p := r.proof
	var sum counts
	histories := 0
	var failed []string
	t.Cleanup(func() {
		if len(failed) > 0 {
			t.Logf("the history that failed first, with PROOF_SEED=%d:\n%s",
				p.Seed+uint64(histories), failed[0])
		}
	})
	proof.SetFlags(t, "rapid.checks", proof.OneCheck(), "rapid.nofailfile", "true",
		"rapid.shrinktime", "90s")
	most := wholeHistories
	if p.Short() {
		most = shortHistories
		short.Left(t, wholeHistories-most)
	}
	for ; histories < most && !p.Long() || p.Long() && !p.Over(); histories++ {
		seed := p.Seed + uint64(histories)
		proof.SetFlags(t, "rapid.seed", strconv.FormatUint(max(seed, 1), 10))
		rapid.Check(t, func(rt *rapid.T) {
			volumes, wishes := drawHistory(rt, longest)
			name := fmt.Sprint("seed ", seed)
			h, err := r.runHistory(t.Context(), name, seed, nil, func(h *History) error {
				for _, w := range wishes {
					if err := h.runSteps(t.Context(), h.resolve(w, volumes)); err != nil {
						return err
					}
				}
				return nil
			})
			if h == nil {
				rt.Fatal(err)
			}
			if err != nil {
				failed = append(failed, h.Transcript())
				rt.Fatalf("repeat with PROOF_SEED=%d; this history ends with an error:\n%s\n%v",
					seed, h.Transcript(), err)
			}
			sum.add(h.count)
		})
		p.Say("%d histories, %d steps, %d faults, %d restarts", histories+1, sum.steps, sum.faults,
			sum.restarts)
	}
	p.Figure("histories", histories, "steps", sum.steps, "faults", sum.faults,
		"restarts", sum.restarts, "without_device", sum.bare, "bytes_acknowledged", sum.bytes,
		"bytes_lost", sum.lost)
	if err := proof.Print(proof.Line("holders", "trials", sum.holders, "wrong_ok", sum.released,
		"seed", p.Seed)); err != nil {
		t.Error(err)
	}
	if err := proof.Print(proof.Line("acknowledged", "trials", sum.copies, "missing",
		sum.lost/blockSize)); err != nil {
		t.Error(err)
	}
	if r.env != nil {
		if err := r.env.Bystanders.Compare(); err != nil {
			t.Error(err)
		}
	}
	p.Bystanders.Report()
	if !p.Short() { // the short form may have no history with forged records
		p.Forged.Report()
	}
}

func (c *counts) add(other counts) {
	c.steps += other.steps
	c.faults += other.faults
	c.restarts += other.restarts
	c.bare += other.bare
	c.holders += other.holders
	c.released += other.released
	c.bytes += other.bytes
	c.lost += other.lost
	c.copies += other.copies
}

func TestParseStepIsTheInverseOfString(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		h := NewHistory(nil)
		for _, s := range h.resolve(drawWish(rt), []int{1, 4}) {
			line := strings.ReplaceAll(s.String(), " || ", " = Aborted (busy) || ") + " = OK"
			got, err := parseStep(line)
			if err != nil {
				rt.Fatal(err)
			}
			if got.String() != s.String() {
				rt.Fatalf("%q was read as %q", s, got)
			}
		}
	})
}
