package simulator

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// recordFlights lets the rack's console follow a flight record, and returns a function that appends
// a line to it. The record does not exist before the first line.
func recordFlights(t *testing.T, s *Server) (write func(line string)) {
	dir := filepath.Join(t.TempDir(), "flight")
	s.Flights.Dirs = []string{dir}
	return func(line string) {
		t.Helper()
		simtest.NoError(t, os.MkdirAll(dir, 0o700))
		f := must[*os.File](t)(os.OpenFile(filepath.Join(dir, "x.jsonl"),
			os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))
		must[int](t)(f.WriteString(line))
		simtest.NoError(t, f.Close())
	}
}

// flightLine is a line of a driver's flight record, as of now.
func flightLine(event, outcome, volume, instance, more string) string {
	return fmt.Sprintf(`{"time":%q,"event":%q,"outcome":%q,"volume":%q,"instance":%q%s}`+"\n",
		time.Now().UTC().Format(time.RFC3339Nano), event, outcome, volume, instance, more)
}

func TestThePagesFollowAFlightRecord(t *testing.T) {
	r := serveRack(t, engine.Config{})
	write := recordFlights(t, r.Server)
	admin := serveAdmin(t, r.Server)
	disk, other := r.disk("d"), r.disk("other")
	get := func(ctx context.Context, path string) *bufio.Scanner {
		t.Helper()
		req := must[*http.Request](t)(http.NewRequestWithContext(ctx, http.MethodGet, admin+path, nil))
		req.Header.Set("Accept", "text/html")
		resp, err := http.DefaultClient.Do(req)
		simtest.NoError(t, err)
		t.Cleanup(func() { _ = resp.Body.Close() })
		return bufio.NewScanner(resp.Body)
	}
	page := func(path string) (text string) {
		for lines := get(t.Context(), path); lines.Scan(); {
			text += lines.Text() + "\n"
		}
		return text
	}
	// The pages that are open before anything is recorded: of the rack, of one disk, and of the
	// rack's requests and entries that are about the other disk.
	ctx, closePages := context.WithTimeout(t.Context(), time.Minute)
	defer closePages()
	var open []*bufio.Scanner
	for _, path := range []string{"/", "/console/disks/" + disk.Id, "/?disk=other"} {
		_, address, _ := strings.Cut(page(path), `data-events="`)
		address, _, _ = strings.Cut(address, `"`)
		open = append(open, get(ctx, strings.ReplaceAll(address, "&amp;", "&")))
	}
	shown := make([]string, len(open))
	for _, step := range []struct {
		event, line string
		pages       []int
	}{
		{"Formatted", flightLine("Formatted", "done", disk.Id, r.instance("b").Id,
			`,"filesystem":"xfs","path":"/<script>\u001b\u202e"`), []int{0, 1}},
		{"Mounted", flightLine("Mounted", "failed", other.Id, r.instance("a").Id,
			`,"reason":"Broken"`), []int{0, 2}},
	} {
		write(step.line)
		for _, n := range step.pages {
			for !strings.Contains(shown[n], ">"+step.event+"<") && open[n].Scan() {
				shown[n] += open[n].Text()
			}
			if !strings.Contains(shown[n], ">"+step.event+"<") {
				t.Errorf("page %d does not show %s: %s", n, step.event, shown[n])
			}
		}
	}
	if strings.Contains(shown[1], "Mounted") || strings.Contains(shown[2], "Formatted") {
		t.Errorf("the pages of one disk show the other's entry, too: %q", shown[1:])
	}
	for path, want := range map[string]string{"/?disk=d": "Formatted", "/?disk=other": "Mounted",
		"/console/disks/" + disk.Id: "Formatted", "/console/disks/" + other.Id: "Mounted"} {
		text := page(path)
		for _, event := range []string{"Formatted", "Mounted"} {
			if strings.Contains(text, ">"+event+"<") != (event == want) {
				t.Errorf("GET %s does not show %s alone: %s", path, want, text)
			}
		}
	}
	text := page("/")
	for _, want := range []string{`<td>b<td><span title="/&lt;script&gt;\u001b\u202e">` +
		`Formatted</span> <span class="quiet">xfs</span><td><a href="/console/disks/` + disk.Id +
		`">d</a><td>done`,
		`" class="bad"><td>`, `<td>failed <b>Broken</b>`} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not have %q: %s", want, text)
		}
	}
	simtest.NoError(t, r.Reset(t.Context()))
	if text := page("/"); strings.Contains(text, "Formatted") {
		t.Errorf("after a reset the page shows %s", text)
	}
}

func TestAPageOfTheConsoleStaysWithItsSimulator(t *testing.T) {
	r := serveRack(t, engine.Config{})
	admin := serveAdmin(t, r.Server)
	// get returns a function that reads the answer to its end.
	get := func(path string) func() string {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, admin+path, nil)
		simtest.NoError(t, err)
		req.Header.Set("Accept", "text/html")
		resp, err := http.DefaultClient.Do(req)
		simtest.NoError(t, err)
		t.Cleanup(func() { resp.Body.Close() })
		return func() string { return string(must[[]byte](t)(io.ReadAll(resp.Body))) }
	}
	if got := get("/console/events?at=earlier.1.1")(); !strings.Contains(got, "event: restart") {
		t.Errorf("a page of an earlier simulator gets %q, want to be loaded again", got)
	}
	_, address, _ := strings.Cut(get("/")(), `data-events="`)
	address, _, _ = strings.Cut(address, `"`)
	stream := get(strings.ReplaceAll(address, "&amp;", "&"))
	simtest.NoError(t, r.Close())
	if got := stream(); !strings.HasPrefix(got, ":") {
		t.Errorf("a page that was open gets %q until the rack is closed", got)
	}
}
