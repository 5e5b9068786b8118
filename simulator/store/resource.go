package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"strings"
)

// Resource is a record of an object that has no data plane, in the form of the API.
type Resource struct {
	Identity
	// Fields has the other fields by their names.
	Fields map[string]any
}

// Text returns a field that contains a text, or "".
func (r Resource) Text(name string) string {
	text, _ := r.Fields[name].(string)
	return text
}

// MarshalJSON writes the identity and then the other fields.
func (r Resource) MarshalJSON() ([]byte, error) {
	identity, err := json.Marshal(r.Identity)
	if err != nil || len(r.Fields) == 0 {
		return identity, err
	}
	fields, err := json.Marshal(r.Fields)
	if err != nil {
		return nil, err
	}
	return append(append(identity[:len(identity)-1], ','), fields[1:]...), nil
}

// UnmarshalJSON reads what MarshalJSON writes.
func (r *Resource) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, &r.Identity); err != nil {
		return err
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	r.Fields = map[string]any{}
	if err := d.Decode(&r.Fields); err != nil {
		return err
	}
	for _, name := range identityFields {
		delete(r.Fields, name)
	}
	return nil
}

var identityFields = []string{"id", "name", "description", "time_created", "time_modified"}

// Resources returns the table of one kind of resource. parent is the field with the ID of the
// parent, or "" if the silo is the parent.
func Resources(kind, parent string) Table[Resource] {
	return Table[Resource]{kind, func(r Resource) Identity { return r.Identity },
		func(r Resource) string { return r.Text(parent) }}
}

// bucketLinks has a key for each direction of every link.
var bucketLinks = []byte("links")

// Link records that two objects belong together, such as an instance and its SSH key.
func (tx *Tx) Link(kind, a, b string) {
	links := tx.Bucket(bucketLinks)
	tx.Check(errors.Join(links.Put(linkKey(a, kind, b), nil), links.Put(linkKey(b, kind, a), nil)))
}

// Unlink removes a link.
func (tx *Tx) Unlink(kind, a, b string) {
	links := tx.Bucket(bucketLinks)
	tx.Check(errors.Join(links.Delete(linkKey(a, kind, b)), links.Delete(linkKey(b, kind, a))))
}

// Linked returns the IDs of the objects that a link of that kind connects with an object.
func (tx *Tx) Linked(kind, id string) []string { return tx.keys(bucketLinks, id+"/"+kind+"/") }

// UnlinkAll removes all links of an object.
func (tx *Tx) UnlinkAll(id string) {
	for _, rest := range tx.keys(bucketLinks, id+"/") {
		kind, other, _ := strings.Cut(rest, "/")
		tx.Unlink(kind, id, other)
	}
}

func linkKey(a, kind, b string) []byte { return []byte(a + "/" + kind + "/" + b) }
