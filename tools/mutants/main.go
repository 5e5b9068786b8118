// Mutants changes a package in one small place at a time and runs the package's tests. If no test
// fails with a change, then no test checks that behavior.
//
//	go run -C tools ./mutants -n 200 -seed 7 ../driver/controller ../internal/rack
//	go run -C tools ./mutants -n 200 -tests ../driver/node -budget 30s ../driver/mount
//
// The test binaries contain all changes. The environment variable MUTANT selects one, so a mutant
// needs no build. A first run of every test records which changes it reaches. For each mutant, only
// the tests that reach it run, the fastest first, until one fails or the budget is spent.
package main

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	n := flag.Int("n", 100, "number of mutants of each package")
	seed := flag.Uint64("seed", 1, "seed for the choice of the places")
	tests := flag.String("tests", "", "comma-separated directories of other packages to test")
	budget := flag.Duration("budget", time.Hour, "time limit for all tests of one mutant together")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "mutants: name the directories of packages, such as internal/volume")
		os.Exit(2)
	}
	o := options{*n, *seed, *budget, flag.Args()}
	if *tests != "" {
		o.tests = append(o.tests, strings.Split(*tests, ",")...)
	}
	if err := run(ctx, flag.Args(), o); err != nil {
		fmt.Fprintf(os.Stderr, "mutants: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	n      int
	seed   uint64
	budget time.Duration
	tests  []string // directories of packages
}

// test is a test of a package, in a binary that has all mutants.
type test struct {
	binary, dir, name string
	took              time.Duration
}

// result describes how a mutant ended.
type result struct {
	site
	caught bool
	by     string // the tests that ran with it, or why none did
}

// run measures packages and prints the results.
func run(ctx context.Context, dirs []string, o options) error {
	results, err := measure(ctx, dirs, o)
	if err != nil {
		return err
	}
	var names []string
	tried, caught := map[string]int{}, map[string]int{}
	for _, r := range results {
		name := filepath.Base(r.pkg.dir)
		if tried[name]++; tried[name] == 1 {
			names = append(names, name)
		}
		if r.caught {
			caught[name]++
			continue
		}
		fmt.Printf("SURVIVED %s/%s:%d %s: %s -> %s (%s)\n", name, r.file, r.line, r.kind, r.before,
			r.after, r.by)
	}
	for _, name := range names {
		fmt.Printf("FIGURE mutants package=%s tried=%d caught=%d survived=%d seed=%d\n", name,
			tried[name], caught[name], tried[name]-caught[name], o.seed)
	}
	return nil
}

// measure tries mutants of the packages in dirs.
func measure(ctx context.Context, dirs []string, o options) ([]result, error) {
	work, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(work) }()
	var packages []*pkg
	var sites []site
	for _, dir := range dirs {
		p, err := readPackage(dir)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", dir, err)
		}
		packages, sites = append(packages, p), append(sites, p.draw(o.n, o.seed)...)
	}
	binaries, sites, err := buildTests(ctx, work, packages, o.tests, sites)
	if err != nil {
		return nil, err
	}
	fmt.Fprintf(os.Stderr, "mutants: %d, in %d packages\n", len(sites), len(packages))
	reach := map[string][]test{}
	for _, b := range binaries {
		if err := record(ctx, b, work, reach); err != nil {
			return nil, err
		}
	}
	results := make([]result, len(sites))
	var wait sync.WaitGroup
	next := make(chan int)
	for range runtime.NumCPU() {
		wait.Go(func() {
			for i := range next {
				results[i] = try(ctx, sites[i], reach[sites[i].id], o.budget)
				if done := i + 1; done%20 == 0 {
					fmt.Fprintf(os.Stderr, "mutants: %d of %d\n", done, len(sites))
				}
			}
		})
	}
	for i := range sites {
		next <- i
	}
	close(next)
	wait.Wait()
	return results, ctx.Err()
}

// record runs each test and the seeds of each fuzz target alone, and adds the test to the mutants
// that it reaches.
func record(ctx context.Context, b test, work string, reach map[string][]test) error {
	cmd := exec.CommandContext(ctx, b.binary, "-test.list", "^(Test|Fuzz)")
	cmd.Dir = b.dir
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("list the tests: %w", err)
	}
	for _, name := range strings.Fields(string(out)) {
		b.name = name
		file := filepath.Join(work, "reached")
		began := time.Now()
		if out, err := b.run(ctx, "MUTANTS_REACHED="+file); err != nil {
			return fmt.Errorf("%s fails without a mutant: %w\n%s", name, err, tail(out))
		}
		b.took = time.Since(began)
		data, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		_ = os.Remove(file)
		for id := range strings.FieldsSeq(string(data)) {
			if !slices.Contains(reach[id], b) {
				reach[id] = append(reach[id], b)
			}
		}
	}
	return nil
}

// try runs the tests that reach a mutant until one fails. A test that hangs counts as failed.
func try(ctx context.Context, s site, tests []test, budget time.Duration) result {
	tests = slices.Clone(tests)
	slices.SortStableFunc(tests, func(a, b test) int { return int(a.took - b.took) })
	spent := time.Duration(0)
	for i, t := range tests {
		if spent += t.took; i > 0 && spent > budget {
			return result{s, false, fmt.Sprintf("%d of the %d tests that reach it", i, len(tests))}
		}
		limited, cancel := context.WithTimeout(ctx, 4*t.took+30*time.Second)
		_, err := t.run(limited, "MUTANT="+s.id)
		cancel()
		if err != nil {
			return result{s, true, t.name}
		}
	}
	if len(tests) == 0 {
		return result{s, false, "no test reaches it"}
	}
	return result{s, false, fmt.Sprintf("all %d tests that reach it", len(tests))}
}

func (t test) run(ctx context.Context, env string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, t.binary, "-test.failfast", "-test.count=1",
		"-test.run=^"+t.name+"$")
	// RAPID_NOFAILFILE keeps a failing property from writing a file into the tree.
	cmd.Dir, cmd.Env = t.dir, append(os.Environ(), env, "RAPID_NOFAILFILE=1")
	cmd.WaitDelay = 5 * time.Second
	return cmd.CombinedOutput()
}

func tail(out []byte) []byte {
	const most = 2000
	return bytes.TrimSpace(out[max(0, len(out)-most):])
}
