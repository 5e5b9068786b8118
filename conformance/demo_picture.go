package conformance

import (
	"context"
	"errors"
	"os"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
)

// pictureFile is the environment variable that names the file to which the demo writes a page of
// the whole life.
const pictureFile = "PICTURE"

// draw draws the life that the demo has shown. A life that ended with an error is drawn up to
// the error.
func (d *demo) draw(ctx context.Context, broken error) error {
	path := os.Getenv(pictureFile)
	if path == "" || ctx.Err() != nil {
		return broken
	}
	page := history.Page{Title: "The life of a volume", Command: pictureFile + "=FILE make demo",
		At: time.Now()}
	if broken != nil {
		page.Broken, page.Evidence = broken.Error(), d.Rack.Dir
	}
	events, since, dropped := d.Rack.History.Events()
	more, err := harness.Events(ctx, d.Rack, since, d.Plugins...)
	page.Events, page.Dropped = slices.Concat(events, more), dropped
	if err = errors.Join(err, page.WriteFile(path)); err == nil {
		d.say("\nThe life is drawn in %s", path)
	}
	return errors.Join(broken, err)
}
