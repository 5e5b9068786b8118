package simulator

import (
	"encoding/json"
	"fmt"
	"math"
	"slices"

	"github.com/google/uuid"
)

// fields reads a JSON object the way the rack does: what must be there must be there, what is
// unknown is ignored, and the first mistake is named by its path (A06).
type fields struct {
	raw  map[string]json.RawMessage
	path string
	err  *error
}

func parseFields(body []byte) (*fields, error) {
	var err error
	f := &fields{err: &err}
	if jsonErr := json.Unmarshal(body, &f.raw); jsonErr != nil {
		return f, badBody("%s", jsonErr)
	}
	if f.raw == nil {
		return f, badBody("invalid type: null, expected an object")
	}
	return f, nil
}

// fail keeps the first mistake.
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

// has says that a field is there and not null.
func (f *fields) has(name string) bool {
	raw, ok := f.raw[name]
	return ok && string(raw) != "null"
}

// read decodes a required field.
func (f *fields) read(name, expected string, into any) bool {
	raw, ok := f.raw[name]
	if !ok {
		f.fail("", fmt.Sprintf("missing field `%s`", name))
		return false
	}
	if string(raw) == "null" || json.Unmarshal(raw, into) != nil {
		f.fail(name, fmt.Sprintf("invalid value: %.40s, expected %s", raw, expected))
		return false
	}
	return true
}

func (f *fields) text(name string) (s string) {
	f.read(name, "a string", &s)
	return s
}

func (f *fields) flag(name string, absent bool) bool {
	if _, ok := f.raw[name]; !ok {
		return absent
	}
	f.read(name, "a boolean", &absent)
	return absent
}

func (f *fields) name(name string) string {
	s := f.text(name)
	if problem := nameProblem(s); problem != "" {
		f.fail(name, problem)
	}
	return s
}

func (f *fields) nameOrID(name string) selector {
	sel, problem := parseSelector(f.text(name))
	if problem != "" {
		f.fail(name, problem)
	}
	return sel
}

func (f *fields) uuid(name string) string {
	id, err := uuid.Parse(f.text(name))
	if err != nil {
		f.fail(name, "UUID parsing failed: "+err.Error())
	}
	return id.String()
}

// byteCount reads a size. The rack keeps sizes in signed 64 bits (A07).
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

// blockSize is checked while the body is read, which is why its error has no code (A08).
func (f *fields) blockSize(name string) int {
	var size int
	if f.read(name, "an integer", &size) && size != 512 && size != 2048 && size != 4096 {
		f.fail(name, fmt.Sprintf("invalid block size %d", size))
	}
	return size
}

// object reads a nested object.
func (f *fields) object(name string) *fields {
	nested := &fields{raw: map[string]json.RawMessage{}, path: f.at(name), err: f.err}
	f.read(name, "an object", &nested.raw)
	return nested
}

// list reads an optional list of objects.
func (f *fields) list(name string) []*fields {
	if _, ok := f.raw[name]; !ok {
		return nil
	}
	var raw []map[string]json.RawMessage
	f.read(name, "a sequence of objects", &raw)
	list := make([]*fields, len(raw))
	for i := range raw {
		list[i] = &fields{raw: raw[i], path: fmt.Sprintf("%s[%d]", f.at(name), i), err: f.err}
	}
	return list
}

// variant reads the tag of a tagged object.
func (f *fields) variant(allowed ...string) string {
	tag := f.text("type")
	for _, a := range allowed {
		if tag == a {
			return tag
		}
	}
	f.fail("", fmt.Sprintf("unknown variant `%s`, expected one of %q", tag, allowed))
	return tag
}

// nullable says that a field, which must be there, is not null.
func (f *fields) nullable(name string) bool {
	if _, ok := f.raw[name]; !ok {
		f.fail("", fmt.Sprintf("missing field `%s`", name))
	}
	return f.has(name)
}

func (f *fields) oneOf(name string, allowed []string) *string {
	s := f.text(name)
	if !slices.Contains(allowed, s) {
		f.fail(name, fmt.Sprintf("unknown variant `%s`, expected one of %q", s, allowed))
	}
	return &s
}
