package report

import (
	"bytes"
	"cmp"
	"context"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	cdpage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/browsertest"
)

func example() *Report {
	began := time.Date(2026, 8, 28, 14, 3, 7, 0, time.UTC)
	return &Report{
		Schema: SchemaVersion, Verdict: DoesNotConform,
		Why: "3 of 61 results failed: the rack answers two rules of the API in another way than the " +
			"driver expects, and a volume that moved to the second instance came up read-only there.",
		Run: Run{
			ID: "7c1d0f3a", Mark: "conformance-7c1d0f3a", Began: began,
			Ended: began.Add(23*time.Minute + 41*time.Second), Machine: "csi-a",
			Instance: "csi-a", Second: "csi-b", Helper: "csi-helper",
			Command: []string{"oxide-conformance", "run", "--second", "ssh csi-b", "--release", "v20",
				"--groups", "rules,ext4,block,data"},
			Selected: []string{"rules", "ext4", "block", "data"},
			Budget:   "12 disks of 2 GiB at a time, 40 min",
		},
		Rack: RackFacts{Host: "oxide.sys.rack2.example.com", APIVersion: "2026060800.0.0",
			Project: "csi-conformance", HotPlug: HotPlugYes, Release: "v20, in this invented example"},
		Versions: Versions{Suite: "v0.4.0", Driver: "v0.4.0", SDK: "oxide.go v0.10.0",
			Go: "go1.26.8", Kernel: "6.12.41", OS: "Debian 13", Arch: "amd64",
			Tools: map[string]string{"mkfs.ext4": "1.47.2", "mkfs.xfs": "6.13.0"}},
		Preflight: []Line{
			{"Environment", Pass, "OXIDE_HOST, OXIDE_TOKEN and OXIDE_PROJECT are set", ""},
			{"Rack", Pass, "answers in 38 ms, with API version 2026060800.0.0", ""},
			{"Quota", Warn, "31 GiB are left in the silo; the run may use 24 GiB", "Other users of the " +
				"silo can make the run fail: raise the quota, or choose fewer groups with --groups."},
			{"mkfs.btrfs", Skip, "is not installed", "To test btrfs, install btrfs-progs."},
		},
		Results: exampleResults(), Calls: exampleCalls(),
		Ledger: Ledger{
			Before: map[string]int{"disks": 4, "snapshots": 1, "attachments": 3, "mounts": 28},
			After:  map[string]int{"disks": 5, "snapshots": 1, "attachments": 3, "mounts": 27},
			Left:   []string{"disk csi-5r0c2m8q1v3h7k4t (conformance-7c1d0f3a-move-2)"},
		},
		Witness: Witness{Source: "this program’s own record"},
		CleanUp: "oxide-conformance clean --mark conformance-7c1d0f3a",
	}
}

// exampleResults returns results that have passed, except for those in the table "odd".
func exampleResults() (results []Result) {
	call := func(operation, method string, status int, answer string) LoggedCall {
		return LoggedCall{Kind: API, Operation: operation, Method: method, Status: status, Answer: answer,
			Path: "/v1/disks?project=csi-conformance", Milliseconds: 162.7,
			RequestID: "bc547fbc-6f0e-4a55-9d61-8deb2a10d0f2"}
	}
	const noRights = "The token may not read other silos' objects, and this rule needs one: run " +
		"with a fleet viewer's token to test it."
	odd := map[string]Result{
		"A08": {Status: Failed, Name: "A block size is one of 512, 2048 and 4096",
			Reason: "expected 400 for a block size of 1024, found 201: the rack made the disk.",
			Evidence: []LoggedCall{call("disk_create", "POST", 201, `{"id":"0d9c4c0e-…","name":`+
				`"conformance-7c1d0f3a-a08","block_size":1024,"state":{"state":"creating"}}`),
				call("disk_delete", "DELETE", 204, "")}},
		"A21": {Status: Failed, Name: "A detached disk detaches again without an error",
			Reason: "expected 202 for the second detach, found 400 InvalidRequest.",
			Evidence: []LoggedCall{call("instance_disk_detach", "POST", 400,
				`{"message":"cannot detach disk \"conformance-7c1d0f3a-a21\": disk is detached"}`)}},
		"D02": {Status: Failed, Name: "What was written is read on the second instance",
			Reason: "expected to write to the volume on csi-b, found EROFS: the filesystem is mounted " +
				"read-only there. The disk is left for you to look at.",
			Evidence: []LoggedCall{{Kind: RPC, Operation: "NodePublishVolume", Code: "Internal",
				ErrorCode: "MOUNT_READ_ONLY", Milliseconds: 12.3, Answer: "mount at /var/lib/conformance/b/" +
					"target: expected a writable mount, found ro: the kernel found an error; see dmesg"}}},
		"A15": {Status: NotTested, Reason: noRights},
		"A24": {Status: NotTested, Reason: noRights},
		"A16": {Status: Blocked, Reason: "The quota does not have the 12 disks that this rule needs."},
		"D06": {Status: Blocked, Reason: "The rack refuses to stop csi-helper: another user started it."},
		"D10": {Status: NotTested, Reason: "The rack has no call that grows a disk."},
	}
	for _, group := range []struct {
		name, letter string
		results      int
	}{{"rules", "A", 24}, {"ext4", "E", 13}, {"block", "B", 13}, {"data", "D", 11}} {
		for i := range group.results {
			id := fmt.Sprintf("%s%02d", group.letter, i+1)
			r := Result{Group: group.name, ID: id, Status: Passed, Tries: 1 + i/12,
				Name:   "The rack does in example " + id + " what the driver expects",
				Source: "omicron, nexus/src/app/disk.rs (read 2026-08)", Seconds: 0.04 * float64(i*i),
				Evidence: []LoggedCall{call("disk_create", "POST", 201, ""),
					{Kind: RPC, Operation: "DeleteVolume", Code: "OK", Milliseconds: 188.2}},
				Extent: Extent{{What: "disk_create", Looked: 2, Unit: "kinds of answers", Words: "201; 400"}}}
			if o, is := odd[id]; is {
				r.Name, r.Status, r.Reason = cmp.Or(o.Name, r.Name), o.Status, o.Reason
				r.Evidence = o.Evidence
			}
			if r.Status == Blocked || r.Status == NotTested {
				r.Seconds, r.Tries = 0, 0
			}
			results = append(results, r)
		}
	}
	return results
}

func exampleCalls() (all []Calls) {
	random := rand.New(rand.NewPCG(3, 4))
	for _, c := range []struct {
		Calls
		median, spread float64
	}{
		{Calls{API, "disk_create", 214, 9, nil}, 390, 0.35},
		{Calls{API, "disk_view", 988, 41, nil}, 27, 0.5},
		{Calls{API, "instance_disk_attach", 131, 6, nil}, 1400, 0.3},
		{Calls{RPC, "CreateVolume", 158, 21, nil}, 430, 0.4},
		{Calls{RPC, "NodeStageVolume", 96, 5, nil}, 720, 0.7},
		{Calls{RPC, "NodeGetVolumeStats", 12, 3, nil}, 0.7, 0.5},
	} {
		for range c.Count {
			ms := c.median * math.Exp(random.NormFloat64()*c.spread)
			c.Milliseconds = append(c.Milliseconds, math.Round(ms*100)/100)
		}
		all = append(all, NewCalls(c.Kind, c.Operation, c.Failed, c.Milliseconds))
	}
	return all
}

func minimal() *Report {
	return &Report{Schema: SchemaVersion, Verdict: Incomplete, Why: "The rack did not answer.",
		Rack: RackFacts{HotPlug: HotPlugUnknown}}
}

func good() *Report {
	r := example()
	r.Verdict, r.Why = Conforms, "All 61 results passed."
	r.Rack.Simulated, r.Rack.Host = true, "http://127.0.0.1:12220"
	r.Ledger.After, r.Ledger.Left = r.Ledger.Before, nil
	for i := range r.Results {
		r.Results[i].Status, r.Results[i].Reason, r.Results[i].Tries = Passed, "", 1
	}
	return r
}

// hostile has strings that try to break the page's markup or its width.
func hostile() *Report {
	r := example()
	long := strings.Repeat("oxide-", 60)
	markup := `"'><script>console.log(1)</script><img src=x onerror=alert(1)>` +
		"</style></pre>{{.}}\x00\x1b[31m" + long
	spoiled := copyOf(reflect.ValueOf(*r), func(v reflect.Value) string {
		if _, free := v.Interface().(string); free && v.String() != "" {
			return v.String() + markup
		}
		return v.String()
	}).Interface().(Report)
	return &spoiled
}

// update makes the tests write the picture and testdata: go test ./conformance/report -update.
var update = flag.Bool("update", false, "write docs/conformance-report.png and testdata")

const picture = "../../docs/conformance-report.png"

// open shows a report in a new tab, with all details.
func open(t *testing.T, b browsertest.Browser, r *Report) *browsertest.Tab {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "report")
	must(t, Write(dir, r))
	page := b.Open(t, (&url.URL{Scheme: "file", Path: filepath.Join(dir, pageFile)}).String())
	page.Do(browsertest.Size(1200, 900), chromedp.Evaluate(
		`document.querySelectorAll("details").forEach(d => d.open = true)`, nil))
	return page
}

func TestThePageOfAReportIsReadableInABrowser(t *testing.T) {
	b := browsertest.Start(t)
	for name, test := range map[string]func(*testing.T, *browsertest.Tab){
		"is readable in light and dark": contrasts, "has valid markup": isInOrder,
		"prints the evidence of failures": prints, "has a picture in docs": isInDocs,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t, b, example())) })
	}
	for name, r := range reports() {
		t.Run("the page loads nothing, logs nothing and fits a phone: "+name, func(t *testing.T) {
			page := open(t, b, r)
			page.Do(browsertest.Scheme("dark"), browsertest.Scheme("light"))
			requests, messages := page.Seen()
			// The first request loads the page, and "data:," is its empty icon.
			if len(requests) == 0 || len(messages) > 0 || slices.ContainsFunc(requests[1:],
				func(request string) bool { return request != "data:," }) {
				t.Errorf("the page loads %q, and the console says %q", requests, messages)
			}
			page.Do(emulation.SetDeviceMetricsOverride(390, 844, 2, true))
			for _, font := range []int{100, 125} { // percent; 125 imitates machines with wider fonts
				page.Do(chromedp.Evaluate(fmt.Sprintf(
					`document.documentElement.style.fontSize = "%d%%"`, font), nil))
				widths := browsertest.Evaluate[[]int](page, `[document.documentElement.scrollWidth,
					document.documentElement.clientWidth, innerWidth]`)
				if widths[0] > widths[1] || widths[1] != 390 || widths[2] != 390 {
					t.Errorf("the page is %d wide on a screen of %d (%d) with fonts of %d %%, "+
						"expected no more than 390", widths[0], widths[1], widths[2], font)
				}
			}
		})
	}
}

func contrasts(t *testing.T, page *browsertest.Tab) {
	colours := map[string]string{}
	for _, name := range []string{"light", "dark"} {
		page.Do(browsertest.Scheme(name))
		colours[name] = browsertest.Evaluate[string](page, `(() => {
			const style = getComputedStyle(document.body);
			return style.backgroundColor + " " + style.color })()`)
		for _, verdict := range []Verdict{Conforms, BlockedByRack, Incomplete, DoesNotConform} {
			page.Do(chromedp.Evaluate(fmt.Sprintf(`document.querySelector("header").className =
				"verdict %s"`, verdictStatus(verdict)), nil))
			texts := browsertest.Contrasts(page)
			if len(texts) < 300 {
				t.Errorf("%s: found %d texts, expected hundreds", name, len(texts))
			}
			for _, text := range texts {
				if text.Ratio < 4.5 {
					t.Errorf("%s, %s: the contrast of %.60q is %.2f, expected at least 4.5",
						name, verdict, text.What, text.Ratio)
				}
			}
		}
	}
	if colours["light"] == colours["dark"] {
		t.Errorf("light and dark have the same colours: %s", colours["light"])
	}
}

func prints(t *testing.T, page *browsertest.Tab) {
	var pdf []byte
	page.Do(chromedp.Reload(), browsertest.Scheme("dark"), // with the details that are open at first
		chromedp.ActionFunc(func(ctx context.Context) (err error) {
			pdf, _, err = cdpage.PrintToPDF().WithPrintBackground(true).Do(ctx)
			return err
		}), emulation.SetEmulatedMedia().WithMedia("print"))
	pages := bytes.Count(pdf, []byte("/Type /Page\n"))
	if !bytes.HasPrefix(pdf, []byte("%PDF-")) || pages < 2 || pages > 20 {
		t.Errorf("the PDF has %d pages in %d bytes, expected 2 to 20", pages, len(pdf))
	}
	hidden := browsertest.Evaluate[int](page, `[...document.querySelectorAll(".results .failed")]
		.map(label => label.closest("li").querySelector(".evidence"))
		.filter(evidence => !evidence || !evidence.checkVisibility()).length`)
	if hidden != 0 {
		t.Errorf("the evidence of %d failures is not printed", hidden)
	}
}

func isInOrder(t *testing.T, page *browsertest.Tab) {
	for what, script := range map[string]string{
		"headings that skip a level": `[...document.querySelectorAll("h1,h2,h3")].filter((h, i, all) =>
			i === 0 ? h.tagName !== "H1" : h.tagName[1] - all[i - 1].tagName[1] > 1).length`,
		"header cells without scope": `document.querySelectorAll("th:not([scope])").length`,
		"tables without a caption":   `document.querySelectorAll("table:not(:has(caption))").length`,
		"pictures without text": `document.querySelectorAll(
			"svg:not([aria-label],[aria-hidden])").length`,
		"scripts": `document.scripts.length`,
		"links that lead nowhere": `[...document.links].filter(
			a => !document.querySelector(a.hash)).length`,
		"ids that are there twice": `(ids => ids.length - new Set(ids).size)(
			[...document.querySelectorAll("[id]")].map(e => e.id))`,
		"h1 headings other than one":  `document.querySelectorAll("h1").length - 1`,
		"language other than English": `document.documentElement.lang === "en" ? 0 : 1`,
	} {
		if n := browsertest.Evaluate[int](page, script); n != 0 {
			t.Errorf("the page has %d %s", n, what)
		}
	}
}

func isInDocs(t *testing.T, page *browsertest.Tab) {
	var png []byte
	page.Do(chromedp.Reload(), browsertest.Size(1120, 1400), browsertest.Scheme("light"),
		chromedp.CaptureScreenshot(&png))
	if *update {
		must(t, os.WriteFile(picture, png, 0o644))
	}
	for what, content := range map[string][]byte{"a new picture": png,
		picture: try(os.ReadFile(picture))(t)} {
		if !bytes.HasPrefix(content, []byte("\x89PNG")) || len(content) > 300_000 {
			t.Errorf("%s has %d bytes, expected a PNG of at most 300 kB", what, len(content))
		}
	}
}
