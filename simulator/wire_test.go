package simulator

import (
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// wireCase is a call by hand and how the rack answers it; message is "" where it does not refuse.
type wireCase struct {
	name, path, body string
	status           int
	message          string
}

// check makes the call: a POST where there is a body.
func (c wireCase) check(t *testing.T, r *rack) {
	t.Run(c.name, func(t *testing.T) {
		method := "GET"
		if c.body != "" {
			method = "POST"
		}
		resp, body := r.call(method, c.path, c.body)
		got := unmarshal[errorBody](t, body)
		if resp.status != c.status || got.Message != c.message || got.ErrorCode != "" {
			t.Errorf("got %d %s, want %d %q", resp.status, body, c.status, c.message)
		}
	})
}

func TestA61EmptySegmentsOfAPathAreDropped(t *testing.T) {
	r := newRack(t, engine.Config{})
	r.disk("d")
	for _, test := range []wireCase{
		{"behind", "/v1/disks/?project=default", "", 200, ""},
		{"within", "/v1//disks///d?project=default", "", 200, ""},
		{"before", "//v1/disks?project=default", "", 200, ""},
		{"a dot", "/v1/./disks?project=default", "", 400, "invalid path encoding"},
		{"two dots", "/v1/disks/../disks?project=default", "", 400, "invalid path encoding"},
		{"no UTF-8", "/v1/disks/%ff?project=default", "", 400, "invalid path encoding"},
		{"a dot in escapes is a name", "/v1/disks/%2e?project=default", "", 400,
			"bad parameter in URL path: " + store.InvalidNameOrID},
		{"a slash in escapes is a name", "/v1%2fdisks?project=default", "", 404, "Not Found"},
	} {
		test.check(t, r)
	}
}

func TestA62QueriesAreReadAsByTheRack(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := r.disk("d")
	token := must[*oxide.DiskResultsPage](t)(r.DiskList(t.Context(),
		oxide.DiskListParams{Project: "default"})).NextPage
	const bad = "unable to parse query string: "
	list := "/v1/disks?project=default"
	for _, test := range []wireCase{
		{"limit of nothing", list + "&limit=0", "", 400,
			bad + "invalid value: integer `0`, expected a nonzero u32"},
		{"limit beyond u32", list + "&limit=5000000000", "", 400,
			bad + "number too large to fit in target type"},
		{"limit that is no number", list + "&limit=x", "", 400,
			bad + "invalid digit found in string"},
		{"negative limit", list + "&limit=-1", "", 400, bad + "invalid digit found in string"},
		{"empty limit", list + "&limit=", "", 400,
			bad + "cannot parse integer from empty string"},
		{"empty token", list + "&page_token=", "", 400,
			bad + "failed to parse pagination token: corrupted token"},
		{"empty order", list + "&sort_by=", "", 400, bad + "unknown variant ``, expected one of " +
			"`name_ascending`, `name_descending`, `id_ascending`"},
		{"empty project", "/v1/disks?project=", "", 400, bad + store.InvalidNameOrID},
		{"no project", "/v1/disks", "", 400, bad + "missing field `project`"},
		{"two projects, of which the last counts", "/v1/disks?project=X&project=default", "", 200, ""},
		{"two projects, the last a bad one", "/v1/disks?project=default&project=X", "", 400,
			bad + store.InvalidNameOrID},
		{"two orders, of which the last counts", list + "&sort_by=x&sort_by=id_ascending", "", 200,
			""},
		{"two tokens, of which the last counts", list + "&page_token=x&page_token=" + token, "",
			200, ""},
		{"two limits", list + "&limit=1&limit=1", "", 400, bad + "duplicate field `limit`"},
		{"two of what is unknown", list + "&x=1&x=2", "", 200, ""},
		{"two projects for one disk", "/v1/disks/d?project=default&project=default", "", 400,
			bad + "duplicate field `project`"},
		{"two of what is unknown to a view", "/v1/disks/d?project=default&limit=1&limit=2", "", 200,
			""},
		{"empty project for an ID", "/v1/disks/" + d.Id + "?project=", "", 400,
			bad + store.InvalidNameOrID},
		{"two projects for a new disk", "/v1/disks?project=default&project=default", "{}", 400,
			bad + "duplicate field `project`"},
		{"a new disk without project", "/v1/disks", "{}", 400, bad + "missing field `project`"},
		{"two instances, of which the last counts",
			"/v1/network-interfaces?project=default&instance=X&instance=a", "", 200, ""},
		{"no instance", "/v1/network-interfaces?project=default", "", 400,
			bad + "missing field `instance`"},
	} {
		test.check(t, r)
	}
}

// diskBody is a body that makes a disk, with some of its text replaced.
func diskBody(change ...string) string {
	return strings.NewReplacer(change...).Replace(`{"name":"d","description":"",` +
		`"size":1073741824,"disk_backend":{"type":"distributed",` +
		`"disk_source":{"type":"blank","block_size":512}}}`)
}

func TestA06BadBodies(t *testing.T) {
	r := newRack(t, engine.Config{})
	const unknown = `{"x":1,"x":2,"name"`
	for _, test := range []struct{ name, body, message string }{
		{"nothing", " ", "EOF while parsing a value"},
		{"the beginning of an object", "{", "EOF while parsing an object"},
		{"the beginning of a text", `{"name":"d`, "EOF while parsing an object"},
		{"no JSON", "nope", "expected value"},
		{"a comma too many", `{"name":"d",}`, "expected value"},
		{"null", "null", "invalid type: null, expected an object"},
		{"a list", "[]", "invalid type: sequence, expected an object"},
		{"no name", diskBody(`"name":"d",`, ""), "missing field `name`"},
		{"no description", diskBody(`"description":"",`, ""), "missing field `description`"},
		{"a bad name, which has no path", diskBody(`"name":"d"`, `"name":"D"`),
			"name must begin with an ASCII lowercase character"},
		{"a name of another type", diskBody(`"name":"d"`, `"name":{}`),
			"name: invalid type: map, expected a string"},
		{"a text for a size", diskBody("1073741824", `"1"`),
			`size: invalid type: string "1", expected u64`},
		{"a fraction for a size", diskBody("1073741824", "1.5"),
			"size: invalid type: floating point `1.5`, expected u64"},
		{"a truth for a size", diskBody("1073741824", "true"),
			"size: invalid type: boolean `true`, expected u64"},
		{"a negative size", diskBody("1073741824", "-1"),
			"size: invalid value: integer `-1`, expected u64"},
		{"a size beyond the rack's", diskBody("1073741824", "18446744073709551615"),
			"size: value is too large for a byte count"},
		{"a bad block size", diskBody("512", "1024"),
			"disk_backend.disk_source.block_size: invalid block size 1024"},
		{"an unknown backend", diskBody(`"distributed"`, `"tape"`),
			"disk_backend: unknown variant `tape`, expected `local` or `distributed`"},
		{"an unknown source", diskBody(`"blank"`, `"tape"`),
			"disk_backend.disk_source: unknown variant `tape`, expected one of `blank`, " +
				"`snapshot`, `image`, `importing_blocks`"},
		{"a null backend", diskBody(`{"type":"distributed",`+
			`"disk_source":{"type":"blank","block_size":512}}`, "null"),
			"disk_backend: invalid type: null, expected an object"},
		{"a text for a backend", diskBody(`{"type":"distributed",`+
			`"disk_source":{"type":"blank","block_size":512}}`, `"local"`),
			`disk_backend: invalid type: string "local", expected an object`},
		{"A63 a known key twice", diskBody(`{"name"`, `{"name":"d","name"`), "duplicate field `name`"},
		{"A63 three times", diskBody(`{"name"`, `{"name":"d","name":"d","name"`),
			"duplicate field `name`"},
		{"A63 twice in another's object", diskBody(`"block_size"`, `"block_size":512,"block_size"`),
			"disk_backend.disk_source: duplicate field `block_size`"},
		{"A63 a tag twice", diskBody(`"type":"blank"`, `"type":"blank","type":"blank"`),
			"disk_backend.disk_source: duplicate field `type`"},
		{"A63 an unknown key twice", diskBody(`{"name"`, unknown, `"d"`, `"one"`), ""},
		{"A63 what is behind the object is not read",
			diskBody(`"d"`, `"two"`) + ` and more`, ""},
	} {
		c := wireCase{test.name, "/v1/disks?project=default", test.body, 201, ""}
		if test.message != "" {
			c.status, c.message = 400, "unable to parse JSON body: "+test.message
		}
		c.check(t, r)
	}
	wireCase{"neither a name nor an ID", "/v1/instances/a/disks/attach?project=default",
		`{"disk":"D"}`, 400, "unable to parse JSON body: disk: " + store.InvalidNameOrID}.check(t, r)
}
