package report

import (
	"bytes"
	_ "embed"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"

	"github.com/santhosh-tekuri/jsonschema/v6"
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

// writeNew writes a file that does not exist.
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

// maxBytes limits the bytes that Read loads into memory. A large report has a tenth of it.
const maxBytes = 256 << 20

// schemaText is the JSON Schema of report.json.
//
//go:embed report.schema.json
var schemaText []byte

var compiledSchema = sync.OnceValues(func() (*jsonschema.Schema, error) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(schemaText))
	if err != nil {
		return nil, err
	}
	compiler := jsonschema.NewCompiler()
	compiler.AssertFormat()
	if err := compiler.AddResource("report.schema.json", document); err != nil {
		return nil, err
	}
	return compiler.Compile("report.schema.json")
})

// Read reads a report from path, which is its folder or its report.json. It accepts only a report
// that matches the schema and is consistent.
func Read(path string) (*Report, error) {
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		path = filepath.Join(path, jsonFile)
	}
	file, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO would wait
	if err != nil {
		return nil, fmt.Errorf("read a report: %w (expected a folder that oxide-conformance wrote, "+
			"or its %s)", err, jsonFile)
	}
	defer func() { _ = file.Close() }()
	text, err := io.ReadAll(io.LimitReader(file, maxBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read a report: %w", err)
	}
	if len(text) > maxBytes {
		return nil, fmt.Errorf("%s is no report: it has more than %d MiB", path, maxBytes>>20)
	}
	r, err := decode(text)
	if err != nil {
		return nil, fmt.Errorf("%s is no report: %w", path, err)
	}
	return r, nil
}

func decode(text []byte) (*Report, error) {
	document, err := jsonschema.UnmarshalJSON(bytes.NewReader(text))
	if err != nil {
		return nil, fmt.Errorf("expected JSON: %w", err)
	}
	if err := validate(document); err != nil {
		return nil, err
	}
	var r Report
	if err := json.Unmarshal(text, &r); err != nil {
		return nil, err
	}
	if err := r.Check(); err != nil {
		return nil, fmt.Errorf("it does not add up: %w", err)
	}
	return &r, nil
}

// validate compares a document with the schema. Its error names the first difference.
func validate(document any) error {
	schema, err := compiledSchema()
	if err != nil {
		return err
	}
	if object, ok := document.(map[string]any); ok {
		version, ok := object["schema"].(json.Number)
		if ok && version.String() != fmt.Sprint(SchemaVersion) {
			return fmt.Errorf("it was written in schema %s, and this program reads schema %d: "+
				"use the oxide-conformance that wrote it", version, SchemaVersion)
		}
	}
	err = schema.Validate(document)
	var invalid *jsonschema.ValidationError
	if !errors.As(err, &invalid) {
		return err
	}
	for len(invalid.Causes) > 0 {
		invalid = invalid.Causes[0]
	}
	place := "the report"
	if unit := invalid.BasicOutput(); unit.InstanceLocation != "" {
		place = unit.InstanceLocation
	}
	return fmt.Errorf("at %s: %s", place, invalid.BasicOutput().Error)
}
