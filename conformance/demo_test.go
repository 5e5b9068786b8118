//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// update makes the test write the picture: go test ./conformance -run DemoMoves -update.
var update = flag.Bool("update", false, "write docs/life-of-a-volume.png")

func screenshot(t *testing.T, page string) {
	t.Helper()
	png := csitest.Got(filepath.Abs("../docs/life-of-a-volume.png"))(t)
	out, err := exec.CommandContext(t.Context(), "chromium", "--headless", "--no-sandbox",
		"--disable-gpu", "--user-data-dir="+t.TempDir(), "--hide-scrollbars",
		"--window-size=2230,1210", "--screenshot="+png, "file://"+page).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestDemoMovesAVolumeAndLeavesNothing(t *testing.T) {
	// row returns a pattern for the console's row about a change that a node's driver recorded.
	row := func(node, change string) string {
		return `<td>` + node + `<td><span title="[^<]*">` + change + `</span>[^\n]*<td>done<td>`
	}
	const claim = `/console/disks/[0-9a-f-]{36}" title="csi-[^"]*">demo/greeting</a>`
	out := &watcher{at: map[string]func(){}}
	for at, want := range map[string]string{
		"\n 4. ": `<h3>a</h3>.*` + claim + `.*<h3>b</h3>.*` + row("a", "Published") + ".*" +
			row("a", "Mounted") + ".*" + row("a", "Formatted") + ".*" + row("a", "ProvenBlank"),
		"\n 7. ": `id="shelf" .*` + claim + `.*id="quota".*` + row("a", "Unmounted"),
		"\n10. ": `<h3>b</h3>.*` + claim + `.*id="shelf".*` + row("b", "Mounted") + ".*" +
			row("a", "Unmounted"),
	} {
		out.at[at] = func() {
			address := regexp.MustCompile(`http://127\.0\.0\.1:\d+/\n`).Find(out.Bytes())
			var page []byte
			if harness.Await(t.Context(), harness.StartTimeout, func() (err error) {
				if page, err = get(t.Context(), string(bytes.TrimSpace(address))); err == nil &&
					!regexp.MustCompile("(?s)"+want).Match(page) {
					err = errors.New("not yet")
				}
				return err
			}) != nil {
				t.Errorf("after %q the console does not show %q: %s", at, want, page)
			}
		}
	}
	t.Setenv(pictureFile, filepath.Join(t.TempDir(), "life.html"))
	if err := Demo(t.Context(), strings.NewReader("\n"), out, nil); err != nil {
		t.Fatalf("Demo: %v\n%s", err, out)
	}
	shown := out.String()
	for _, want := range []string{
		`shows itself in a browser at\n +http://127\.0\.0\.1:\d+/\n`,
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
	if len(out.at) > 0 {
		t.Errorf("the demo does not print %d of the texts at which the console is read", len(out.at))
	}
	if waits := strings.Count(shown, "Press Enter"); waits != 2 {
		t.Errorf("the demo waits %d times, want for the one line and the end of the input", waits)
	}
	if requests := strings.Count(shown, "      rack  "); requests != 15 {
		t.Errorf("the demo shows %d requests to the rack, want 15", requests)
	}
	page := csitest.Got(os.ReadFile(os.Getenv(pictureFile)))(t)
	for _, want := range []string{"DeleteVolume: the disk is gone", "driver 3: node b",
		"instance_disk_attach", "Formatted", "every promise was kept"} {
		if !bytes.Contains(page, []byte(want)) {
			t.Errorf("the picture does not show %q", want)
		}
	}
	if *update {
		screenshot(t, os.Getenv(pictureFile))
	}
	if t.Failed() {
		t.Log(shown)
	}
}

// watcher is the demo's output. When the demo first prints a text of at, Write calls its function.
type watcher struct {
	bytes.Buffer
	at map[string]func()
}

func (w *watcher) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	for text, do := range w.at {
		if bytes.Contains(p, []byte(text)) {
			delete(w.at, text)
			do()
		}
	}
	return n, err
}

func get(ctx context.Context, url string) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", "text/html")
	req.Close = true // a connection that stays would be a leak of the demo
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func TestAnInterruptedDemoLeavesNothing(t *testing.T) {
	dir := csitest.Got(os.MkdirTemp("", "demo-"))(t) // t.TempDir's path is too long for sockets
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("OXIDE_SANITY_DIR", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &watcher{at: map[string]func(){"The workload writes": cancel}}
	if err := Demo(ctx, nil, out, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("Demo = %v, want the interrupt\n%s", err, out)
	}
	ledger := csitest.Got(harness.KernelLedger(dir))(t)
	if left := ledger.More(nil); len(left) > 0 {
		t.Errorf("left after an interrupt: %q", left)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%s holds %v, %v", dir, entries, err)
	}
}
