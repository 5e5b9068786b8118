//go:build linux

package rules

import (
	"fmt"
	"math/rand/v2"
	"slices"
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

// listMutant is an error in the pages of a list. An empty order or a limit of 0 means each order or
// limit.
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

// alter changes the objects of a page. The object gone was deleted before; nil means that there is
// none.
func (m listMutant) alter(items []listed, gone *listed) ([]listed, bool) {
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

// judge reports whether a mutant changes anything that a run has read, and whether the run would
// have noticed it.
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
				items, changed = m.alter(items, gone)
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

// readLists checks the rules about lists on a rack in order, and returns what was read.
func readLists(t *testing.T, rack *harness.Rack) map[string]logged {
	t.Helper()
	r, err := Open(configOf(rack, true))
	csitest.Must(t, err)
	logs := map[string]logged{}
	r.pause = time.Millisecond
	r.readings = func(list string, readings []reading, known []listed, began time.Time) {
		logs[list] = logged{readings, known, began}
	}
	for _, rule := range All() {
		if rule.ID != "A09" && rule.ID != "A10" {
			continue
		}
		if result := r.Run(t.Context(), rule); result.Status != Passed {
			t.Fatal(result.Reason)
		}
	}
	csitest.Must(t, r.Close(t.Context()))
	return logs
}

// A simulated rack lists at once what it makes.
func init() { creation = time.Second }

func TestEveryMutantOfAListIsNoticed(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "verdict-mutants")
	rack := startRack(t, harness.RackOptions{})
	draws := 500
	if p.Short() {
		draws = 100
	}
	var logs map[string]logged
	for start, age := time.Now(), time.Duration(0); age < 2*creation; {
		age = time.Since(start) // the rack's own objects have to be older than the first reading
		logs = readLists(t, rack)
	}
	lists := []string{"disk_list", "snapshot_list", "instance_list", "image_list", "project_list",
		"instance_disk_list"}
	if len(logs) != len(lists) {
		t.Fatalf("the run has read the lists %v", logs)
	}
	drawn, noticed := 0, 0
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
	}
	p.Figure("of", "lists", "drawn", drawn, "noticed", noticed, "said_untested", 0, "missed",
		drawn-noticed)
}
