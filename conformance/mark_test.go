//go:build linux

package conformance

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestMarkedNamesStayWithinTheLimitAndDistinct(t *testing.T) {
	long := strings.Repeat("n", maxNameLength)
	one, other := markedName("mark", long), markedName("mark", long[1:]+"o")
	switch {
	case markedName("mark", "") != "":
		t.Error("an empty name must stay empty")
	case markedName("mark", "sanity") != "mark-sanity":
		t.Errorf("markedName = %q", markedName("mark", "sanity"))
	case len(one) != maxNameLength || len(other) != maxNameLength:
		t.Errorf("long names have %d and %d bytes", len(one), len(other))
	case one == other:
		t.Error("two long names have become one")
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
			sent := false
			b := budgeted{budget: newBudget(amount{9, 9}), run: ours, next: roundTrip(
				func(*http.Request) (*http.Response, error) {
					sent = true
					return &http.Response{StatusCode: http.StatusBadRequest, Body: http.NoBody}, nil
				})}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://rack/v1/"+path,
				strings.NewReader(fmt.Sprintf(test, description)))
			csitest.Must(t, err)
			if answer, err := b.RoundTrip(req); err == nil {
				_ = answer.Body.Close()
			}
			if sent != want {
				t.Errorf("%s with the description %s: sent: %t", path, description, sent)
			}
		}
	}
}
