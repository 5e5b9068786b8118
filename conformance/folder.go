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

// folder returns the folder of the report.
func (w *job) folder() string { return cmp.Or(w.settings.report, prefix+w.id) }

// tryFolder creates the report's folder and writes into it, so that a run does not fail at its
// end because of it. It removes what it created, so that a killed run leaves no empty folder.
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
	// Write returns an error also for a report that does not add up, but writes it. A file without
	// the ID of this run belongs to another run.
	written, _ := os.ReadFile(filepath.Join(folder, "report.json"))
	if w.dir != nil && !strings.Contains(string(written), w.id) {
		folder = filepath.Join(w.dir.Dir, "report")
		w.dir.Failed()
		err = errors.Join(err, report.Write(folder, w.report, w.token))
	}
	return folder, err
}
