// Mutants changes a package in one small place at a time and runs the package's tests: a change
// that no test notices points at a promise that nothing keeps.
//
//	go run -C tools ./mutants -n 200 -seed 7 ../driver/controller ../driver/rack
//
// All changes of a package are compiled into one test binary, each behind a switch that the variable
// MUTANT names, so that a mutant costs no build. A first run of every test records which changes it
// reaches, and a mutant then meets those tests only.
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
	n := flag.Int("n", 100, "how many mutants of each package")
	seed := flag.Uint64("seed", 1, "what the places are drawn by")
	workers := flag.Int("workers", runtime.NumCPU(), "how many mutants at once")
	flag.Parse()
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "mutants: name the directories of packages, such as driver/volume")
		os.Exit(2)
	}
	for _, dir := range flag.Args() {
		if err := run(ctx, dir, *n, *seed, *workers); err != nil {
			fmt.Fprintf(os.Stderr, "mutants: %s: %v\n", dir, err)
			os.Exit(1)
		}
	}
}

// result is how a mutant ended.
type result struct {
	site
	caught bool
	by     string // the tests that it met, or why none
}

func run(ctx context.Context, dir string, n int, seed uint64, workers int) error {
	work, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	p, err := readPackage(dir)
	if err != nil {
		return err
	}
	sites := p.draw(n, seed)
	binary, sites, err := p.build(ctx, work, sites)
	if err != nil {
		return err
	}
	fmt.Fprintf(os.Stderr, "mutants: %s: %d mutants of %d places\n", dir, len(sites), len(p.sites))
	tests, err := p.tests(ctx, binary)
	if err != nil {
		return err
	}
	reach, baseline, err := p.record(ctx, binary, work, tests)
	if err != nil {
		return err
	}
	results := make([]result, len(sites))
	var wait sync.WaitGroup
	next := make(chan int)
	for range workers {
		wait.Go(func() {
			for i := range next {
				results[i] = p.try(ctx, binary, sites[i], reach[sites[i].id], baseline)
				if done := i + 1; done%20 == 0 {
					fmt.Fprintf(os.Stderr, "mutants: %s: %d of %d\n", dir, done, len(sites))
				}
			}
		})
	}
	for i := range sites {
		next <- i
	}
	close(next)
	wait.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	caught := 0
	for _, r := range results {
		if r.caught {
			caught++
			continue
		}
		fmt.Printf("SURVIVED %s:%d %s: %s -> %s (%s)\n", r.file, r.line, r.kind, r.before, r.after, r.by)
	}
	fmt.Printf("FIGURE mutants package=%s tried=%d caught=%d survived=%d seed=%d\n",
		filepath.Base(dir), len(results), caught, len(results)-caught, seed)
	return nil
}

// tests lists the package's tests, those of fuzz targets' seeds too.
func (p *pkg) tests(ctx context.Context, binary string) ([]string, error) {
	cmd := exec.CommandContext(ctx, binary, "-test.list", "^(Test|Fuzz)")
	cmd.Dir = p.dir
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("list the tests: %w", err)
	}
	return strings.Fields(string(out)), nil
}

// record runs each test by itself and finds which mutants it reaches.
func (p *pkg) record(ctx context.Context, binary, work string, tests []string) (
	reach map[string][]string, baseline time.Duration, err error) {
	reach = map[string][]string{}
	for i, test := range tests {
		file := filepath.Join(work, fmt.Sprintf("reached-%d", i))
		began := time.Now()
		if out, err := p.runTests(ctx, binary, []string{test}, "MUTANTS_REACHED="+file); err != nil {
			return nil, 0, fmt.Errorf("%s fails without a mutant: %w\n%s", test, err, tail(out))
		}
		baseline = max(baseline, time.Since(began))
		data, err := os.ReadFile(file)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, 0, err
		}
		for id := range strings.FieldsSeq(string(data)) {
			if !slices.Contains(reach[id], test) {
				reach[id] = append(reach[id], test)
			}
		}
	}
	return reach, baseline, nil
}

// try runs the tests that reach a mutant. One that hangs is caught.
func (p *pkg) try(ctx context.Context, binary string, s site, tests []string,
	baseline time.Duration) result {
	if len(tests) == 0 {
		return result{s, false, "no test reaches it"}
	}
	limit := time.Duration(len(tests))*4*baseline + 30*time.Second
	limited, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	_, err := p.runTests(limited, binary, tests, "MUTANT="+s.id)
	return result{s, err != nil, fmt.Sprintf("%d tests reach it", len(tests))}
}

func (p *pkg) runTests(ctx context.Context, binary string, tests []string, env string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, binary, "-test.failfast", "-test.count=1",
		"-test.run=^("+strings.Join(tests, "|")+")$")
	cmd.Dir, cmd.Env = p.dir, append(os.Environ(), env)
	cmd.WaitDelay = 5 * time.Second
	return cmd.CombinedOutput()
}

func tail(out []byte) []byte {
	const most = 2000
	return bytes.TrimSpace(out[max(0, len(out)-most):])
}
