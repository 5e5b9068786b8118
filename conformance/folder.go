package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// folder returns the folder of the report.
func (w *job) folder() string { return cmp.Or(w.settings.report, prefix+w.id) }

// tryFolder makes the report's folder, so that a run does not fail at its end because of it. It
// removes the folder, so that a killed run leaves no empty one.
func (w *job) tryFolder() error {
	if err := report.MakeFolder(w.folder()); err != nil {
		return err
	}
	return os.Remove(w.folder())
}

// fixFolder makes the path of the report's folder absolute, because the program's working
// directory may be removed.
func (w *job) fixFolder() (err error) {
	if w.settings.report, err = filepath.Abs(w.folder()); err != nil {
		return fmt.Errorf("the directory of this program is gone: %w; change to another one", err)
	}
	return nil
}

// writeReport writes the report and returns its folder. If the report's folder cannot be written,
// the report is in the run's directory.
func (w *job) writeReport() (folder string, err error) {
	folder = w.folder()
	err = report.Write(folder, w.report, w.token)
	if w.dir != nil && errors.Is(err, report.ErrNotWritten) {
		folder = filepath.Join(w.dir.Dir, "report")
		w.dir.Failed()
		err = errors.Join(err, report.Write(folder, w.report, w.token))
	}
	return folder, err
}
