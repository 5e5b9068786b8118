package fuzz

import (
	"bytes"
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// leastTime is how long a target is fuzzed at least, be the share smaller; and how much of it the
// fuzzer may spend on making one input smaller, which would else be a minute.
const leastTime = time.Second

// tally is what the proof counts.
type tally struct{ targets, corpus, executions, crashers int }

// TestFuzz is the proof: no seed, and in the long form nothing that the fuzzer makes of them,
// breaks what a target holds.
func TestFuzz(t *testing.T) {
	p := proof.New(t, "fuzz")
	all, err := targets()
	if err != nil {
		t.Fatal(err)
	}
	n := tally{targets: len(all)}
	for _, one := range all {
		seeds, err := one.seeds()
		if err != nil {
			t.Fatal(err)
		}
		n.corpus += len(seeds)
	}
	if p.Long() {
		fuzzEach(t, p, all, &n)
	} else {
		n.executions, n.crashers = runSeeds(t, all)
	}
	p.Figure("targets", n.targets, "corpus", n.corpus, "executions", n.executions,
		"crashers", n.crashers)
}

// fuzzEach gives every target an equal share of the time that is left.
func fuzzEach(t *testing.T, p *proof.Proof, all []target, n *tally) {
	begin := time.Now()
	for i, one := range all {
		left := p.Duration() - time.Since(begin)
		share := max(left/time.Duration(len(all)-i), leastTime).Round(time.Second)
		executions, err := one.fuzz(t.Context(), share)
		n.executions += executions
		if err != nil {
			n.crashers++
			t.Errorf("%s in %s: %v", one.name, one.dir, err)
		}
		p.Say("%d of %d: %s, %d executions in %s", i+1, len(all), one.name, executions, share)
	}
}

// progress is what the fuzzer says of itself while it runs.
var progress = regexp.MustCompile(`execs: (\d+)`)

// fuzz fuzzes the target for so long. What breaks it, go test leaves among its seeds.
func (t target) fuzz(ctx context.Context, share time.Duration) (executions int, err error) {
	out, err := goTest(ctx, "-run=^$", "-fuzz=^"+t.name+"$", "-fuzztime="+share.String(),
		"-fuzzminimizetime="+leastTime.String(), "./"+t.dir)
	if all := progress.FindAllSubmatch(out, -1); len(all) > 0 {
		executions, _ = strconv.Atoi(string(all[len(all)-1][1])) // digits
	}
	if err != nil {
		return executions, fmt.Errorf("%w\n%s", err, lastLines(out, 40))
	}
	return executions, nil
}

// passed and failed are the lines for one seed.
var (
	passed = regexp.MustCompile(`(?m)^ +--- PASS: Fuzz\w+/`)
	failed = regexp.MustCompile(`(?m)^ +--- FAIL: Fuzz\w+/`)
)

// runSeeds runs every seed once.
func runSeeds(t *testing.T, all []target) (executions, crashers int) {
	var dirs []string
	for _, one := range all {
		dirs = append(dirs, "./"+one.dir)
	}
	slices.Sort(dirs)
	out, err := goTest(t.Context(), append([]string{"-count=1", "-v", "-run=^Fuzz"},
		slices.Compact(dirs)...)...)
	crashers = len(failed.FindAll(out, -1))
	if err != nil {
		t.Errorf("%v\n%s", err, lastLines(out, 40))
		crashers = max(crashers, 1)
	}
	return len(passed.FindAll(out, -1)) + crashers, crashers
}

// goTest runs go test at the module's root.
func goTest(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-timeout=0"}, args...)...)
	cmd.Dir = root
	return cmd.CombinedOutput()
}

func lastLines(text []byte, n int) []byte {
	lines := bytes.SplitAfter(text, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], nil)
}
