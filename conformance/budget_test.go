//go:build linux

package conformance

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// answering is a transport that answers every request.
type answering func(*http.Request) (status int, body string)

// RoundTrip answers a request.
func (a answering) RoundTrip(req *http.Request) (*http.Response, error) {
	status, body := a(req)
	return &http.Response{StatusCode: status, Body: io.NopCloser(strings.NewReader(body))}, nil
}

// send sends a request through the budget, and reports whether it was sent on.
func (b budgeted) send(t *testing.T, method, path, body string) bool {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, "https://rack/v1/"+path,
		strings.NewReader(body))
	csitest.Must(t, err)
	answer, err := b.RoundTrip(req)
	if err != nil && !errors.Is(err, rules.ErrNotSent) {
		t.Fatal(err)
	}
	if err == nil {
		_ = answer.Body.Close()
	}
	return err == nil
}

func TestTheDisksOfAnInstanceCountAgainstTheBudget(t *testing.T) {
	for limit, want := range map[amount]bool{{3, 4}: true, {2, 4}: false, {3, 3}: false} {
		b := budgeted{budget: newBudget(limit), next: answering(
			func(*http.Request) (int, string) { return http.StatusCreated, "" })}
		sent := b.send(t, http.MethodPost, "instances?project=p", `{"name":"i","size":1,
			"boot_disk":{"type":"create","name":"b","size":2147483648},"disks":[
			{"type":"create","name":"c","size":1073741824},{"type":"attach","name":"d"},
			{"type":"create","name":"e","size":1073741824}]}`) // without a run no mark is demanded
		if now, _ := b.budget.held(); sent != want || sent && now != limit {
			t.Errorf("%s: sent: %v, the budget has %s", limit, sent, now)
		}
		b.budget.deleted("b")
		if now, _ := b.budget.held(); sent && now != (amount{2, 2}) {
			t.Errorf("without the boot disk the budget has %s", now)
		}
	}
}

func TestADeletedObjectLeavesTheBudget(t *testing.T) {
	const id = "9a1c43ee-2c7c-4a4b-8d4d-6f6f1c3d2b10"
	for name, test := range map[string]struct {
		path   string
		status int
		// created is the answer to the creation. early means that the deletion ends before it.
		created int
		early   bool
		left    int
	}{
		"by its ID":                      {id, 204, 201, false, 0},
		"by its name":                    {"made", 204, 201, false, 0},
		"again, after a lost answer":     {id, 404, 201, false, 0},
		"by its ID, before the answer":   {id, 204, 201, true, 0},
		"by its name, before the answer": {"made", 204, 201, true, 0},
		"never made":                     {"other", 404, 400, false, 0},
		"another one":                    {"other", 204, 201, false, 1},
		"refused":                        {id, 400, 201, false, 1},
		"a busy rack's":                  {id, 503, 201, false, 1},
	} {
		b := budgeted{budget: newBudget(amount{1, 1})}
		b.next = answering(func(req *http.Request) (int, string) {
			if req.Method == http.MethodDelete {
				return test.status, ""
			}
			if test.early {
				b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
			}
			return test.created, `{"id":"` + id + `"}`
		})
		b.send(t, http.MethodPost, "snapshots", `{"name":"made"}`)
		if !test.early {
			b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
		}
		if now, _ := b.budget.held(); now.objects != test.left {
			t.Errorf("%s: the budget has %s, not %d objects", name, now, test.left)
		}
	}
}

func TestNothingIsCreatedWithoutTheMarkOfTheRun(t *testing.T) {
	const ours, others = "1a2b3c4d", "5e6f7a8b"
	text := func(run string) string { return fmt.Sprintf("%q", mark{Run: run}.description()) }
	for path, test := range map[string]string{
		"disks":     `{"name":"d","description":%s,"size":-1}`,
		"snapshots": `{"name":"d","description":%s}`,
		"images":    `{"name":"d","description":%s,"os":1} and more`,
		"instances": `{"name":"d","description":%s,"disks":[{"type":"create","name":"x",` +
			`"description":` + text(ours) + `}]}`,
		"instances?with=disk": `{"name":"d","description":` + text(ours) + `,"disks":[{"type":"create",` +
			`"name":"x","description":%s}]}`,
	} {
		for description, want := range map[string]bool{text(ours): true, text(others): false,
			`"made by hand"`: false, `null`: false,
			strings.Replace(text(ours), "}", `,\"pad\":\"ééé\"}`, 1): true,
			strings.Replace(text(ours), "}", "}ééé", 1):              false} {
			b := budgeted{budget: newBudget(amount{9, 9}), run: ours, next: answering(
				func(*http.Request) (int, string) { return http.StatusBadRequest, "" })}
			sent := b.send(t, http.MethodPost, path, fmt.Sprintf(test, description))
			if sent != want {
				t.Errorf("%s with the description %s: sent: %t", path, description, sent)
			}
		}
	}
}

func TestMarkedNamesStayWithinTheLimitAndDistinct(t *testing.T) {
	long := strings.Repeat("n", maxNameLength)
	one, other := markedName("mark", long), markedName("mark", long[1:]+"o")
	if markedName("mark", "") != "" || markedName("mark", "sanity") != "mark-sanity" ||
		len(one) != maxNameLength || len(other) != maxNameLength || one == other {
		t.Errorf("the names are %q, %q, %q and %q", markedName("mark", ""), markedName("mark", "sanity"),
			one, other)
	}
}
