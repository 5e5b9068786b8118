// Package proof contains what the proofs of data safety share: the seed that repeats a run, the
// three lengths of a run, progress messages, FIGURE lines with results, and a rack or guest view
// with drivers (Environment, Bench). Each trial also checks that other disks of the instance do not
// change (Bystanders), and that files with forged records in the volume do not change (Forgery).
//
// A proof does a fixed amount of work. The short form (go test -short) does less work. The long
// form repeats the work with other seeds for some time.
//
// PROOF_SEED sets the seed. PROOF_DURATION selects the long form and sets the time of all proofs
// together. PROOF_SHARES is the number of proofs that share this time. PROOF_FIGURES names a file
// to which FIGURE lines are added, because the go command hides the output of tests that pass.
package proof

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"html"
	"iter"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
)

// defaultSeed is the seed without PROOF_SEED: all such runs do the same work.
const defaultSeed = 1

// Proof is one run of a proof of data safety.
type Proof struct {
	Name string
	Seed uint64
	// Bystanders counts checks of disks that no call names. Forged counts checks of forged files.
	Bystanders, Forged *Invariant

	t        testing.TB
	start    time.Time
	duration time.Duration
	rand     *rand.Rand
	// drawn contains the paths that Draw has printed, so that Draw prints each path only once.
	drawn sync.Map
	// said is the time of SayOften's last line, in nanoseconds since 1970.
	said atomic.Int64
}

// New starts a proof. It fails the test if an environment variable has an invalid value.
func New(t testing.TB, name string) *Proof {
	t.Helper()
	p := &Proof{Name: name, Seed: defaultSeed, t: t, start: time.Now()}
	p.Bystanders = &Invariant{name: "bystanders", proof: p}
	p.Forged = &Invariant{name: "forged-contents", proof: p}
	var err error
	if text := os.Getenv("PROOF_SEED"); text != "" {
		if p.Seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("PROOF_SEED has to be a whole number, it is %q", text)
		}
	}
	if text := os.Getenv("PROOF_DURATION"); text != "" {
		if p.duration, err = time.ParseDuration(text); err != nil || p.duration <= 0 {
			t.Fatalf("PROOF_DURATION has to be a duration such as 10m, it is %q", text)
		}
	}
	if text := os.Getenv("PROOF_SHARES"); text != "" {
		shares, err := strconv.Atoi(text)
		if err != nil || shares < 1 {
			t.Fatalf("PROOF_SHARES has to be a number of proofs, it is %q", text)
		}
		p.duration /= time.Duration(shares)
	}
	p.rand = rand.New(rand.NewPCG(p.Seed, p.Seed))
	t.Cleanup(func() {
		if t.Failed() {
			fmt.Fprintf(os.Stderr, "%s: repeat this run with PROOF_SEED=%d\n", name, p.Seed)
		}
	})
	return p
}

// Long reports whether this is the long form, which ends when Over reports true.
func (p *Proof) Long() bool { return p.duration > 0 }

// Short reports whether this is the short form.
func (p *Proof) Short() bool { return testing.Short() && !p.Long() }

// Over reports whether the time of the long form has passed. The other forms have no time limit.
func (p *Proof) Over() bool { return p.Long() && time.Since(p.start) >= p.duration }

// Rand returns the source of all random numbers of the proof. Only one goroutine may use it.
func (p *Proof) Rand() *rand.Rand { return p.rand }

// Rounds yields the seeds of the rounds. The first is Seed. In the long form Seed+1, Seed+2 and so
// on follow, until Over reports true or the test has failed.
func (p *Proof) Rounds() iter.Seq[uint64] {
	return func(yield func(uint64) bool) {
		for seed := p.Seed; yield(seed) && p.Long() && !p.Over() && !p.t.Failed(); seed++ {
		}
	}
}

// SayOften prints progress, at most once in ten seconds.
func (p *Proof) SayOften(format string, args ...any) {
	const pause = 10 * time.Second
	now := time.Now().UnixNano()
	if last := p.said.Load(); now-last > int64(pause) && p.said.CompareAndSwap(last, now) {
		p.Say(format, args...)
	}
}

// Say prints progress to standard error.
func (p *Proof) Say(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "%s: %5.1fs %s\n", p.Name, time.Since(p.start).Seconds(),
		fmt.Sprintf(format, args...))
}

// Fatal fails and ends the test if err is not nil.
func (p *Proof) Fatal(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// Error fails the test if err is not nil. The test continues.
func (p *Proof) Error(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Error(err)
	}
}

// Figure prints a FIGURE line with names and values, the seed and the duration in seconds.
func (p *Proof) Figure(pairs ...any) {
	p.t.Helper()
	p.Error(Print(Line(p.Name, append(pairs, "seed", p.Seed,
		"seconds", fmt.Sprintf("%.1f", time.Since(p.start).Seconds()))...)))
}

// OneCheck returns the value of rapid.checks for one check. With -short, rapid divides it by five.
func OneCheck() string {
	if testing.Short() {
		return "5"
	}
	return "1"
}

// SetFlags sets flags of the test binary, given as names and values, such as those of rapid.
func SetFlags(t testing.TB, pairs ...string) {
	t.Helper()
	for i := 0; i+1 < len(pairs); i += 2 {
		if err := flag.Set(pairs[i], pairs[i+1]); err != nil {
			t.Fatal(err)
		}
	}
}

// Line returns a FIGURE line with names and values.
func Line(name string, pairs ...any) string {
	line := "FIGURE " + name
	for i := 0; i+1 < len(pairs); i += 2 {
		line += fmt.Sprintf(" %v=%v", pairs[i], pairs[i+1])
	}
	return line
}

// Print prints a FIGURE line, and adds it to the file that PROOF_FIGURES names.
func Print(line string) error {
	fmt.Println(line)
	path := os.Getenv("PROOF_FIGURES")
	if path == "" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		defer f.Close()
		_, err = fmt.Fprintln(f, line)
	}
	return harness.Wrap(err, "keep a figure")
}

// pageBytes is the size of the pages in which files are compared and forged.
const pageBytes = 4096

// Invariant counts how often something that must not change was compared with its original.
type Invariant struct {
	name            string // the name in the FIGURE line
	proof           *Proof
	trials, changed atomic.Int64
}

// Checked counts a comparison with the given result, and returns this result.
func (i *Invariant) Checked(err error) error {
	i.trials.Add(1)
	if err != nil {
		i.changed.Add(1)
	}
	return err
}

// Report prints the counts. It fails the test if nothing was compared, or if something had changed.
func (i *Invariant) Report() {
	t := i.proof.t
	t.Helper()
	trials, changed := i.trials.Load(), i.changed.Load()
	i.proof.Error(Print(Line(i.name, "proof", i.proof.Name, "trials", trials, "changed", changed)))
	if trials == 0 || changed > 0 {
		t.Errorf("%s: %d comparisons, %d of them with a change", i.name, trials, changed)
	}
}

// Failure describes a trial in which the driver broke a promise.
type Failure struct {
	Name string
	// Seed is the trial's seed. 0 means the proof's seed.
	Seed   uint64
	Broken error
	// At is when the broken promise was noticed; the zero time means now.
	At time.Time
	// Omit names an operation of the rack that the page omits, because the proof itself requests it.
	Omit string
	// Repeat is the command that repeats the trial.
	Repeat string
	// Dir is the run's directory, into which Draw writes the page.
	Dir string
	// Rack may be nil.
	Rack    *harness.Rack
	Plugins []*harness.Plugin
	History *history.Recorder
}

// Draw writes the page of a failed trial. It prints the page's path, and returns it. Call Draw
// before the rack ends, because the rack keeps its requests in memory. If Draw cannot write the
// page, it prints the reason; the test still reports the broken promise.
func (p *Proof) Draw(ctx context.Context, f Failure) (path string) {
	if f.At.IsZero() {
		f.At = time.Now()
	}
	// Draw the page even if the test failed because ctx has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	events, since, dropped := f.History.Events()
	more, err := harness.Events(ctx, f.Rack, since, f.Plugins...)
	more = slices.DeleteFunc(more, func(e history.Event) bool {
		return f.Omit != "" && e.Lane == history.Rack && strings.HasPrefix(e.Name, f.Omit+" ")
	})
	path = filepath.Join(f.Dir, p.Name+fileName(f.Name)+".html")
	page := history.Page{Title: p.Name + ": " + f.Name, Seed: fmt.Sprint(cmp.Or(f.Seed, p.Seed)),
		Command: f.Repeat, Broken: f.Broken.Error(), At: f.At, Evidence: f.Dir,
		Events: append(events, more...), Dropped: dropped}
	if err := errors.Join(err, page.WriteFile(path)); err != nil {
		p.Say("the page of the failed history is incomplete: %v", err)
	}
	if _, again := p.drawn.LoadOrStore(path, true); !again {
		p.Say("the failed history is drawn in %s", path)
	}
	return path
}

func fileName(name string) string {
	var b strings.Builder
	for _, part := range strings.FieldsFunc(strings.ToLower(name), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}) {
		if b.Len()+len(part) < 120 {
			b.WriteString("-" + part)
		}
	}
	return b.String()
}

// CheckPage returns an error if the page at a path lacks the seed or one of the texts.
func (p *Proof) CheckPage(path string, texts ...string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	shown := html.UnescapeString(string(b))
	for _, text := range append(texts, fmt.Sprintf(`<dd id="seed"><code>%d</code>`, p.Seed)) {
		if !strings.Contains(shown, text) {
			err = errors.Join(err, fmt.Errorf("the page %s does not show %q", path, text))
		}
	}
	return err
}

// Guard is code of the driver that prevents damage. A mutant is a driver without one guard.
type Guard struct {
	// Name says what the guard ensures.
	Name  string
	Edits []Edit
}

// Edit changes one place of the source for a guard. Place names a declaration in a package of
// driver or internal, as "package.Function" or "package.Type.Method". Text is code that occurs once
// there, and With replaces it. In With, REMOVED is a condition that is true if the guard is
// removed, and TEXT is the old code. Unless the guard is removed, With has to do the same as Text.
type Edit struct{ Place, Text, With string }

// These are values of Edit.With for common kinds of guards.
const (
	// NotAsked is for a condition that makes the driver refuse a call. The mutant takes it as false.
	NotAsked = "(!REMOVED && (TEXT))"
	// Taken is for a condition without which the driver refuses a call. The mutant takes it as true.
	Taken = "(REMOVED || (TEXT))"
	// NotCalled is for the call of a check that returns an error. The mutant does not make the call.
	NotCalled = "unless(REMOVED, func() error { return TEXT })"
)

// RemovedGuard is the environment variable with the name of the guard that a mutant removes.
const RemovedGuard = "OXIDE_REMOVED_GUARD"

// switches is the source of a file that the mutant adds to each changed package.
const switches = `package %s

import "os"

var removedGuard = os.Getenv("` + RemovedGuard + `")

func removed(guard string) bool { return removedGuard == guard }

func unless(skip bool, ask func() error) error {
	if skip {
		return nil
	}
	return ask()
}

func zeroIf[T any](zero bool, value T) T {
	if zero {
		return *new(T)
	}
	return value
}

var _, _, _ = removed, unless, zeroIf[int]
`

// BuildMutant builds one driver that can remove each of the guards: RemovedGuard selects one when
// the driver starts. BuildMutant fails unless the source contains each guard's text exactly once.
func BuildMutant(ctx context.Context, dir string, guards []Guard) (program string, err error) {
	defer harness.Catch(&err)
	driver := harness.Got(filepath.Abs("../../driver")) // a test runs in the directory of its package
	program = filepath.Join(dir, "mutant")
	replace := map[string]string{}
	for path, text := range harness.Got(mutate(driver, guards)) {
		replace[path] = fmt.Sprintf("%s-%d.go", program, len(replace))
		harness.Must(os.WriteFile(replace[path], []byte(text), 0o600))
	}
	list := program + "-overlay.json"
	overlay := harness.Got(json.Marshal(map[string]any{"Replace": replace}))
	harness.Must(os.WriteFile(list, overlay, 0o600))
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-overlay", list, "-o", program,
		harness.Module+"/cmd/oxide-csi-plugin")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the driver with changes to its source: %w\n%s", err, out)
	}
	return program, nil
}

// CheckGuards returns an error unless the text of each edit occurs exactly once in its place.
func CheckGuards(driver string, guards []Guard) error {
	_, err := mutate(driver, guards)
	return err
}

// mutate returns the source files that the mutant changes or adds. The keys are paths.
func mutate(driver string, guards []Guard) (changed map[string]string, err error) {
	defer harness.Catch(&err)
	source := harness.Got(readSource(driver))
	changed = map[string]string{}
	for _, g := range guards {
		for _, e := range g.Edits {
			d, ok := source[e.Place]
			if !ok {
				return nil, fmt.Errorf("guard %q: the driver declares no %s; correct the list of guards",
					g.Name, e.Place)
			}
			if n := strings.Count(d.text, e.Text); n != 1 {
				return nil, fmt.Errorf("guard %q: %s has the text %q %d times, it must have it once; "+
					"correct the list of guards", g.Name, e.Place, e.Text, n)
			}
			with := strings.ReplaceAll(e.With, "REMOVED", "removed("+strconv.Quote(g.Name)+")")
			with = strings.ReplaceAll(with, "TEXT", e.Text)
			mutant := strings.Replace(d.text, e.Text, with, 1)
			text := cmp.Or(changed[d.path], d.file)
			changed[d.path] = strings.Replace(text, d.text, mutant, 1)
			d.text = mutant
			dir := filepath.Dir(d.path)
			changed[filepath.Join(dir, "proof_switches.go")] = fmt.Sprintf(switches, filepath.Base(dir))
		}
	}
	return changed, nil
}

// declaration is a function, method or variable. file is the content of the source file at path.
type declaration struct{ path, file, text string }

// declarations matches declarations in gofmt's format. A declaration ends at a closing brace at the
// end of its first line, or at the first closing brace at the start of a line.
var declarations = regexp.MustCompile(`(?ms)^func (?:\(\w+ \*?(\w+)\) )?(\w+)[(\[]` +
	`(?:[^\n]*\}$|.*?^\})|^var (\w+) = [^\n]*\{$.*?^\}`)

func readSource(driver string) (found map[string]*declaration, err error) {
	defer harness.Catch(&err)
	found = map[string]*declaration{}
	for _, path := range append(harness.Got(filepath.Glob(filepath.Join(driver, "*", "*.go"))),
		harness.Got(filepath.Glob(filepath.Join(driver, "..", "internal", "*", "*.go")))...) {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		b := harness.Got(os.ReadFile(path))
		for _, m := range declarations.FindAllStringSubmatch(string(b), -1) {
			name := strings.TrimPrefix(m[1]+"."+m[2]+m[3], ".")
			found[filepath.Base(filepath.Dir(path))+"."+name] = &declaration{path, string(b), m[0]}
		}
	}
	return found, nil
}
