package sanity

import (
	"bytes"
	"regexp"
	"strings"
	"testing"
)

func TestTheDemoShowsAVolumeThatMovesAndLeavesNothing(t *testing.T) {
	var out bytes.Buffer
	if err := Demo(t.Context(), &out); err != nil {
		t.Fatalf("Demo: %v\n%s", err, &out)
	}
	shown := out.String()
	for _, want := range []string{
		`rack  POST /v1/disks\S* → 201`,
		`rack  POST /v1/instances/\S+/disks/attach\S* → 202`,
		`NodeStageVolume on a: .*\n +mounted: `,
		`"Hello from instance a\..*" into `,
		`rack  POST /v1/instances/\S+/disks/detach\S* → 202`,
		`"Hello from instance a\..*" from `,
		`rack  DELETE /v1/disks/\S+ → 204`,
		`The ledger balances`,
	} {
		if !regexp.MustCompile(want).MatchString(shown) {
			t.Errorf("the demo does not show %q", want)
		}
	}
	if requests := strings.Count(shown, "      rack  "); requests != 6 {
		t.Errorf("the demo shows %d requests to the rack, want 6", requests)
	}
	if t.Failed() {
		t.Log(shown)
	}
}
