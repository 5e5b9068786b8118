//go:build linux

package rules

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// logged is what a run has read of a list.
type logged struct {
	readings []reading
	known    []listed
	began    time.Time
}

// listMutant is what a rack does wrong with the pages of a list. An empty order or a limit of 0
// means each.
type listMutant struct {
	list, order string
	limit       int
	// page is the number of the page, or -1 for each page. at is the object on it; -1 is the last.
	page, at int
	change   string
}

var listChanges = []string{"dropped", "doubled", "swapped", "deleted"}

func (m listMutant) String() string {
	return fmt.Sprintf("%s, order %q, pages of %d, page %d, object %d: %s", m.list, m.order, m.limit,
		m.page, m.at, m.change)
}

// strikes reports whether a page is changed.
func (m listMutant) strikes(order string, limit, page int) bool {
	return (m.order == "" || m.order == order) && (m.limit == 0 || m.limit == limit) &&
		(m.page < 0 || m.page == page)
}

// alter changes the objects of a page. gone is an object that was deleted before, if there is one.
func alter[T any](m listMutant, items []T, gone *T) ([]T, bool) {
	at := m.at
	if at < 0 {
		at += len(items)
	}
	switch {
	case at < 0 || at >= len(items):
	case m.change == "dropped":
		return slices.Delete(slices.Clone(items), at, at+1), true
	case m.change == "doubled":
		return slices.Insert(slices.Clone(items), at, items[at]), true
	case m.change == "swapped" && at > 0:
		items = slices.Clone(items)
		items[at-1], items[at] = items[at], items[at-1]
		return items, true
	case m.change == "deleted" && gone != nil:
		return slices.Insert(slices.Clone(items), at, *gone), true
	}
	return items, false
}

// judge reports whether a mutant changes anything that the run has read, and whether the run
// would have noticed it.
func (m listMutant) judge(log logged) (changes, noticed bool) {
	objects, there := map[string]listed{}, map[string]bool{}
	for _, r := range log.readings {
		clear(there)
		for _, item := range slices.Concat(r.pages...) {
			objects[item.ID], there[item.ID] = item, true
		}
	}
	var altered []reading
	for _, r := range log.readings {
		var gone *listed
		for _, id := range r.gone {
			if item, is := objects[id]; is {
				gone = &item
			}
		}
		var pages [][]listed
		for n, items := range r.pages {
			changed := false
			if m.strikes(r.order, r.limit, n) {
				items, changed = alter(m, items, gone)
			}
			changes = changes || changed
			if pages = append(pages, items); len(items) == 0 {
				break // the run reads on only behind a page that is not empty
			}
		}
		r.pages = pages
		altered = append(altered, r)
	}
	wrong := judgeReadings(altered, log.known, log.began, func(id string) bool { return there[id] })
	return changes, len(wrong) > 0
}

// drawList draws a mutant from what a run has read.
func drawList(random *rand.Rand, logs map[string]logged, lists []string) listMutant {
	m := listMutant{list: lists[random.IntN(len(lists))],
		change: listChanges[random.IntN(len(listChanges))], page: -1, at: -1}
	readings := logs[m.list].readings
	r := readings[random.IntN(len(readings))]
	page := random.IntN(len(r.pages))
	if random.IntN(2) == 0 {
		m.order = r.order
	}
	if random.IntN(2) == 0 {
		m.limit = r.limit
	}
	if random.IntN(2) == 0 {
		m.page = page
	}
	if n := len(r.pages[page]); n > 0 && random.IntN(2) == 0 {
		m.at = random.IntN(n)
	}
	return m
}

// mutating is a transport that does what a mutant does.
type mutating struct {
	next http.RoundTripper
	m    listMutant
	// page is the number of the list's next page. items are the objects that were seen, and gone is
	// one that was deleted.
	page    int
	items   map[string]any
	gone    *any
	changes int
}

func (t *mutating) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := t.next.RoundTrip(req)
	if err == nil && req.Method == http.MethodDelete && t.items[path.Base(PathOf(req))] != nil {
		gone := t.items[path.Base(PathOf(req))]
		t.gone = &gone
	}
	query := req.URL.Query()
	if err != nil || resp.StatusCode != http.StatusOK || !query.Has("limit") ||
		OperationOf(req.Method, PathOf(req)) != t.m.list {
		return resp, err
	}
	body, err := take(resp)
	if err != nil {
		return nil, err
	}
	order, limit := query.Get("sort_by"), query.Get("limit")
	t.page++
	if order != "" {
		t.page = 0
	} else if token, err := base64.URLEncoding.DecodeString(query.Get("page_token")); err == nil {
		for known := range orders {
			if strings.Contains(string(token), known) {
				order = known
			}
		}
	}
	var page map[string]any
	if err := json.Unmarshal(body, &page); err != nil {
		return nil, err
	}
	items, _ := page["items"].([]any)
	for _, item := range items {
		t.items[item.(map[string]any)["id"].(string)] = item
	}
	if n, _ := strconv.Atoi(limit); order != "" && t.m.strikes(order, n, t.page) {
		altered, changed := alter(t.m, items, t.gone)
		if page["items"] = altered; changed {
			t.changes++
		}
	}
	body, err = json.Marshal(page)
	resp.Body, resp.ContentLength = io.NopCloser(bytes.NewReader(body)), int64(len(body))
	resp.Header.Del("Content-Length")
	return resp, err
}

// runLists checks the rules about lists, and returns what was read and whether a rule failed.
func runLists(t *testing.T, rack *harness.Rack, through func(http.RoundTripper) http.RoundTripper,
) (logs map[string]logged, failed string) {
	t.Helper()
	config := configOf(rack, true)
	config.Through = through
	r, err := Open(config)
	csitest.Must(t, err)
	logs = map[string]logged{}
	r.pause = time.Millisecond
	r.readings = func(list string, readings []reading, known []listed, began time.Time) {
		logs[list] = logged{readings, known, began}
	}
	for _, rule := range All() {
		if rule.ID != "A09" && rule.ID != "A10" {
			continue
		}
		if result := r.Run(t.Context(), rule); result.Status != Passed {
			failed += "\n" + result.Reason
		}
	}
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
	return logs, failed
}

// A simulated rack lists at once what it makes.
func init() { creation = time.Second }

func TestNoMutantOfAListIsPassedOver(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "verdict-mutants")
	rack := startRack(t, harness.RackOptions{})
	draws, really := 500, 40
	if p.Short() {
		draws, really = 100, 3
	}
	var logs map[string]logged
	for start, age := time.Now(), time.Duration(0); age < 2*creation; {
		age = time.Since(start) // the rack's own objects have to be older than the first reading
		var failed string
		if logs, failed = runLists(t, rack, nil); failed != "" {
			t.Fatal(failed)
		}
	}
	lists := []string{"disk_list", "snapshot_list", "instance_list", "image_list", "project_list",
		"instance_disk_list"}
	if len(logs) != len(lists) {
		t.Fatalf("the run has read the lists %v", logs)
	}
	drawn, noticed, real := 0, 0, 0
	for drawn < draws && !p.Over() {
		m := drawList(p.Rand(), logs, lists)
		changes, notices := m.judge(logs[m.list])
		if !changes {
			continue
		}
		drawn++
		if notices {
			noticed++
		} else {
			t.Errorf("a run would not notice: %s", m)
		}
		if drawn%max(draws/really, 1) != 0 {
			continue
		}
		transport := &mutating{m: m, items: map[string]any{}}
		_, failed := runLists(t, rack, func(next http.RoundTripper) http.RoundTripper {
			transport.next = next
			return transport
		})
		words := strings.Split(m.list, "_") // a check names the list, or the object that it looked for
		about := strings.Contains(failed, m.list) || strings.Contains(failed, words[len(words)-2])
		if real++; about != notices || transport.changes == 0 {
			t.Errorf("%s: it was judged to be noticed: %t; %d pages were changed, and the run found %q", m,
				notices, transport.changes, failed)
		}
	}
	p.Figure("of", "lists", "drawn", drawn, "noticed", noticed, "said_untested", 0, "missed",
		drawn-noticed, "really_run", real)
}
