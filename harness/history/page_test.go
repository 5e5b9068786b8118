package history

import (
	"encoding/xml"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func example() Page {
	start := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }
	return Page{Title: "a history", Seed: "4711", Command: "PROOF_SEED=4711 make model",
		Broken: "bytes were lost\nwant 1, got 0", At: at(55), Evidence: "/tmp/run",
		Events: []Event{
			{Lane: Disk, Name: "Formatted", Start: at(25), End: at(30)},
			{Lane: Orchestrator, Name: "stage <script>alert(1)</script>", Start: at(10), End: at(50)},
			{Lane: "driver 1", Name: "NodeStage \x1b[31m\u202eevil", Start: at(11), End: at(49),
				Outcome: "Internal: no", Failed: true},
			{Lane: "driver 1", Name: "NodeGetVolumeStats", Start: at(12), End: at(13), Outcome: "OK"},
			{Lane: "driver 1", Name: "NodePublish", Start: at(14), End: at(20)},
			{Lane: Rack, Name: "killed", Start: at(52), End: at(52), Mark: true},
			{Lane: Rack, Name: "disk_view", Start: at(60)},
		}}
}

func TestPageShowsEachEventAndTheBrokenPromise(t *testing.T) {
	var b strings.Builder
	if err := example().Write(&b); err != nil {
		t.Fatal(err)
	}
	source := b.String()
	if err := xml.Unmarshal([]byte(source), new(struct{})); err != nil {
		t.Errorf("the page is not well-formed: %v\n%s", err, source)
	}
	for _, never := range []string{"<script", "\x1b", "\u202e", "http://", "src=", "@import"} {
		if strings.Contains(source, never) {
			t.Errorf("the page contains %q", never)
		}
	}
	for _, want := range []string{`id="seed"><code>4711<`, `id="command"><code>PROOF_SEED=4711 make `,
		"id=\"promise\">bytes were lost\nwant 1, got 0<", ">bytes were lost</span>",
		`id="broken" title="bytes were lost`, "Internal: no", `class="lane" style="grid-area:1/4/10/7"`,
		`style="grid-area:3/4/7"></i>`, `style="grid-area:3/6">`} {
		if !strings.Contains(source, want) {
			t.Errorf("the page does not contain %q", want)
		}
	}
	titles := func(element string) (all []string) {
		title := regexp.MustCompile(element + ` title="([^"\n]*)`)
		for _, m := range title.FindAllStringSubmatch(source, -1) {
			all = append(all, m[1])
		}
		return all
	}
	rows := []string{"orchestrator: stage &lt;script&gt;alert(1)&lt;/script&gt;",
		"driver 1: NodeStage �[31m�evil", "driver 1: NodeGetVolumeStats", "driver 1: NodePublish",
		"disk: Formatted", "rack: killed", "bytes were lost", "rack: disk_view"}
	if diff := cmp.Diff(rows, titles(`class="row [^>]*`)); diff != "" {
		t.Errorf("rows (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(slices.Delete(rows, 6, 7), titles(`<i class="\w+"`)); diff != "" {
		t.Errorf("bars (-want +got):\n%s", diff)
	}
	// The calls NodeGetVolumeStats and then NodePublish run beside NodeStage, so they share a second
	// column. The bar of a call ends at the first row that begins after the answer.
	var areas []string
	for _, m := range regexp.MustCompile(`<i [^>]*grid-area:(\d[^"]*)`).
		FindAllStringSubmatch(source, -1) {
		areas = append(areas, m[1])
	}
	const want = "2/2/7 3/4/7 4/5/5 5/5/6 6/9/7 7/7/8 9/7/10"
	if got := strings.Join(areas, " "); got != want {
		t.Errorf("the bars are at %s, want %s", got, want)
	}
}

func TestRecorderListsUnansweredCallsAndCountsDroppedEvents(t *testing.T) {
	var r Recorder
	r.Mark(Rack, "of an earlier history")
	r.Begin()
	r.Call(Orchestrator, "open")
	r.Call(Orchestrator, "answered")("no", true)
	events, since, _ := r.Events()
	if len(events) != 2 || !events[0].End.IsZero() || events[1].End.IsZero() || !events[1].Failed ||
		since.IsZero() {
		t.Fatalf("the events are %+v since %s", events, since)
	}
	for range limit {
		r.Mark(Rack, "x")
	}
	if events, _, dropped := r.Events(); len(events) > limit || dropped+len(events) != limit+2 {
		t.Errorf("%d events and %d dropped, want %d together", len(events), dropped, limit+2)
	}
}
