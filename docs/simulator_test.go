package docs

import (
	"encoding/json"
	"os"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestThePageOfTheSimulatorNamesWhatTheAdminListenerAnswers(t *testing.T) {
	page, err := os.ReadFile("howto/simulator.md")
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, route := range adminapi.Routes {
		path, _, _ := strings.Cut(route.Path, "/{id}")
		path, _, _ = strings.Cut(path, "/{name}")
		want = append(want, route.Method, path)
	}
	for _, value := range []any{adminapi.Switches{}, adminapi.Fault{Operation: "-", Object: "-",
		Bearer: "-", Skip: 1, Probability: 1, Seed: 1, Phase: "-", Response: &adminapi.Response{},
		Cut: true, Hang: 1, Delay: 1, SlowBody: 1, SlowByte: 1, TruncateBody: 1,
		DropFields: []string{"-"}, Device: &adminapi.DeviceFault{Never: true, Delay: 1, SizeBytes: 1,
			Fails: true}}, adminapi.DiskFault{From: 1, To: 1, Times: 1, Delay: 1, Hang: true, Lie: true,
		Fired: 1}} {
		want = append(want, keys(t, value)...)
	}
	for _, phase := range []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After,
		adminapi.Twice, adminapi.Deferred, adminapi.Unwind, adminapi.Reread} {
		want = append(want, "| `"+string(phase)+"` |")
	}
	for _, word := range want {
		if !strings.Contains(string(page), word) {
			t.Errorf("docs/howto/simulator.md does not name %s", word)
		}
	}
}

// keys are the names of the fields of a value, as JSON has them.
func keys(t *testing.T, value any) []string {
	t.Helper()
	data, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	var fields map[string]any
	if err := json.Unmarshal(data, &fields); err != nil {
		t.Fatal(err)
	}
	var names []string
	for name := range fields {
		names = append(names, "`"+name+"`")
	}
	return names
}
