package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// folder is where the report goes.
func (w *job) folder() string { return cmp.Or(w.settings.report, prefix+w.id) }

// tryFolder makes the report's folder and writes into it, before a run that would be for nothing.
// What it made it removes: a run that is killed has no report.
func (w *job) tryFolder() error {
	_, missing := os.Stat(w.folder())
	if _, err := os.Lstat(filepath.Join(w.folder(), "report.json")); err == nil {
		return fmt.Errorf("%s has the report of another run; name another folder with --report",
			w.folder())
	}
	if err := os.MkdirAll(w.folder(), 0o755); err != nil {
		return fmt.Errorf("make the folder of the report: %w; name another one with --report", err)
	}
	file, err := os.CreateTemp(w.folder(), ".try-*")
	if err != nil {
		return fmt.Errorf("write into the folder of the report: %w; name another one with --report",
			err)
	}
	err = errors.Join(file.Close(), os.Remove(file.Name()))
	if missing != nil {
		err = errors.Join(err, os.Remove(w.folder()))
	}
	return err
}

// fixFolder makes the folder of the report independent of the program's directory, which may be
// taken away.
func (w *job) fixFolder() (err error) {
	if w.settings.report, err = filepath.Abs(w.folder()); err != nil {
		return fmt.Errorf("the directory of this program is gone: %w; change to another one", err)
	}
	return nil
}

// writeReport writes the report, and returns where it is: if its folder takes no more, it is kept
// in the run's directory.
func (w *job) writeReport() (folder string, err error) {
	folder = w.folder()
	err = report.Write(folder, w.report, w.token)
	// One that does not add up is there, and another run's is not this.
	written, _ := os.ReadFile(filepath.Join(folder, "report.json"))
	if w.dir != nil && !strings.Contains(string(written), w.id) {
		folder = filepath.Join(w.dir.Dir, "report")
		w.dir.Failed()
		err = errors.Join(err, report.Write(folder, w.report, w.token))
	}
	return folder, err
}
