package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// fields parses a JSON object as the rack does. A required field must exist, an unknown field is
// ignored, a known field may occur only once, and the error names the path of the first mistake
// (A06).
type fields struct {
	raw map[string]json.RawMessage
	// repeated are the keys that occur more than once in the object.
	repeated map[string]bool
	path     string
	err      *error
}

func parseFields(body []byte) (*fields, error) {
	var err error
	f := &fields{err: &err}
	f.decode(body)
	return f, err
}

// decode parses one object, and ignores any text after it.
func (f *fields) decode(data []byte) {
	f.raw, f.repeated = map[string]json.RawMessage{}, map[string]bool{}
	data = bytes.TrimSpace(data)
	if len(data) == 0 {
		f.fail("", "EOF while parsing a value")
		return
	}
	if data[0] != '{' && json.Valid(data) {
		f.fail("", unexpected(data, "an object"))
		return
	}
	if err := f.decodeMembers(json.NewDecoder(bytes.NewReader(data))); errors.Is(err, io.EOF) ||
		errors.Is(err, io.ErrUnexpectedEOF) {
		f.fail("", "EOF while parsing an object")
	} else if err != nil {
		f.fail("", "expected value")
	}
}

func (f *fields) decodeMembers(d *json.Decoder) error {
	_, err := d.Token()
	for err == nil && d.More() {
		var key json.Token
		if key, err = d.Token(); err != nil {
			return err
		}
		var value json.RawMessage
		err = d.Decode(&value)
		name, _ := key.(string)
		_, f.repeated[name] = f.raw[name]
		f.raw[name] = value
	}
	if err == nil {
		_, err = d.Token()
	}
	return err
}

// unexpected returns serde's message for a value of the wrong kind.
func unexpected(raw json.RawMessage, expected string) string {
	found, what := string(raw), "type"
	switch {
	case found[0] == 'n':
	case found[0] == '"':
		found = "string " + found
	case found[0] == '{':
		found = "map"
	case found[0] == '[':
		found = "sequence"
	case found[0] == 't' || found[0] == 'f':
		found = "boolean `" + found + "`"
	case strings.ContainsAny(found, ".eE"):
		found = "floating point `" + found + "`"
	default:
		found = "integer `" + found + "`"
		if strings.HasPrefix(expected, "u") {
			what = "value"
		}
	}
	return fmt.Sprintf("invalid %s: %s, expected %s", what, found, expected)
}

// fail records the first mistake.
func (f *fields) fail(name, problem string) {
	if *f.err != nil {
		return
	}
	if path := f.at(name); path != "" {
		problem = path + ": " + problem
	}
	*f.err = badBody("%s", problem)
}

func (f *fields) at(name string) string {
	if f.path == "" || name == "" {
		return f.path + name
	}
	return f.path + "." + name
}

// get returns a field that the rack knows. Such a field may occur only once (A63).
func (f *fields) get(name string) (json.RawMessage, bool) {
	if f.repeated[name] {
		f.fail("", duplicateField(name))
	}
	raw, ok := f.raw[name]
	return raw, ok
}

// has reports whether a field exists and is not null.
func (f *fields) has(name string) bool {
	raw, ok := f.get(name)
	return ok && string(raw) != "null"
}

func (f *fields) read(name, expected string, into any) bool {
	raw, ok := f.get(name)
	if !ok {
		f.fail("", missingField(name))
		return false
	}
	if string(raw) == "null" || json.Unmarshal(raw, into) != nil {
		f.fail(name, unexpected(raw, expected))
		return false
	}
	return true
}

// identity reads name and description. The error for a bad name has no path, unlike all others
// (A06).
func (f *fields) identity() (name, description string) {
	name = f.text("name")
	if problem := store.CheckName(name); problem != "" {
		f.fail("", problem)
	}
	return name, f.text("description")
}

// newIdentity reads the name and the description of an update, which may be missing.
func (f *fields) newIdentity() (name, description *string) {
	if f.has("name") {
		text := f.text("name")
		if problem := store.CheckName(text); problem != "" {
			f.fail("", problem)
		}
		name = &text
	}
	if f.has("description") {
		text := f.text("description")
		description = &text
	}
	return name, description
}

func (f *fields) text(name string) (s string) {
	f.read(name, "a string", &s)
	return s
}

func (f *fields) flag(name string, absent bool) bool {
	if _, ok := f.get(name); !ok {
		return absent
	}
	f.read(name, "a boolean", &absent)
	return absent
}

func (f *fields) name(name string) string {
	s := f.text(name)
	if problem := store.CheckName(s); problem != "" {
		f.fail(name, problem)
	}
	return s
}

func (f *fields) nameOrID(name string) store.Selector {
	sel, problem := store.ParseSelector(f.text(name))
	if problem != "" {
		f.fail(name, problem)
	}
	return sel
}

func (f *fields) namesOrIDs(name string) []store.Selector {
	var texts []string
	f.read(name, "a sequence", &texts)
	list := []store.Selector{}
	for n, text := range texts {
		sel, problem := store.ParseSelector(text)
		if problem != "" {
			f.fail(fmt.Sprintf("%s[%d]", name, n), problem)
		}
		list = append(list, sel)
	}
	return list
}

func (f *fields) uuid(name string) string {
	id, err := uuid.Parse(f.text(name))
	if err != nil {
		f.fail(name, "UUID parsing failed: "+err.Error())
	}
	return id.String()
}

// byteCount reads a size, which the rack keeps in signed 64 bits (A07).
func (f *fields) byteCount(name string) int64 {
	var size uint64
	if f.read(name, "u64", &size) && size > math.MaxInt64 {
		f.fail(name, "value is too large for a byte count")
	}
	return int64(size)
}

func (f *fields) cpus(name string) int {
	var n uint16
	f.read(name, "u16", &n)
	return int(n)
}

// blockSize reads a block size. The rack checks it while it reads the body, so its error has no
// code (A08).
func (f *fields) blockSize(name string) int {
	var size uint32
	if f.read(name, "u32", &size) && size != 512 && size != 2048 && size != 4096 {
		f.fail(name, fmt.Sprintf("invalid block size %d", size))
	}
	return int(size)
}

func (f *fields) object(name string) *fields {
	nested := &fields{path: f.at(name), err: f.err}
	var raw json.RawMessage
	if f.read(name, "an object", &raw) {
		nested.decode(raw)
	}
	return nested
}

// list reads an optional list of objects.
func (f *fields) list(name string) []*fields {
	if _, ok := f.get(name); !ok {
		return nil
	}
	var raw []json.RawMessage
	f.read(name, "a sequence", &raw)
	list := make([]*fields, len(raw))
	for i := range raw {
		list[i] = &fields{path: fmt.Sprintf("%s[%d]", f.at(name), i), err: f.err}
		list[i].decode(raw[i])
	}
	return list
}

// variant reads the tag of a tagged object.
func (f *fields) variant(allowed ...string) string {
	tag := f.text("type")
	if !slices.Contains(allowed, tag) {
		f.fail("", unknownVariant(tag, allowed))
	}
	return tag
}

// nullable reports whether a required field is not null.
func (f *fields) nullable(name string) bool {
	if _, ok := f.get(name); !ok {
		f.fail("", missingField(name))
	}
	return f.has(name)
}

func (f *fields) oneOf(name string, allowed []string) *string {
	s := f.text(name)
	if !slices.Contains(allowed, s) {
		f.fail(name, unknownVariant(s, allowed))
	}
	return &s
}
