package report

import (
	"bytes"
	"cmp"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"html"
	"html/template"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode"

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

func writeNew(path string, content []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = file.Write(content)
	return errors.Join(err, file.Close())
}

// MakeFolder makes the folder of a report. The folder must not exist, because files in it may be
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

// maxBytes limits the bytes that Read loads into memory. A large report has a tenth of that.
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
	schema, err := compiledSchema()
	if err != nil {
		return nil, err
	}
	if object, ok := document.(map[string]any); ok {
		version, ok := object["schema"].(json.Number)
		if ok && version.String() != fmt.Sprint(SchemaVersion) {
			return nil, fmt.Errorf("it was written in schema %s, and this program reads schema %d: "+
				"use the oxide-conformance that wrote it", version, SchemaVersion)
		}
	}
	err = schema.Validate(document)
	if invalid, is := errors.AsType[*jsonschema.ValidationError](err); is {
		// Name the first difference.
		for len(invalid.Causes) > 0 {
			invalid = invalid.Causes[0]
		}
		unit := invalid.BasicOutput()
		err = fmt.Errorf("at %s: %s", cmp.Or(unit.InstanceLocation, "the report"), unit.Error)
	}
	if err != nil {
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

const redacted = "[redacted]"

// Redactor returns a replacer that replaces each secret with "[redacted]". It finds a secret
// unchanged; escaped for URLs, HTML and JSON; in hexadecimal digits; and in base64, where the
// secret may be a part of a longer text. It ignores a secret that consists of spaces only.
func Redactor(secrets ...string) *strings.Replacer {
	var found []string
	for _, secret := range secrets {
		found = append(append(found, forms(secret)...), forms(strings.TrimSpace(secret))...)
	}
	slices.SortFunc(found, func(a, b string) int { return len(b) - len(a) }) // the longest match first
	var pairs []string
	for _, form := range found {
		pairs = append(pairs, form, redacted)
	}
	return strings.NewReplacer(pairs...)
}

func forms(secret string) []string {
	if strings.TrimSpace(secret) == "" {
		return nil
	}
	quoted, _ := json.Marshal(secret) // a string always marshals
	inString := string(quoted[1 : len(quoted)-1])
	raw := strings.NewReplacer(`\u003c`, "<", `\u003e`, ">", `\u0026`, "&").Replace(inString)
	hexadecimal := hex.EncodeToString([]byte(secret))
	all := []string{
		secret, html.EscapeString(secret), template.HTMLEscapeString(secret),
		inString, raw, hexadecimal, strings.ToUpper(hexadecimal),
	}
	for _, escaped := range []string{url.QueryEscape(secret), url.PathEscape(secret)} {
		all = append(all, escaped, escape.ReplaceAllStringFunc(escaped, strings.ToLower))
	}
	// In base64 the secret may be alone or inside a longer text, where it has three forms for three
	// positions. Leave out characters that depend on other bytes, and short forms, because they occur
	// by chance.
	for _, encoding := range []*base64.Encoding{base64.StdEncoding, base64.URLEncoding} {
		all = append(all, encoding.EncodeToString([]byte(secret)))
		for before := range 3 {
			padded := strings.Repeat("\x00", before) + secret
			encoded := encoding.WithPadding(base64.NoPadding).EncodeToString([]byte(padded))
			first := (8*before + 5) / 6 // the first character that has only bits of the secret
			last := 8 * len(padded) / 6 // the first character behind them
			if last-first >= 8 {
				all = append(all, encoded[first:last])
			}
		}
	}
	return all
}

var escape = regexp.MustCompile(`%[0-9A-F]{2}`)

// scrub returns a copy of the report. Its strings are plain and contain no secret, and its slices
// and maps are not nil.
func (r *Report) scrub(secrets []string) *Report {
	replacer := Redactor(secrets...)
	clean := func(v reflect.Value) string { return Plain(replacer.Replace(v.String())) }
	scrubbed := copyOf(reflect.ValueOf(*r), clean).Interface().(Report)
	return &scrubbed
}

// copyOf returns a copy of a value in which the results of clean replace all strings.
func copyOf(v reflect.Value, clean func(reflect.Value) string) reflect.Value {
	if v.Type() == reflect.TypeFor[time.Time]() {
		return v
	}
	result := reflect.New(v.Type()).Elem()
	switch v.Kind() {
	case reflect.String:
		result.SetString(clean(v))
	case reflect.Struct:
		for i := range v.NumField() {
			result.Field(i).Set(copyOf(v.Field(i), clean))
		}
	case reflect.Slice:
		result.Set(reflect.MakeSlice(v.Type(), v.Len(), v.Len()))
		for i := range v.Len() {
			result.Index(i).Set(copyOf(v.Index(i), clean))
		}
	case reflect.Map:
		result.Set(reflect.MakeMapWithSize(v.Type(), v.Len()))
		for key, value := range v.Seq2() {
			result.SetMapIndex(copyOf(key, clean), copyOf(value, clean))
		}
	default:
		return v
	}
	return result
}

// Plain replaces everything in a text that a terminal or a page would interpret instead of showing
// it: control characters except line feeds and tabs, invisible marks, some of which change the
// direction of writing, and bytes that are not UTF-8. Texts of a rack may contain any of them.
func Plain(text string) string {
	return strings.Map(func(r rune) rune {
		if r != '\n' && r != '\t' && (unicode.IsControl(r) || unicode.Is(unicode.Cf, r) ||
			unicode.Is(unicode.Zl, r) || unicode.Is(unicode.Zp, r)) {
			return unicode.ReplacementChar
		}
		return r
	}, strings.ToValidUTF8(text, string(unicode.ReplacementChar)))
}

// PlainWriter replaces secrets with Redact, if that is not nil, and writes the text through Plain.
// Each Write must consist of whole characters.
type PlainWriter struct {
	To     io.Writer
	Redact *strings.Replacer
}

// Write writes the plain text.
func (w PlainWriter) Write(text []byte) (int, error) {
	clean := string(text)
	if w.Redact != nil {
		clean = w.Redact.Replace(clean)
	}
	if _, err := io.WriteString(w.To, Plain(clean)); err != nil {
		return 0, err
	}
	return len(text), nil
}
