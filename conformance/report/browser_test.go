package report

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/chromedp/cdproto/emulation"
	cdpage "github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/browsertest"
)

// update makes the tests write the picture and testdata: go test ./conformance/report -update.
var update = flag.Bool("update", false, "write docs/conformance-report.png and testdata")

const picture = "../../docs/conformance-report.png"

// open shows a report in a new tab, with all details.
func open(t *testing.T, b browsertest.Browser, r *Report) *browsertest.Tab {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "report")
	if err := Write(dir, r); err != nil {
		t.Fatal(err)
	}
	page := b.Open(t, (&url.URL{Scheme: "file", Path: filepath.Join(dir, pageFile)}).String())
	page.Do(browsertest.Size(1200, 900), chromedp.Evaluate(
		`document.querySelectorAll("details").forEach(d => d.open = true)`, nil))
	return page
}

func TestThePageOfAReportIsReadableInABrowser(t *testing.T) {
	b := browsertest.Start(t)
	for name, test := range map[string]func(*testing.T, *browsertest.Tab){
		"it is readable in light and dark": contrasts, "it fits a phone": fitsAPhone,
		"it prints, with the evidence of failures": prints, "it is in order": isInOrder,
		"its picture is in docs": isInDocs,
	} {
		t.Run(name, func(t *testing.T) { test(t, open(t, b, example())) })
	}
	for name, r := range reports() {
		t.Run("it loads nothing and the console is silent, "+name, func(t *testing.T) {
			page := open(t, b, r)
			page.Do(browsertest.Scheme("dark"), browsertest.Scheme("light"))
			requests, messages := page.Seen()
			// The first request is the page's own, and data:, that of the empty icon.
			if len(requests) == 0 || len(messages) > 0 || slices.ContainsFunc(requests[1:],
				func(request string) bool { return request != "data:," }) {
				t.Errorf("the page loads %q, and the console says %q", requests, messages)
			}
			fitsAPhone(t, page)
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

func fitsAPhone(t *testing.T, page *browsertest.Tab) {
	page.Do(emulation.SetDeviceMetricsOverride(390, 844, 2, true))
	for _, font := range []int{100, 125} { // percent, because other machines have wider fonts
		page.Do(chromedp.Evaluate(fmt.Sprintf(
			`document.documentElement.style.fontSize = "%d%%"`, font), nil))
		widths := browsertest.Evaluate[[]int](page, `[document.documentElement.scrollWidth,
			document.documentElement.clientWidth, innerWidth]`)
		if widths[0] > widths[1] || widths[1] != 390 || widths[2] != 390 {
			t.Errorf("the page is %d wide on a screen of %d (%d) with fonts of %d %%, "+
				"expected no more than 390", widths[0], widths[1], widths[2], font)
		}
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
		if err := os.WriteFile(picture, png, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for what, content := range map[string][]byte{"a new picture": png,
		picture: must(os.ReadFile(picture))(t)} {
		if !bytes.HasPrefix(content, []byte("\x89PNG")) || len(content) > 300_000 {
			t.Errorf("%s has %d bytes, expected a PNG of at most 300 kB", what, len(content))
		}
	}
}
