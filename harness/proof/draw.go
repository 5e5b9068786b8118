package proof

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"html"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
)

// Failure is a history in which a promise was broken.
type Failure struct {
	// Name names the history, and its page.
	Name string
	// Seed is the seed of this history, or 0 if it is the proof's.
	Seed uint64
	// Broken describes the promise.
	Broken error
	// At is the time at which it was noticed; the zero time is now.
	At time.Time
	// Omit is an operation of the rack that the page omits, because the proof itself requests it.
	Omit string
	// Repeat is the command that repeats the history.
	Repeat string
	// Dir gets the page: the directory of the run.
	Dir string
	// Rack is nil where there is none, and Plugins are the drivers.
	Rack    *harness.Rack
	Plugins []*harness.Plugin
	// History records the calls since the history began.
	History *history.Recorder
}

// Draw draws a failed history as a page, prints the path of the page, and returns it. It must be
// called while the rack still runs, because the rack keeps its requests in memory. If the page
// cannot be drawn, the test still reports the failure of the history.
func (p *Proof) Draw(ctx context.Context, f Failure) (path string) {
	if f.At.IsZero() {
		f.At = time.Now()
	}
	// The test may have failed because its context has ended.
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
	defer cancel()
	events, since, dropped := f.History.Events()
	more, err := harness.Events(ctx, f.Rack, since, f.Plugins...)
	more = slices.DeleteFunc(more, func(e history.Event) bool {
		return f.Omit != "" && e.Lane == history.Rack && strings.HasPrefix(e.Name, f.Omit+" ")
	})
	path = filepath.Join(f.Dir, p.Name+fileName(f.Name)+".html")
	page := history.Page{Title: p.Name + ": " + f.Name,
		Seed: fmt.Sprint(cmp.Or(f.Seed, p.Seed)), Command: f.Repeat, Broken: f.Broken.Error(),
		At: f.At, Evidence: f.Dir, Events: append(events, more...), Dropped: dropped}
	if err := errors.Join(err, page.WriteFile(path)); err != nil {
		p.Say("the page of the failed history is incomplete: %v", err)
	}
	if _, again := p.drawn.LoadOrStore(path, true); !again {
		p.Say("the failed history is drawn in %s", path)
	}
	return path
}

// fileName returns the name of a history as a part of a file's name.
func fileName(name string) string {
	var b strings.Builder
	for _, part := range strings.FieldsFunc(strings.ToLower(name), func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	}) {
		if b.Len()+len(part) < 120 {
			b.WriteString("-" + part)
		}
	}
	return b.String()
}

// CheckPage returns an error unless a page shows the texts, and the seed.
func (p *Proof) CheckPage(path string, texts ...string) error {
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	shown := html.UnescapeString(string(b))
	for _, text := range append(texts, fmt.Sprintf(`<dd id="seed"><code>%d</code>`, p.Seed)) {
		if !strings.Contains(shown, text) {
			err = errors.Join(err, fmt.Errorf("the page %s does not show %q", path, text))
		}
	}
	return err
}
