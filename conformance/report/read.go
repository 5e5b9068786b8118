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
