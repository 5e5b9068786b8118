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

// Write writes the report into a folder, which it creates if needed: report.json, junit.xml and
// index.html. It replaces every occurrence of the secrets, such as the token, with "[redacted]".
//
// It also writes an inconsistent report, because that is the only record of the run. The error
// then names what is wrong.
func Write(dir string, r *Report, secrets ...string) error {
	clean := r.scrub(secrets)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the folder of the report: %w", err)
	}
	var failed []error
	for _, file := range []struct {
		name   string
		render func(*Report) ([]byte, error)
	}{{jsonFile, encode}, {junitFile, junit}, {pageFile, renderPage}} {
		content, err := file.render(clean)
		if err == nil {
			err = replaceFile(filepath.Join(dir, file.name), content)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("write %s: %w", file.name, err))
		}
	}
	if err := clean.Check(); err != nil {
		failed = append(failed, fmt.Errorf("the report in %s does not add up: %w", dir, err))
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

// replaceFile replaces a file as a whole or not at all.
func replaceFile(path string, content []byte) (err error) {
	file, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(file.Name())
		}
	}()
	_, err = file.Write(content)
	if err = errors.Join(err, file.Chmod(0o644), file.Close()); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
