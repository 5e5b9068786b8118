package simulator

import (
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

func TestAConsolePageReloadsForAnotherSimulator(t *testing.T) {
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
