package report

import (
	"strings"
	"testing"
)

func TestAVerdictSaysHowFarItLooked(t *testing.T) {
	r := example()
	r.Results[0].Extent.Look(Measure{What: "a blank disk of 17 GiB", Looked: 3 << 30, Of: 17 << 30,
		Unit: "bytes", Words: "as far as 20 s allow"})
	const partly = "a blank disk of 17 GiB: 3 GiB of 17 GiB (as far as 20 s allow)"
	if got := r.Results[0].Kept(); got != "kept, as far as "+partly {
		t.Errorf("got %q", got)
	}
	const promises = "53 promises kept, 1 of them as far as the test looked (A01); " +
		"3 broken (A08, A21, D02); 5 not tested (A15, A16, A24, D06, D10)"
	if got := r.Promises(); got != promises {
		t.Errorf("got  %s\nwant %s", got, promises)
	}
	page := string(must(renderPage(r.scrub(nil)))(t))
	text := string(must(junit(r))(t))
	for _, want := range []string{promises, "kept, as far as " + partly, "disk_create: 2 kinds of"} {
		if !strings.Contains(page, want) {
			t.Errorf("the page lacks %q", want)
		}
	}
	if !strings.Contains(text, partly) {
		t.Errorf("the JUnit report lacks %q", partly)
	}
}

func TestAnExtentCountsEachKindOfAnswerOnce(t *testing.T) {
	var e Extent
	for _, kind := range []string{"201", "400 InvalidRequest", "201"} {
		e.Answer("disk_create", kind)
	}
	e.Look(Measure{What: "disks", Looked: 2, Of: 3, Unit: "objects"})
	e.Look(Measure{What: "disks", Looked: 3, Of: 3, Unit: "objects"})
	e.Look(Measure{What: "an image", Of: 1, Unit: "names", Words: "needs 1 GiB more"})
	got := ""
	for _, m := range e {
		got += m.String() + "\n"
	}
	if want := "disk_create: 2 kinds of answers (201; 400 InvalidRequest)\ndisks: 5 of 6 objects\n" +
		"an image: not tested (needs 1 GiB more)\n"; got != want || len(e.Partly()) != 2 {
		t.Errorf("got %s, of which %d partly", got, len(e.Partly()))
	}
}
