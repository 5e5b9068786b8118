package fuzz

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// leastTime is the minimum time for which a target is fuzzed, even if its share is smaller. It
// also limits how long the fuzzer makes one input smaller, which could otherwise take a
// minute.
const leastTime = time.Second

// tally contains the counters of the proof.
type tally struct{ targets, corpus, executions, crashers int }

// TestNoInputBreaksAFuzzTarget is the proof: no seed makes a fuzz target fail, and in the long
// form no input that the fuzzer makes from the seeds does. The short form leaves the seeds to the
// packages of the targets, whose tests run them, too.
func TestNoInputBreaksAFuzzTarget(t *testing.T) {
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
	if p.Short() {
		short.Skip(t, n.corpus)
	}
	if p.Long() {
		fuzzEach(t, p, all, &n)
	} else {
		n.executions, n.crashers = runSeeds(t, all)
	}
	p.Figure("targets", n.targets, "corpus", n.corpus, "executions", n.executions,
		"crashers", n.crashers)
}

// fuzzEach builds all targets and then gives each an equal share of the remaining time.
func fuzzEach(t *testing.T, p *proof.Proof, all []target, n *tally) {
	begin := time.Now()
	f := fuzzer{dir: t.TempDir()}
	for _, one := range all {
		if err := f.build(t.Context(), one.dir); err != nil {
			t.Fatal(err)
		}
	}
	for i, one := range all {
		left := p.Duration() - time.Since(begin)
		share := max(left/time.Duration(len(all)-i), leastTime).Round(time.Second)
		executions, err := f.fuzz(t.Context(), one, share)
		n.executions += executions
		if err != nil {
			n.crashers++
			t.Errorf("%s in %s: %v", one.name, one.dir, err)
		}
		p.Say("%d of %d: %s, %d executions in %s", i+1, len(all), one.name, executions, share)
	}
}

// fuzzer contains the test binaries of the packages. Each is built once, with the
// instrumentation that guides the fuzzer.
type fuzzer struct {
	// dir contains the binaries and the inputs that the fuzzer collects.
	dir string
}

func (f fuzzer) binary(dir string) string {
	return filepath.Join(f.dir, strings.ReplaceAll(dir, "/", "-")+".test")
}

func (f fuzzer) build(ctx context.Context, dir string) error {
	if _, err := os.Stat(f.binary(dir)); err == nil {
		return nil
	}
	if out, err := goTest(ctx, "-c", "-fuzz=.", "-o", f.binary(dir), "./"+dir); err != nil {
		return fmt.Errorf("build the targets in %s: %w\n%s", dir, err, out)
	}
	return nil
}

// progress matches the lines that the fuzzer prints while it runs.
var progress = regexp.MustCompile(`execs: (\d+)`)

// fuzz fuzzes the target for that time. An input that makes the target fail is added to its
// seeds.
func (f fuzzer) fuzz(ctx context.Context, one target, share time.Duration) (int, error) {
	cmd := exec.CommandContext(ctx, f.binary(one.dir), "-test.run=^$",
		"-test.fuzz=^"+one.name+"$", "-test.fuzztime="+share.String(),
		"-test.fuzzminimizetime="+leastTime.String(),
		"-test.fuzzcachedir="+filepath.Join(f.dir, "learned", one.dir))
	cmd.Dir = filepath.Join(root, one.dir)
	out, err := cmd.CombinedOutput()
	executions := 0
	if all := progress.FindAllSubmatch(out, -1); len(all) > 0 {
		executions, _ = strconv.Atoi(string(all[len(all)-1][1])) // the pattern matches only digits
	}
	if err != nil && !onlyLate(out) {
		return executions, fmt.Errorf("%w\n%s", err, lastLines(out, 40))
	}
	return executions, nil
}

// onlyLate reports whether the only failure is that a worker was busy when the time was over.
// The fuzzer sometimes reports this as a failure.
func onlyLate(out []byte) bool {
	return late.Match(out) && !bytes.Contains(out, []byte("Failing input"))
}

var late = regexp.MustCompile(
	`--- FAIL: Fuzz\w+ \([0-9.]+s\)\n +context deadline exceeded\nFAIL\s*$`)

// passed and failed match the line for one seed.
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

// goTest runs go test at the module's root, in the form in which make test has compiled the
// packages.
func goTest(ctx context.Context, args ...string) ([]byte, error) {
	args = append([]string{"test", "-trimpath", "-timeout=0"}, args...)
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir, cmd.Env = root, append(os.Environ(), "CGO_ENABLED=0")
	return cmd.CombinedOutput()
}

func lastLines(text []byte, n int) []byte {
	lines := bytes.SplitAfter(text, []byte("\n"))
	return bytes.Join(lines[max(0, len(lines)-n):], nil)
}
