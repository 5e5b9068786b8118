package simulator

import (
	"testing"

	"github.com/oxidecomputer/oxide.go/oxide"
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
	r := newRack(t, &Server{})
	r.disk("d")
	for _, test := range []wireCase{
		{"behind", "/v1/disks/?project=default", "", 200, ""},
		{"within", "/v1//disks///d?project=default", "", 200, ""},
		{"before", "//v1/disks?project=default", "", 200, ""},
		{"a dot", "/v1/./disks?project=default", "", 400, "invalid path encoding"},
		{"two dots", "/v1/disks/../disks?project=default", "", 400, "invalid path encoding"},
		{"no UTF-8", "/v1/disks/%ff?project=default", "", 400, "invalid path encoding"},
		{"a dot in escapes is a name", "/v1/disks/%2e?project=default", "", 400,
			"bad parameter in URL path: " + notNameOrID},
		{"a slash in escapes is a name", "/v1%2fdisks?project=default", "", 404, "Not Found"},
	} {
		test.check(t, r)
	}
}

func TestA62QueriesAreReadAsByTheRack(t *testing.T) {
	r := newRack(t, &Server{})
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
		{"empty project", "/v1/disks?project=", "", 400, bad + notNameOrID},
		{"no project", "/v1/disks", "", 400, bad + "missing field `project`"},
		{"two projects, of which the last counts", "/v1/disks?project=X&project=default", "", 200, ""},
		{"two projects, the last a bad one", "/v1/disks?project=default&project=X", "", 400,
			bad + notNameOrID},
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
		{"empty project for an ID", "/v1/disks/" + d.Id + "?project=", "", 400, bad + notNameOrID},
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
