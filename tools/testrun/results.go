package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// event is an event of go test -json.
type event struct {
	Action, Package, ImportPath, Test, Output string
	Elapsed                                   float64
}

// result is the result of a test, or of a package, whose name is empty.
type result struct {
	pkg, name, action string
	seconds           float64
	output            bytes.Buffer
	parent            bool
}

// results collects the events of packages.
type results struct {
	out   io.Writer
	since time.Time
	// of is the number of packages, done of which have ended and failed of which have failed.
	of, done, failed int
	// tests counts tests without subtests, and what other programs report.
	tests int
	all   []*result
	byKey map[string]*result
	// left and leaving are numbers of cases that the short form leaves out, and of their tests.
	left, leaving int
	uncompiled    string // what the compiler says
	// packages and downloads count what go build reports; said is when they were shown last.
	packages, downloads int
	said                time.Time
}

var (
	leftOut  = regexp.MustCompile(`: (\d+) cases are left to make proofs$`)
	evidence = regexp.MustCompile(` (?:kept in|drawn in|lie in) /`)
	module   = regexp.MustCompile(`^github\.com/[^/]+/[^/]+/`)
)

const enough = 8 << 10 // bytes of either end of a failed test's output that the summary shows

// ends returns the beginning, which names a panic, and the end of an output.
func ends(text []byte) []byte {
	if len(text) <= 2*enough {
		return text
	}
	return slices.Concat(text[:enough], []byte("\n...\n"), text[len(text)-enough:])
}

// event adds one event, and prints the end of a package.
func (r *results) event(line []byte) {
	var e event
	if json.Unmarshal(line, &e) != nil {
		_, _ = r.out.Write(line)
		return
	}
	if e.Action == "build-output" {
		fmt.Fprint(r.out, e.Output)
		r.uncompiled += e.Output
		return
	}
	if e.Package == "" {
		return
	}
	e.Package = module.ReplaceAllString(e.Package, "")
	t := r.result(e.Package, e.Test)
	switch e.Action {
	case "output":
		t.output.WriteString(e.Output)
		text := strings.TrimSpace(e.Output)
		if m := leftOut.FindStringSubmatch(text); m != nil {
			n, _ := strconv.Atoi(m[1])
			r.left, r.leaving = r.left+n, r.leaving+1
		}
	case "pass", "fail", "skip":
		t.action, t.seconds = e.Action, e.Elapsed
		if e.Test != "" && e.Action == "fail" && !t.parent {
			fmt.Fprintf(r.out, "FAIL %s %s\n", e.Package, e.Test)
		}
		if e.Test == "" {
			r.ended(t)
		}
	}
}

func (r *results) result(pkg, name string) *result {
	if t := r.byKey[pkg+" "+name]; t != nil {
		return t
	}
	if r.byKey == nil {
		r.byKey = map[string]*result{}
	}
	t := &result{pkg: pkg, name: name}
	r.byKey[pkg+" "+name] = t
	r.all = append(r.all, t)
	if at := strings.LastIndexByte(name, '/'); at >= 0 {
		r.result(pkg, name[:at]).parent = true
	}
	return t
}

func (r *results) ended(t *result) {
	r.done++
	word := map[string]string{"pass": "ok", "skip": "no tests"}[t.action]
	if t.action == "fail" {
		r.failed++
		word = "FAILED"
	}
	fmt.Fprintf(r.out, "[%3d of %d, %d failed, %s] %-8s %s %.1fs\n", r.done, r.of, r.failed,
		time.Since(r.since).Round(time.Second), word, t.pkg, t.seconds)
}

// summarize prints what a person wants to know at the end.
func (r *results) summarize(target string) {
	counts := map[string]int{}
	var skipped, failed []*result
	for _, t := range r.all {
		if t.name == "" && t.action != "fail" || t.parent && t.action != "fail" {
			continue
		}
		switch t.action {
		case "skip":
			if !leftOut.Match(bytes.TrimSpace(lastLine(t))) {
				skipped = append(skipped, t)
			}
		case "pass":
		default: // a test without an end was running when its package ended
			t.action = "fail"
			failed = append(failed, t)
		}
		if t.name != "" && !t.parent {
			counts[t.action]++
			r.tests++
		}
	}
	for _, t := range failed {
		fmt.Fprintf(r.out, "\nFAILED %s %s\n%s", t.pkg, t.name, ends(t.output.Bytes()))
	}
	fmt.Fprint(r.out, r.uncompiled)
	if len(r.all) > 0 {
		fmt.Fprintf(r.out, "\nmake %s: %d packages in %s: %d tests passed, %d failed, %d skipped\n",
			target, r.done, time.Since(r.since).Round(time.Second), counts["pass"], counts["fail"],
			counts["skip"])
	}
	for _, t := range skipped {
		fmt.Fprintf(r.out, "  skipped: %s %s: %s\n", t.pkg, t.name, bytes.TrimSpace(lastLine(t)))
	}
	for _, t := range r.slowest(false)[:min(5, len(r.slowest(false)))] {
		fmt.Fprintf(r.out, "  slow: %6.1fs %s %s\n", t.seconds, t.pkg, t.name)
	}
	for _, t := range failed {
		for line := range strings.Lines(t.output.String()) {
			if evidence.MatchString(line) {
				fmt.Fprintf(r.out, "  evidence: %s %s\n", t.pkg, strings.TrimSpace(line))
			}
		}
	}
	if len(failed) > 0 {
		fmt.Fprintf(r.out, "  evidence: all output is in %s\n", kept(target, "json"))
	}
	if r.left > 0 {
		fmt.Fprintf(r.out, "  left to make proofs: %d cases of %d tests\n", r.left, r.leaving)
	}
}

// lastLine returns the reason of a skip: the last line that the test has logged.
func lastLine(t *result) (line []byte) {
	for l := range bytes.Lines(t.output.Bytes()) {
		if !bytes.Contains(l, []byte("--- SKIP")) && !bytes.HasPrefix(l, []byte("=== ")) {
			line = l
		}
	}
	return line
}

// slowest returns tests without subtests, or packages, the slowest first.
func (r *results) slowest(packages bool) []*result {
	some := slices.DeleteFunc(slices.Clone(r.all), func(t *result) bool {
		return t.parent || (t.name == "") != packages
	})
	slices.SortStableFunc(some, func(a, b *result) int {
		switch {
		case a.seconds > b.seconds:
			return -1
		case a.seconds < b.seconds:
			return 1
		}
		return 0
	})
	return some
}

// printTable prints a run's packages, and their tests that took a second or more.
func printTable(out io.Writer, target string) error {
	text, err := os.ReadFile(kept(target, "json"))
	if err != nil {
		return err
	}
	r := &results{out: io.Discard}
	for line := range bytes.Lines(text) {
		r.event(line)
	}
	cpu := map[string]string{}
	if f, err := os.Open(kept(target, "cpu")); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			dir, seconds, _ := strings.Cut(lines.Text(), " ")
			cpu[dir] = seconds
		}
	}
	for _, p := range r.slowest(true) {
		used := ""
		for dir, seconds := range cpu {
			if strings.HasSuffix(dir, "/"+p.pkg) {
				used = seconds
			}
		}
		fmt.Fprintf(out, "%8.1fs %9s CPU s  %s\n", p.seconds, used, p.pkg)
		for _, t := range r.slowest(false) {
			if t.pkg == p.pkg && t.seconds >= 1 {
				fmt.Fprintf(out, "%8.1fs %25s\n", t.seconds, t.name)
			}
		}
	}
	return nil
}
