package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/inspection"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/operate/kube"
)

var update = flag.Bool("update", false, "write testdata/reports.txt")

// inOrder matches the lines of links that are in order, and the lines that separate parts.
var inOrder = regexp.MustCompile(`(?m)^(  \w+ +(ok|idle) .*|FIGURE .*|)\n`)

// TestTheReportOfEachSituation checks that findings are complete, and compares the reports with
// testdata/reports.txt, which go test ./operate/doctor -run Report -update writes. Only the first
// reports in that file contain the lines that inOrder matches.
func TestTheReportOfEachSituation(t *testing.T) {
	var all strings.Builder
	report := func(name string, d Diagnosis) string { return "==== " + name + "\n" + text(d) + "\n" }
	all.WriteString(report("a volume that works", Diagnose(*healthy(t))))
	all.WriteString(report("a volume that works, on a node that was not asked",
		Diagnose(*healthy(t, noReport))))
	for _, s := range situations {
		d := Diagnose(*healthy(t, s.change))
		for _, c := range d.broken() {
			if f := c.Finding; f.Wrong == "" || f.Source == "" || f.ByItself == "" || f.Do == "" ||
				f.Next == "" || strings.ContainsAny(f.Next, "{}\n") {
				t.Errorf("%s: incomplete: %+v", s.name, f)
			}
		}
		all.WriteString(inOrder.ReplaceAllString(report(s.name, d), ""))
	}
	const path = "testdata/reports.txt"
	if *update {
		csitest.Must(t, os.WriteFile(path, []byte(all.String()), 0o600))
	}
	want, err := os.ReadFile(path)
	csitest.Must(t, err)
	diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(all.String(), "\n"))
	if diff != "" {
		t.Errorf("if this is meant, run the test with -update:\n%s", diff)
	}
}

// broke is a writer that returns an error.
type broke struct{}

func (broke) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestWriteReturnsTheErrorOfItsWriter(t *testing.T) {
	d := Diagnose(*healthy(t))
	for _, asJSON := range []bool{false, true} {
		var b bytes.Buffer
		if err := d.Write(&b, Options{JSON: asJSON}); err != nil || json.Valid(b.Bytes()) != asJSON {
			t.Errorf("%v: %s", err, b.String())
		}
		if err := d.Write(broke{}, Options{JSON: asJSON}); err == nil {
			t.Error("an error of the writer is lost")
		}
	}
	if err := WriteBundle(broke{}, d, *healthy(t)); err == nil {
		t.Error("an error of the bundle's writer is lost")
	}
	if err := d.WriteHTML(broke{}); err == nil {
		t.Error("an error of the page's writer is lost")
	}
}

// FuzzDiagnose gives any objects and any report of a node to a diagnosis. It has to end with a
// result whose size is bounded by theirs, and every finding has to be complete.
func FuzzDiagnose(f *testing.F) {
	f.Fuzz(func(t *testing.T, objects, report string) {
		e := healthy(t)
		if found, err := kube.Parse([]byte(objects)); err == nil {
			e.Cluster.Objects = found
		}
		if r, err := inspection.Parse([]byte(report)); err == nil {
			e.Nodes.Reports[racktest.Instance] = r
		}
		for _, q := range []Question{{AskClaim, "default", "data"}, {AskPod, "default", "db-0"},
			{Kind: AskVolume, Name: racktest.Disk}, {Kind: AskNode, Name: "worker-1"}} {
			e.Question = q
			g := &gatherer{options: Options{Question: q}, e: *e}
			g.sift()
			g.prune()
			d := Diagnose(g.e)
			// A step has at most a few texts of a thousand bytes for each of the objects.
			if got, most := len(text(d)), 256<<10+64*(len(objects)+len(report)); got > most {
				t.Errorf("%d bytes from %d", got, len(objects)+len(report))
			}
			for _, c := range d.Chains {
				if f := c.Finding; f != nil && (f.Wrong == "" || f.Do == "" || f.Next == "") {
					t.Errorf("incomplete: %+v", f)
				}
			}
		}
	})
}

// TestTheCommandOfEveryReasonOnlyReadsAndIsComplete uses a chain in which every name is known, so
// no placeholder may become a word in capitals.
func TestTheCommandOfEveryReasonOnlyReadsAndIsComplete(t *testing.T) {
	reads := regexp.MustCompile(`^(kubectl (get|describe|logs|exec|debug) |oxide (disk|instance) ` +
		`(view|disk list) |oxide-csi-plugin (doctor|audit) )`)
	unknown := regexp.MustCompile(`[{}]|\b[A-Z]{2,}\b|--delete`)
	c := resolve(healthy(t))[0]
	for reason, a := range advices {
		command := c.commandAt("", a.Next)
		if !reads.MatchString(command) || unknown.MatchString(command) || a.ByItself == "" ||
			a.Link != "" && at(a.Link) < 0 || !slices.Contains(csierr.Reasons(), reason) {
			t.Errorf("%s: %+v: %s", reason, a, command)
		}
	}
	if len(advices) != len(csierr.Reasons()) {
		t.Errorf("%d of %d reasons have an advice", len(advices), len(csierr.Reasons()))
	}
}
