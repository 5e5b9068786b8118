package report

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	cdpage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/browsertest"
)

// update makes the test write the picture: go test ./conformance/report -update.
var update = flag.Bool("update", false, "write docs/conformance-report.png")

const picture = "../../docs/conformance-report.png"

// browser is a headless browser.
type browser struct{ browsertest.Browser }

// tab is a tab of it.
type tab = browsertest.Tab

// open shows a report in a new tab.
func (b browser) open(t *testing.T, r *Report) *tab {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "report")
	if err := Write(dir, r); err != nil {
		t.Fatal(err)
	}
	return b.Open(t, (&url.URL{Scheme: "file", Path: filepath.Join(dir, pageFile)}).String())
}

func evaluate[T any](page *tab, script string) T {
	page.Helper()
	return browsertest.Evaluate[T](page, script)
}

const openAll = `document.querySelectorAll("details").forEach(d => d.open = true)`

func TestThePageOfAReportIsReadableInABrowser(t *testing.T) {
	b := browser{browsertest.Start(t)}
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
			page.Do(browsertest.Size(1200, 900), chromedp.Evaluate(openAll, nil),
				browsertest.Scheme("dark"), browsertest.Scheme("light"))
			requests, messages := page.Seen()
			for _, request := range requests[min(1, len(requests)):] {
				if request != "data:," { // the empty icon
					t.Errorf("the page loads %s", request)
				}
			}
			if len(requests) == 0 {
				t.Error("the browser told of no request, not even of the page's own")
			}
			if len(messages) > 0 {
				t.Errorf("the console says %q, expected nothing", messages)
			}
		})
	}
}

func (b browser) contrasts(t *testing.T) {
	verdicts := []Verdict{Conforms, BlockedByRack, Incomplete, DoesNotConform}
	page := b.open(t, example())
	page.Do(browsertest.Size(1200, 900), chromedp.Evaluate(openAll, nil))
	colours := map[string]string{}
	for _, name := range []string{"light", "dark"} {
		page.Do(browsertest.Scheme(name))
		colours[name] = evaluate[string](page, `(() => { const style = getComputedStyle(document.body);
			return style.backgroundColor + " " + style.color })()`)
		for _, verdict := range verdicts {
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

func (b browser) fitsAPhone(t *testing.T) {
	for name, r := range map[string]*Report{"failed": example(), "hostile": hostile()} {
		page := b.open(t, r)
		page.Do(emulation.SetDeviceMetricsOverride(390, 844, 2, true), chromedp.Evaluate(openAll, nil))
		for _, font := range []int{100, 125} { // percent, because other machines have wider fonts
			page.Do(chromedp.Evaluate(fmt.Sprintf(
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
	page.Do(browsertest.Scheme("dark"), chromedp.ActionFunc(func(ctx context.Context) (err error) {
		pdf, _, err = cdpage.PrintToPDF().WithPrintBackground(true).Do(ctx)
		return err
	}))
	pages := bytes.Count(pdf, []byte("/Type /Page\n"))
	if !bytes.HasPrefix(pdf, []byte("%PDF-")) || pages < 2 || pages > 20 {
		t.Errorf("the PDF has %d pages in %d bytes, expected 2 to 20", pages, len(pdf))
	}
	page.Do(emulation.SetEmulatedMedia().WithMedia("print"))
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
	page.Do(browsertest.Size(1120, 1400), browsertest.Scheme("light"),
		chromedp.CaptureScreenshot(&png))
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
