//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

func TestTheDemoShowsAVolumeThatMovesAndLeavesNothing(t *testing.T) {
	var out bytes.Buffer
	if err := Demo(t.Context(), &out, nil); err != nil {
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
		`rack  GET /v1/disks/\S+ → 200 .*\n +rack  DELETE /v1/disks/\S+ → 204`,
		`The ledger balances`,
	} {
		if !regexp.MustCompile(want).MatchString(shown) {
			t.Errorf("the demo does not show %q", want)
		}
	}
	if requests := strings.Count(shown, "      rack  "); requests != 15 {
		t.Errorf("the demo shows %d requests to the rack, want 15", requests)
	}
	if t.Failed() {
		t.Log(shown)
	}
}

// interrupter ends a demo when the demo prints a text.
type interrupter struct {
	bytes.Buffer
	at        string
	interrupt func()
}

func (i *interrupter) Write(p []byte) (int, error) {
	if strings.Contains(string(p), i.at) {
		i.interrupt()
	}
	return i.Buffer.Write(p)
}

func TestAnInterruptedDemoLeavesNothing(t *testing.T) {
	dir, err := os.MkdirTemp("", "demo-") // t.TempDir's path is too long for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("OXIDE_SANITY_DIR", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &interrupter{at: "The workload writes", interrupt: cancel}
	if err := Demo(ctx, out, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("Demo = %v, want the interrupt\n%s", err, out)
	}
	ledger, err := harness.KernelLedger(dir)
	if err != nil {
		t.Fatal(err)
	}
	if left := ledger.More(nil); len(left) > 0 {
		t.Errorf("left after an interrupt: %q", left)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%s holds %v, %v", dir, entries, err)
	}
}
