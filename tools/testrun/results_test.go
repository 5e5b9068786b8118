package main

import (
	"bytes"
	"fmt"
	"strings"
	"testing"
	"time"
)

// events are those of a run with every kind of result.
const events = `
{"ImportPath":"github.com/o/p/c","Action":"build-output","Output":"\na.go:1: undefined: x\n"}
{"Action":"run","Package":"github.com/o/p/a","Test":"TestA"}
{"Action":"output","Package":"github.com/o/p/a","Test":"TestA","Output":"    a_test.go:3: 7 cases are left to make proofs\n"}
{"Action":"pass","Package":"github.com/o/p/a","Test":"TestA/one","Elapsed":2}
{"Action":"pass","Package":"github.com/o/p/a","Test":"TestA","Elapsed":9}
{"Action":"output","Package":"github.com/o/p/a","Test":"TestB","Output":"    b_test.go:3: there is no rack\n"}
{"Action":"output","Package":"github.com/o/p/a","Test":"TestB","Output":"--- SKIP: TestB (0.00s)\n"}
{"Action":"skip","Package":"github.com/o/p/a","Test":"TestB"}
{"Action":"output","Package":"github.com/o/p/a","Test":"TestC","Output":"    c_test.go:3: 5 cases are left to make proofs\n"}
{"Action":"skip","Package":"github.com/o/p/a","Test":"TestC"}
{"Action":"pass","Package":"github.com/o/p/a","Elapsed":10}
{"Action":"output","Package":"github.com/o/p/b","Test":"TestD","Output":"    d_test.go:9: got 1, want 2\n"}
{"Action":"fail","Package":"github.com/o/p/b","Test":"TestD","Elapsed":1}
{"Action":"run","Package":"github.com/o/p/b","Test":"TestE"}
{"Action":"output","Package":"github.com/o/p/b","Output":"the logs of this failed run are kept in /tmp/x\n"}
{"Action":"fail","Package":"github.com/o/p/b","Elapsed":1.5}
`

func TestASummaryNamesFailuresSkipsSlowTestsAndWhatIsLeft(t *testing.T) {
	var out bytes.Buffer
	r := &results{out: &out, since: time.Now(), of: 2}
	for line := range strings.Lines(strings.TrimSpace(events)) {
		r.event([]byte(line))
	}
	r.summarize("test")
	for _, want := range []string{
		"[  1 of 2, 0 failed, 0s] ok       a 10.0s\n", "[  2 of 2, 1 failed, 0s] FAILED   b 1.5s\n",
		"make test: 2 packages in 0s: 1 tests passed, 2 failed, 2 skipped\n",
		"skipped: a TestB: b_test.go:3: there is no rack\n", "slow:    2.0s a TestA/one\n",
		"FAILED b TestD\n    d_test.go:9: got 1, want 2\n", "FAILED b TestE\n",
		"\na.go:1: undefined: x\n", "evidence: b the logs of this failed run are kept in /tmp/x\n",
		"left to make proofs: 12 cases of 2 tests\n",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the summary has no %q:\n%s", want, out.String())
		}
	}
	if strings.Contains(out.String(), "skipped: a TestC") || r.tests != 5 {
		t.Errorf("it counts %d tests, want 5:\n%s", r.tests, out.String())
	}
}

func TestArgumentsAreSplitIntoCommandsWhoseTestsAreCounted(t *testing.T) {
	got := commands([]string{"--", "go", "test", "./...", "--", "make", "e2e"})
	if fmt.Sprint(got) != "[[go test ./...] [make e2e]]" {
		t.Errorf("got %q", got)
	}
	r := &results{}
	for _, line := range []string{"\x1b[1mRan 30 of 38 Specs in 1 seconds\x1b[0m\n", "Ran aground\n",
		"FIGURE loop target=test warm_s=1 tests=12 cpu_s=1\n", "FIGURE other tests=9\n",
		"FIGURE sanity specs=100 passed=90\n"} {
		r.count(line)
	}
	if r.tests != 142 {
		t.Errorf("it counts %d tests, want 142", r.tests)
	}
}

func TestOnlyACommandOfGoIsOne(t *testing.T) {
	for command, want := range map[string]bool{"go test ./...": true, "env A=go go test .": true,
		"go test -v ./sanity": false,
		"make test":           false, "go build ./cmd": false} {
		if got := goes(strings.Fields(command), "test"); got != want {
			t.Errorf("goes(%q) = %v, want %v", command, got, want)
		}
	}
}
