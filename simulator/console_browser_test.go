//go:build linux

package simulator

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/browsertest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// consolePicture is the picture that "go test ./simulator -run Console -update" writes.
const consolePicture = "../docs/console.png"

// live selects the body of a page while the page's script updates it.
const live = `body[data-live=yes]`

const claimed = `csi.example {"name":"pvc-42","claim":"shop/orders","cluster":"blue","use":"mount"}`

// recordFlights makes the console follow a file of flight records, which write() creates and fills.
func recordFlights(t *testing.T, s *Server) (write func(line string)) {
	dir := filepath.Join(t.TempDir(), "flight")
	s.Flights.Dirs = []string{dir}
	return func(line string) {
		t.Helper()
		looptest.Must(t, os.MkdirAll(dir, 0o700))
		f := looptest.Got(os.OpenFile(filepath.Join(dir, "x.jsonl"),
			os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))(t)
		looptest.Got(f.WriteString(line))(t)
		looptest.Must(t, f.Close())
	}
}

func TestTheConsoleShowsAVolumeAndInjectsFaults(t *testing.T) {
	r := serveRack(t, engine.Config{FlakyDisks: true})
	record := recordFlights(t, r.Server)
	admin := serveAdmin(t, r.Server)
	browser := browsertest.Start(t)
	first := browser.Open(t, admin+"/", browsertest.Size(1280, 1600))
	second := browser.Open(t, admin+"/", browsertest.Scheme("dark"))
	both := []*browsertest.Tab{first, second}
	for _, tab := range both {
		tab.Do(chromedp.WaitReady(live))
	}
	sees := func(what, selector, text string) {
		t.Helper()
		for n, tab := range both {
			looptest.Await(t, fmt.Sprintf("browser %d to see %s in %s", n, what, selector), func() bool {
				return browsertest.Evaluate[bool](tab, fmt.Sprintf(
					`[...document.querySelectorAll(%q)].some(e => e.textContent.includes(%q))`,
					selector, text))
			})
		}
	}
	said := func(tab *browsertest.Tab, text string) {
		t.Helper()
		looptest.Await(t, "the page to say "+text, func() bool {
			return strings.Contains(browsertest.Evaluate[string](tab,
				`document.getElementById("said").textContent`), text)
		})
	}
	card := func(name string) string { return "#i-" + r.instance(name).ID }

	disk := r.disk("d", `"description":""`, fmt.Sprintf(`"description":%q`, claimed))
	sees("the new disk", "#shelf li", "shop/orders")
	sees("its request", "#feed tr", "disk_create")
	r.attach("a", "d")
	sees("the attached disk", card("a")+" .slots li", "shop/orders")
	format := func(outcome string) string {
		return fmt.Sprintf(`{"time":%q,"event":"Formatted","outcome":%q,"volume":%q,"instance":%q,`+
			`"filesystem":"ext4"}`+"\n", time.Now().UTC().Format(time.RFC3339Nano), outcome, disk.ID,
			r.instance("a").ID)
	}
	record(format("begun"))
	sees("a format that was begun", "#feed tr", "a"+"Formatted ext4"+"d"+"begun")
	record(format("done"))
	sees("the format", "#feed tr", "a"+"Formatted ext4"+"d"+"done")
	for n, tab := range both {
		if browsertest.Evaluate[bool](tab,
			`document.getElementById("feed").textContent.includes("begun")`) {
			t.Errorf("browser %d still shows the beginning of a change that has ended", n)
		}
	}
	r.snapshot("then", "d")
	sees("the snapshot", "#others", "snapshot then")
	r.disk("spare")
	sees("a spare disk", "#shelf li", "spare")

	// A click on the button of the disk's page makes the guest's reads fail.
	page := browser.Open(t, admin+"/console/disks/"+disk.ID)
	page.Do(chromedp.WaitReady(live), chromedp.Click(`button[value^="fail"]`))
	said(page, "fails")
	devices, err := filepath.Glob(filepath.Join(r.GuestDir(r.instance("a").ID), "dev", "nvme*"))
	if err != nil || len(devices) != 1 {
		t.Fatalf("the guest has the devices %q, %v; want one", devices, err)
	}
	for range 4 {
		if readDirect(devices[0]) == nil {
			t.Error("the disk was read although it was told to fail")
		}
	}
	page.Do(chromedp.WaitVisible(`#failing li`))
	looptest.Await(t, "the page to count the strike and the reads", func() bool {
		text := browsertest.Evaluate[string](page, `document.getElementById("disk").textContent`)
		return strings.Contains(text, "fails; struck ") && !strings.Contains(text, "struck 0 times") &&
			!strings.Contains(text, "at most 1 in")
	})
	// Find and press the button in one step, because the script may replace it at any moment.
	browsertest.Evaluate[bool](page, `document.querySelector('button[value^="heal"]').click(), true`)
	said(page, "healed")
	if err := readDirect(devices[0]); err != nil {
		t.Errorf("the healed disk: %v", err)
	}

	first.Do(chromedp.SetValue(`[name=operation]`, "disk_create"),
		chromedp.Click(`button[value=arm]`))
	sees("the armed fault", "#faults li", "disk_create")
	r.demand(503, "", newDisk("e"))
	sees("the strike", "#faults b", "1")
	sees("the refusal", "#feed .bad", "503")

	var png []byte
	first.Do(browsertest.Scheme("light"), chromedp.CaptureScreenshot(&png))
	if *update {
		looptest.Must(t, os.WriteFile(consolePicture, png, 0o644))
	}
	kept := looptest.Got(os.ReadFile(consolePicture))(t)
	for what, picture := range map[string][]byte{"a new picture": png, consolePicture: kept} {
		if !bytes.HasPrefix(picture, []byte("\x89PNG")) || len(picture) > 400_000 {
			t.Errorf("%s has %d bytes, want a PNG of at most 400 kB", what, len(picture))
		}
	}

	// If the user presses a button with the keyboard, the button that replaces it must get the focus.
	first.Do(chromedp.Focus(card("b")+` button`), chromedp.KeyEvent(" "))
	sees("the stopped instance", card("b")+" .state", "stopped")
	const focused = `document.activeElement.textContent`
	if got := browsertest.Evaluate[string](first, focused); got != "Start" {
		t.Errorf("the focus is on %q, want the button Start", got)
	}
	second.Do(chromedp.Click(`#s-hotplug button`))
	sees("the switch", `#s-hotplug [aria-checked="false"]`, "Hot-plug")
	r.demand(400, "", moving("attach", "a", "spare"))

	// A paused page does not change. Afterwards it shows the changes made during the pause.
	first.Do(chromedp.Click(`#pause`))
	r.delete("disks/spare")
	both = []*browsertest.Tab{second}
	sees("the deletion", "#feed tr", "disk_delete")
	if !browsertest.Evaluate[bool](first,
		`document.getElementById("shelf").textContent.includes("spare")`) {
		t.Error("the paused page has changed")
	}
	first.Do(chromedp.Click(`#pause`))
	both = []*browsertest.Tab{first, second}
	sees("the deletion", "#feed tr", "disk_delete")

	// Without scripts, a button leads back to the same page, which still lists one disk's requests.
	plain := browser.Open(t, admin+"/?pause&disk=shop%2Forders",
		emulation.SetScriptExecutionDisabled(true))
	plain.Follow(chromedp.Click(`#i-`+r.instance("idle").ID+` button`),
		chromedp.WaitReady(`#said:not(:empty)`))
	said(plain, "told to start")
	sees("the started instance", card("idle")+" .state", "running")
	looptest.Await(t, "only the requests and the entries about the disk", func() bool {
		return browsertest.Evaluate[string](plain, `[...document.querySelectorAll(
			"#feed td:nth-child(3)")].map(e => e.textContent).join(" ")`) ==
			"snapshot_create Formatted ext4 instance_disk_attach disk_create"
	})

	for _, tab := range append(both, page) {
		checkConsolePage(t, tab, admin)
	}
}

func checkConsolePage(t *testing.T, tab *browsertest.Tab, admin string) {
	t.Helper()
	requests, messages := tab.Seen()
	for _, request := range requests {
		if !strings.HasPrefix(request, admin+"/") && request != "data:," {
			t.Errorf("the page loads %s", request)
		}
	}
	for _, message := range messages {
		t.Errorf("the browser's console says %q", message)
	}
	texts := browsertest.Contrasts(tab)
	if len(texts) < 20 {
		t.Errorf("the page has %d texts, want more", len(texts))
	}
	for _, text := range texts {
		if text.Ratio < 4.5 {
			t.Errorf("the contrast of %.60q is %.2f, want at least 4.5", text.What, text.Ratio)
		}
	}
	for what, script := range map[string]string{
		"controls without a name": `[...document.querySelectorAll(
			"input:not([type=hidden]), select, button")].filter(e =>
			!(e.textContent.trim() || e.ariaLabel || e.labels?.length)).length`,
		"header cells without scope": `document.querySelectorAll("th:not([scope])").length`,
		"ids that are there twice": `(ids => ids.length - new Set(ids).size)(
			[...document.querySelectorAll("[id]")].map(e => e.id))`,
		"h1 headings other than one": `document.querySelectorAll("h1").length - 1`,
		"pictures without text":      `document.querySelectorAll("svg:not([aria-label])").length`,
	} {
		if n := browsertest.Evaluate[int](tab, script); n != 0 {
			t.Errorf("the page has %d %s", n, what)
		}
	}
}

func TestTheConsoleIsFastWithAThousandDisks(t *testing.T) {
	c := engine.Config{Volatile: true}
	for n := range 64 {
		c.Instances = append(c.Instances,
			engine.InstanceSpec{Name: fmt.Sprintf("node-%02d", n), Stopped: true})
	}
	r := serveRack(t, c)
	for n := range 1000 {
		name := fmt.Sprintf("pvc-%04d", n)
		r.disk(name)
		if n < 640 {
			r.attach(fmt.Sprintf("node-%02d", n/10), name)
		}
	}
	tab := browsertest.Start(t).Open(t, serveAdmin(t, r.Server)+"/", browsertest.Size(1280, 1600))
	tab.Do(chromedp.WaitReady(live))
	type loaded struct{ Paint, Bytes float64 }
	var load loaded
	looptest.Await(t, "the first paint", func() bool {
		load = browsertest.Evaluate[loaded](tab, `(p => ({
			paint: p("paint").find(e => e.name === "first-contentful-paint")?.startTime || 0,
			bytes: p("navigation")[0].decodedBodySize}))(t => performance.getEntriesByType(t))`)
		return load.Paint > 0
	})
	if n := browsertest.Evaluate[int](tab, `document.querySelectorAll(
		".slots a[href], #shelf > li[id]").length`); n != 1000 {
		t.Errorf("the page shows %d disks, want 1000", n)
	}
	began := time.Now()
	r.detach("node-63", "pvc-0639")
	tab.Do(chromedp.WaitReady(`#d-` + view[store.Disk](r, "disks/pvc-0639").ID))
	took := time.Since(began)
	fmt.Printf("FIGURE console disks=1000 first_paint_ms=%.0f update_ms=%d page_kib=%.0f\n",
		load.Paint, took.Milliseconds(), load.Bytes/1024)
	if took > 5*time.Second || load.Paint > 10_000 || load.Bytes > 2<<20 {
		t.Errorf("the page is too slow or too large: %+v, and %v until it is up to date", load, took)
	}
}

func readDirect(device string) error {
	return exec.Command("dd", "if="+device, "of=/dev/null", "iflag=direct", "bs=4096", "count=1").Run()
}
