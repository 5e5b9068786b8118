package report

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	cdpage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// update makes the test write the picture: go test ./conformance/report -update.
var update = flag.Bool("update", false, "write docs/conformance-report.png")

const picture = "../../docs/conformance-report.png"

// tab is a tab of a headless browser. It records the requests and console messages of the page.
type tab struct {
	*testing.T
	ctx context.Context

	mu sync.Mutex
	// requests and messages are guarded by mu.
	requests []string
	messages []string
}

// browser is a headless browser.
type browser struct{ ctx context.Context }

// startBrowser starts a browser, and closes it at the end of the test.
func startBrowser(t *testing.T) browser {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.Flag("disable-gpu", true))
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // Chromium refuses to run as root with one
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, _ = chromedp.NewContext(ctx)
	err := chromedp.Run(ctx)
	if errors.Is(err, exec.ErrNotFound) {
		t.Fatal("this test needs a browser, and there is no Chromium or Google Chrome in PATH: " +
			"run tools/prerequisites, or on Debian apt-get install chromium")
	}
	if err != nil {
		t.Fatalf("start a browser: %v", err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Errorf("close the browser: %v", err)
		}
	})
	return browser{ctx}
}

// open shows a report in a new tab.
func (b browser) open(t *testing.T, r *Report) *tab {
	t.Helper()
	dir := t.TempDir()
	if err := Write(dir, r); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := chromedp.NewContext(b.ctx)
	t.Cleanup(cancel)
	opened := &tab{T: t, ctx: ctx}
	chromedp.ListenTarget(ctx, opened.note)
	file := (&url.URL{Scheme: "file", Path: filepath.Join(dir, pageFile)}).String()
	opened.do(network.Enable(), log.Enable(), runtime.Enable(), chromedp.Navigate(file))
	return opened
}

func (b *tab) note(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *log.EventEntryAdded:
		b.messages = append(b.messages, e.Entry.Text)
	case *runtime.EventConsoleAPICalled:
		b.messages = append(b.messages, fmt.Sprintf("console.%s", e.Type))
	case *runtime.EventExceptionThrown:
		b.messages = append(b.messages, e.ExceptionDetails.Error())
	}
}

// do runs actions, which must succeed.
func (b *tab) do(actions ...chromedp.Action) {
	b.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// evaluate runs a script in the page, which has none of its own, and returns the script's value.
func evaluate[T any](b *tab, script string) (value T) {
	b.Helper()
	b.do(chromedp.Evaluate(script, &value))
	return value
}

func scheme(name string) chromedp.Action {
	return emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: name},
	})
}

func size(width, height int64) chromedp.Action {
	return emulation.SetDeviceMetricsOverride(width, height, 1, false)
}

const openAll = `document.querySelectorAll("details").forEach(d => d.open = true)`

func TestAReportsPageIsReadableInABrowser(t *testing.T) {
	b := startBrowser(t)
	for _, test := range []struct {
		name string
		run  func(browser, *testing.T)
	}{
		{"it loads nothing and the console is silent", browser.loadsNothing},
		{"it is readable in light and dark", browser.contrasts},
		{"it fits a phone", browser.fitsAPhone},
		{"it prints, with the evidence of failures", browser.prints},
		{"its headings, tables and links are in order", browser.isInOrder},
		{"its picture is in docs", browser.isInDocs},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(b, t) })
	}
}

func (b browser) loadsNothing(t *testing.T) {
	for name, r := range map[string]*Report{
		"failed": example(), "good": good(), "empty": minimal(), "hostile": hostile(),
	} {
		t.Run(name, func(t *testing.T) {
			page := b.open(t, r)
			page.do(size(1200, 900), chromedp.Evaluate(openAll, nil), scheme("dark"), scheme("light"))
			page.mu.Lock()
			defer page.mu.Unlock()
			for _, request := range page.requests[min(1, len(page.requests)):] {
				if request != "data:," { // the empty icon
					t.Errorf("the page loads %s", request)
				}
			}
			if len(page.requests) == 0 {
				t.Error("the browser told of no request, not even of the page's own")
			}
			if len(page.messages) > 0 {
				t.Errorf("the console says %q, expected nothing", page.messages)
			}
		})
	}
}

// contrasts returns, for every element with a text of its own, the contrast between the text and
// its background as WCAG 2 defines it. WCAG demands less of large text; this test does not.
const contrasts = `(() => {
	const channels = colour => colour.match(/[\d.]+/g).map(Number);
	const luminance = ([r, g, b]) => [r, g, b].map(c => c / 255)
		.map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
		.reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
	const behind = element => {
		for (; element; element = element.parentElement) {
			const colour = channels(getComputedStyle(element).backgroundColor);
			if (colour.length === 3 || colour[3] === 1) return colour;
			if (colour[3] !== 0) throw new Error("a translucent background");
		}
		return [255, 255, 255];
	};
	return [...document.body.querySelectorAll("*")].filter(element =>
		[...element.childNodes].some(n => n.nodeType === Node.TEXT_NODE && n.data.trim()) &&
		element.checkVisibility()
	).map(element => {
		const style = getComputedStyle(element);
		const text = channels(element.namespaceURI.endsWith("svg") ? style.fill : style.color);
		const [a, b] = [luminance(text), luminance(behind(element))].sort((a, b) => b - a);
		return {what: element.tagName + "." + element.className + " " + element.textContent.trim(),
			ratio: (a + 0.05) / (b + 0.05)};
	});
})()`

type contrast struct {
	What  string
	Ratio float64
}

func (b browser) contrasts(t *testing.T) {
	verdicts := []Verdict{Conforms, BlockedByRack, Incomplete, DoesNotConform}
	page := b.open(t, example())
	page.do(size(1200, 900), chromedp.Evaluate(openAll, nil))
	colours := map[string]string{}
	for _, name := range []string{"light", "dark"} {
		page.do(scheme(name))
		colours[name] = evaluate[string](page, `(() => { const style = getComputedStyle(document.body);
			return style.backgroundColor + " " + style.color })()`)
		for _, verdict := range verdicts {
			page.do(chromedp.Evaluate(fmt.Sprintf(`document.querySelector("header").className =
				"verdict %s"`, verdictStatus(verdict)), nil))
			texts := evaluate[[]contrast](page, contrasts)
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

func (b browser) fitsAPhone(t *testing.T) {
	for name, r := range map[string]*Report{"failed": example(), "hostile": hostile()} {
		page := b.open(t, r)
		page.do(emulation.SetDeviceMetricsOverride(390, 844, 2, true),
			chromedp.Evaluate(openAll, nil))
		for _, font := range []int{100, 125} { // percent, because other machines have wider fonts
			page.do(chromedp.Evaluate(fmt.Sprintf(
				`document.documentElement.style.fontSize = "%d%%"`, font), nil))
			widths := evaluate[[]int](page, `[document.documentElement.scrollWidth,
				document.documentElement.clientWidth, innerWidth]`)
			if widths[0] > widths[1] || widths[1] != 390 || widths[2] != 390 {
				t.Errorf("%s: the page is %d wide on a screen of %d (%d) with fonts of %d %%, "+
					"expected no more than 390", name, widths[0], widths[1], widths[2], font)
			}
		}
	}
}

func (b browser) prints(t *testing.T) {
	page := b.open(t, example())
	var pdf []byte
	page.do(scheme("dark"), chromedp.ActionFunc(func(ctx context.Context) (err error) {
		pdf, _, err = cdpage.PrintToPDF().WithPrintBackground(true).Do(ctx)
		return err
	}))
	pages := bytes.Count(pdf, []byte("/Type /Page\n"))
	if !bytes.HasPrefix(pdf, []byte("%PDF-")) || pages < 2 || pages > 20 {
		t.Errorf("the PDF has %d pages in %d bytes, expected 2 to 20", pages, len(pdf))
	}
	page.do(emulation.SetEmulatedMedia().WithMedia("print"))
	hidden := evaluate[int](page, `[...document.querySelectorAll(".results .failed")]
		.map(label => label.closest("li").querySelector(".evidence"))
		.filter(evidence => !evidence || !evidence.checkVisibility()).length`)
	if hidden != 0 {
		t.Errorf("the evidence of %d failures is not printed", hidden)
	}
}

func (b browser) isInOrder(t *testing.T) {
	page := b.open(t, example())
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
		if n := evaluate[int](page, script); n != 0 {
			t.Errorf("the page has %d %s", n, what)
		}
	}
}

func (b browser) isInDocs(t *testing.T) {
	page := b.open(t, example())
	var png []byte
	page.do(size(1120, 1400), scheme("light"), chromedp.CaptureScreenshot(&png))
	if *update {
		if err := os.WriteFile(picture, png, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for what, content := range map[string][]byte{"a new picture": png, picture: read(t, picture)} {
		if !bytes.HasPrefix(content, []byte("\x89PNG")) || len(content) > 300_000 {
			t.Errorf("%s has %d bytes, expected a PNG of at most 300 kB", what, len(content))
		}
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return content
}
