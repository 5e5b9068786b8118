// Package browsertest opens web pages in a headless browser, for tests.
package browsertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// Tab is a browser tab. It records its page's requests and console messages.
type Tab struct {
	*testing.T
	ctx context.Context

	mu sync.Mutex
	// guarded by mu
	requests []string
	messages []string
}

// Browser is a headless browser.
type Browser struct{ ctx context.Context }

// Start starts a browser, and closes it at the end of the test.
func Start(t *testing.T) Browser {
	t.Helper()
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.Flag("disable-gpu", true))
	if os.Geteuid() == 0 {
		options = append(options, chromedp.NoSandbox) // as root, Chromium refuses to run with a sandbox
	}
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	t.Cleanup(cancel)
	ctx, cancel = chromedp.NewExecAllocator(ctx, options...)
	t.Cleanup(cancel)
	ctx, _ = chromedp.NewContext(ctx)
	err := chromedp.Run(ctx)
	if errors.Is(err, exec.ErrNotFound) {
		t.Fatal("this test needs a browser, and there is no Chromium or Google Chrome in PATH: " +
			"run tools/prerequisites --browser, or on Debian apt-get install chromium")
	}
	if err != nil {
		t.Fatalf("start a browser: %v", err)
	}
	t.Cleanup(func() {
		if err := chromedp.Cancel(ctx); err != nil {
			t.Errorf("close the browser: %v", err)
		}
	})
	return Browser{ctx}
}

// Open runs the actions in a new tab, and then opens the address there.
func (b Browser) Open(t *testing.T, address string, before ...chromedp.Action) *Tab {
	t.Helper()
	ctx, cancel := chromedp.NewContext(b.ctx)
	t.Cleanup(cancel)
	opened := &Tab{T: t, ctx: ctx}
	chromedp.ListenTarget(ctx, opened.note)
	opened.Do(network.Enable(), log.Enable(), runtime.Enable())
	opened.Do(before...)
	opened.Do(chromedp.Navigate(address))
	return opened
}

func (b *Tab) note(event any) {
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

// Seen returns the addresses that the page has requested, and its console messages.
func (b *Tab) Seen() (requests, messages []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.requests), slices.Clone(b.messages)
}

// Do runs actions and ends the test if one fails.
func (b *Tab) Do(actions ...chromedp.Action) {
	b.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// Follow runs actions that lead to another page, and waits until that page is loaded.
func (b *Tab) Follow(actions ...chromedp.Action) {
	b.Helper()
	if _, err := chromedp.RunResponse(b.ctx, actions...); err != nil {
		b.Fatal(err)
	}
}

// Evaluate returns the value of a script that it runs in the page.
func Evaluate[T any](b *Tab, script string) (value T) {
	b.Helper()
	b.Do(chromedp.Evaluate(script, &value))
	return value
}

// Scheme returns an action that sets the preferred color scheme, light or dark.
func Scheme(name string) chromedp.Action {
	return emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{
		{Name: "prefers-color-scheme", Value: name},
	})
}

// Size returns an action that sets the window's size.
func Size(width, height int64) chromedp.Action {
	return emulation.SetDeviceMetricsOverride(width, height, 1, false)
}

// contrasts is a script. It returns the contrast between text and background for each element that
// itself contains text. The contrast is that of WCAG 2, but without an exception for large text.
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

// Contrast is the luminance ratio of a text and its background.
type Contrast struct {
	What  string
	Ratio float64
}

// Contrasts returns the contrasts of all visible texts.
func Contrasts(b *Tab) []Contrast {
	b.Helper()
	return Evaluate[[]Contrast](b, contrasts)
}
