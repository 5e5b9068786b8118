package report

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// These are the files of a report.
const (
	jsonFile  = "report.json"
	junitFile = "junit.xml"
	pageFile  = "index.html"
)

// ErrNotWritten is the error of Write if a file of the report is missing.
var ErrNotWritten = errors.New("the report is not complete")

// Write writes the report into a folder, which it makes: report.json, junit.xml and index.html. It
// replaces every occurrence of the secrets, such as the token, with "[redacted]".
//
// It also writes an inconsistent report, because that is the only record of the run. The error
// then names what is wrong.
func Write(dir string, r *Report, secrets ...string) error {
	clean := r.scrub(secrets)
	if err := MakeFolder(dir); err != nil {
		return errors.Join(ErrNotWritten, err)
	}
	var failed []error
	var wrong error
	for _, file := range []struct {
		name   string
		render func(*Report) ([]byte, error)
	}{{jsonFile, encode}, {junitFile, junit}, {pageFile, renderPage}} {
		content, err := file.render(clean)
		if err == nil {
			err = writeNew(filepath.Join(dir, file.name), content)
		}
		if err == nil && file.name == jsonFile {
			_, wrong = decode(content)
		}
		if err != nil {
			failed = append(failed, ErrNotWritten, fmt.Errorf("write %s: %w", file.name, err))
		}
	}
	if wrong != nil {
		failed = append(failed, fmt.Errorf("the report in %s: %w", dir, wrong))
	}
	return errors.Join(failed...)
}

func encode(r *Report) ([]byte, error) {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", "  ")
	err := encoder.Encode(r)
	return text.Bytes(), err
}

// writeNew writes a file that nobody else has made.
func writeNew(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	return errors.Join(err, file.Close())
}

// MakeFolder makes the folder of a report, which must not exist: what is in another folder may be
// somebody else's.
func MakeFolder(dir string) error {
	err := os.MkdirAll(filepath.Dir(dir), 0o755)
	if err == nil {
		err = os.Mkdir(dir, 0o755)
	}
	if err != nil {
		return fmt.Errorf("make the folder of the report: %w; name one that does not exist with --report",
			err)
	}
	return nil
}
