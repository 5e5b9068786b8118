package doctor

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

var update = flag.Bool("update", false, "write testdata/reports.txt")

// inOrder matches the lines of links with which nothing is wrong, and those that separate others.
var inOrder = regexp.MustCompile(`(?m)^(  \w+ +(ok|idle) .*|FIGURE .*|)\n`)

// TestTheReportOfEachSituation checks which link is found, and compares what people read with
// testdata/reports.txt, which go test ./operate/doctor -run Report -update writes. Links in order,
// and the lines that separate parts, are only in the first reports.
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

// broke is a place where nothing can be written.
type broke struct{}

func (broke) Write([]byte) (int, error) { return 0, errors.New("no space left") }

func TestAReportIsTextOrJSONAndAnErrorOfItsWriterIsOne(t *testing.T) {
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
