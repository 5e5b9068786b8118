package simulator

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"regexp"
	"strings"
	"testing"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func TestTheZeroConfigIsARack(t *testing.T) {
	s := must[*Server](t)(Open(t.Context(), engine.Config{}))
	server := httptest.NewServer(s)
	defer server.Close()
	c := newClient(t, server.URL)
	p := must[*oxide.Project](t)(c.ProjectView(t.Context(),
		oxide.ProjectViewParams{Project: "default"}))
	if p.Name != "default" {
		t.Errorf("project %q, want default", p.Name)
	}
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("a second Close: %v", err)
	}
}

func TestA01ErrorsLookLikeTheRacks(t *testing.T) {
	r := newRack(t, engine.Config{})
	resp, body := r.call("GET", "/v1/disks/nope?project=default", "")
	id := resp.header.Get("X-Request-Id")
	want := fmt.Sprintf("{\n  \"request_id\": %q,\n  \"error_code\": \"ObjectNotFound\",\n"+
		"  \"message\": \"not found: disk with name \\\"nope\\\"\"\n}", id)
	if resp.status != 404 || body != want || uuid.Validate(id) != nil {
		t.Errorf("got %d %q, want 404 %q", resp.status, body, want)
	}
	_, body = r.call("GET", "/v1/disks/"+uuid.NewString(), "")
	if !strings.Contains(body, "not found: disk with id ") {
		t.Errorf("an ID is not named as one: %s", body)
	}
}

func TestA01RoutesThatAreNotServed(t *testing.T) {
	r := newRack(t, engine.Config{})
	for _, test := range []struct {
		name, method, path string
		status             int
		message            string
	}{
		{"a path that the rack has not", "GET", "/v1/nope", 404, "Not Found"},
		{"a version that the rack has not", "GET", "/v2/disks", 404, "Not Found"},
		{"a method that the path has not", "PUT", "/v1/disks", 405, "Method Not Allowed"},
		{"what only this simulator lacks", "GET", "/v1/vpcs?project=default", 501,
			"the simulator does not have vpc_list (GET /v1/vpcs), which the rack has"},
	} {
		t.Run(test.name, func(t *testing.T) {
			resp, body := r.call(test.method, test.path, "")
			got := unmarshal[errorBody](t, body)
			if resp.status != test.status || got.Message != test.message || got.ErrorCode != "" {
				t.Errorf("got %d %+v, want %d %q", resp.status, got, test.status, test.message)
			}
		})
	}
	resp, _ := r.call("PUT", "/v1/disks", "")
	if allow := resp.header.Get("Allow"); allow != "GET, POST" {
		t.Errorf("Allow %q, want GET, POST", allow)
	}
}

func TestEveryOperationOfTheRackHasItsRoute(t *testing.T) {
	names := map[string]bool{}
	for _, op := range routes {
		names[op.name] = true
		path := "/" + regexp.MustCompile(`{[^}]*}`).
			ReplaceAllString(strings.Join(op.path, "/"), "x")
		got, _, err := route(op.method, path)
		if err != nil || got.name != op.name {
			t.Errorf("%s %s leads to %+v (%v), want %s", op.method, path, got, err, op.name)
		}
	}
	for name := range served {
		if !names[name] {
			t.Errorf("%s is served but no operation of the rack", name)
		}
	}
}

func TestA11Tokens(t *testing.T) {
	r := newRack(t, engine.Config{})
	denied := errorBody{ErrorCode: "Unauthorized", Message: "credentials missing or invalid"}
	for _, test := range []struct {
		name, authorization, path string
		status                    int
	}{
		{"the rack's token is let in", "Bearer " + testToken, "/v1/me", 200},
		{"no token", "", "/v1/me", 401},
		{"another token", "Bearer oxide-token-other", "/v1/me", 401},
		{"a bearer that is no token of Oxide's", "Bearer test", "/v1/me", 401},
		{"another scheme", "Basic b3hpZGU6dG9rZW4=", "/v1/me", 401},
		{"ping needs none", "", "/v1/ping", 200},
	} {
		t.Run(test.name, func(t *testing.T) {
			resp, body := r.call("GET", test.path, "", "Authorization", test.authorization)
			if resp.status != test.status {
				t.Fatalf("got %d, want %d", resp.status, test.status)
			}
			got := unmarshal[errorBody](t, body)
			got.RequestID = ""
			if test.status == 401 && got != denied {
				t.Errorf("got %+v, want %+v", got, denied)
			}
		})
	}
}

func TestA13Versions(t *testing.T) {
	r := newRack(t, engine.Config{})
	for _, test := range []struct {
		name, version string
		status        int
		message       string
	}{
		{"none is the newest", "", 200, ""},
		{"this rack's own", "2026060800.0.0", 200, ""},
		{"an older one, which a rack answers in its older shape", "2026032500.0.0", 501,
			"the simulator emulates API version 2026060800.0.0 alone; a rack answers " +
				"2026032500.0.0 in its older shape. Send api-version 2026060800.0.0, or none"},
		{"a newer one", "2026061000.0.0", 400,
			"server does not support this API version: 2026061000.0.0"},
		{"what is no version", "latest", 400,
			`bad value for header "api-version": not a semantic version: latest`},
	} {
		t.Run(test.name, func(t *testing.T) {
			resp, body := r.call("GET", "/v1/ping", "", "Api-Version", test.version)
			got := unmarshal[errorBody](t, body)
			if resp.status != test.status || got.Message != test.message || got.ErrorCode != "" {
				t.Errorf("got %d %+v, want %d %q", resp.status, got, test.status, test.message)
			}
		})
	}
}

func TestA05NamesAndIDs(t *testing.T) {
	r := newRack(t, engine.Config{Images: []engine.ImageSpec{{Name: "debian", SizeBytes: 1 << 20}}})
	d := r.disk("d")
	p := must[*oxide.Project](t)(r.ProjectView(t.Context(),
		oxide.ProjectViewParams{Project: "default"}))
	a := r.instance("a")
	sn := must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	img := must[*oxide.Image](t)(r.ImageView(t.Context(), oxide.ImageViewParams{Image: "debian"}))
	for _, test := range []struct {
		name, path string
		status     int
		message    string
	}{
		{"a disk by ID", "/v1/disks/" + d.Id, 200, ""},
		{"a disk by ID in upper case", "/v1/disks/" + strings.ToUpper(d.Id), 200, ""},
		{"a disk by name and project", "/v1/disks/d?project=default", 200, ""},
		{"a disk by name and project by ID", "/v1/disks/d?project=" + p.Id, 200, ""},
		{"a project by ID", "/v1/projects/" + p.Id, 200, ""},
		{"disks of a project by ID", "/v1/disks?project=" + p.Id, 200, ""},
		{"a silo image by name", "/v1/images/debian", 200, ""},
		{"a disk by ID with project", "/v1/disks/" + d.Id + "?project=default", 400,
			"when providing disk as an ID project should not be specified"},
		{"a disk by name alone", "/v1/disks/d", 400,
			"disk should either be UUID or project should be specified"},
		{"an instance by ID with project", "/v1/instances/" + a.Id + "?project=default", 400,
			"when providing instance as an ID project should not be specified"},
		{"an instance by name alone", "/v1/instances/a", 400,
			"instance should either be UUID or project should be specified"},
		{"a snapshot by ID with project", "/v1/snapshots/" + sn.Id + "?project=default", 400,
			"when providing snapshot as an ID, project should not be specified"},
		{"a snapshot by name alone", "/v1/snapshots/s", 400,
			"snapshot should either be an ID or project should be specified"},
		{"an image by ID with project", "/v1/images/" + img.Id + "?project=default", 400,
			"when providing image as an ID, project should not be specified"},
		{"a project that is not there", "/v1/disks/d?project=other", 404,
			`not found: project with name "other"`},
		{"a name that cannot be one", "/v1/disks/D", 400,
			"bad parameter in URL path: " + store.InvalidNameOrID},
		{"a list without project", "/v1/disks", 400,
			"unable to parse query string: missing field `project`"},
	} {
		t.Run(test.name, func(t *testing.T) {
			resp, body := r.call("GET", test.path, "")
			got := unmarshal[errorBody](t, body)
			if resp.status != test.status || got.Message != test.message {
				t.Errorf("got %d %+v, want %d %q", resp.status, got, test.status, test.message)
			}
		})
	}
}

func TestA04Names(t *testing.T) {
	for name, want := range map[string]string{
		"a": "", "pvc-6fa1d3ac-1234-4a": "", strings.Repeat("a", 63): "",
		"":                      "name requires at least one character",
		strings.Repeat("a", 64): "name may contain at most 63 characters",
		"0a":                    "name must begin with an ASCII lowercase character",
		"A":                     "name must begin with an ASCII lowercase character",
		"aX": `name contains invalid character: "X" (allowed characters are ` +
			`lowercase ASCII, digits, and "-")`,
		"a_b": `name contains invalid character: "_" (allowed characters are ` +
			`lowercase ASCII, digits, and "-")`,
		"a-":                                   `name cannot end with "-"`,
		"abcdef01-2345-6789-abcd-ef0123456789": "name cannot be a UUID to avoid ambiguity with IDs",
	} {
		if got := store.CheckName(name); got != want {
			t.Errorf("nameProblem(%q) = %q, want %q", name, got, want)
		}
	}
}

func TestA12BodiesHaveALimit(t *testing.T) {
	r := newRack(t, engine.Config{})
	long := fmt.Sprintf(`{"name":"d","description":"%s"`, strings.Repeat("x", maxBody))
	resp, body := r.call("POST", "/v1/disks?project=default", long)
	got := unmarshal[errorBody](t, body)
	if resp.status != 400 || got.Message != "request body exceeded maximum size of 1048576 bytes" {
		t.Errorf("got %d %+v", resp.status, got)
	}
	resp, _ = r.call("POST", "/v1/disks?project=default", "{}", "Content-Type", "text/plain")
	if resp.status != 400 {
		t.Errorf("text/plain: got %d, want 400", resp.status)
	}
}

func TestA14ABodyIsReadBeforeTheToken(t *testing.T) {
	r := newRack(t, engine.Config{})
	resp, _ := r.call("POST", "/v1/disks?project=default", "{", "Authorization", "")
	if resp.status != http.StatusBadRequest {
		t.Errorf("got %d, want 400", resp.status)
	}
}

func TestA15RolesDecideWhatIsThere(t *testing.T) {
	r := newRack(t, engine.Config{})
	d := r.disk("d")
	role := func(role string) {
		must[adminapi.Switches](t)(r.rack.ChangeSwitches(func(s *adminapi.Switches) error {
			s.Role = role
			return nil
		}))
	}
	role(adminapi.RoleViewer)
	if got := r.state("d"); got != "detached" {
		t.Errorf("a viewer reads %q", got)
	}
	refusedAs(403, "Forbidden", "Forbidden").check(t, r.doDelete("d"))
	_, err := r.DiskCreate(t.Context(), r.blank("e", 1))
	refusedAs(403, "Forbidden", "Forbidden").check(t, err)
	gone("disk", "no").check(t, r.doDelete("no"))

	role(adminapi.RoleNone)
	gone("disk", "d").check(t, r.doDelete("d"))
	err = r.DiskDelete(t.Context(), oxide.DiskDeleteParams{Disk: oxide.NameOrId(d.Id)})
	refusedAs(404, "ObjectNotFound", "not found: disk with id %q", d.Id).check(t, err)
	_, err = r.ProjectView(t.Context(), oxide.ProjectViewParams{Project: "default"})
	gone("project", "default").check(t, err)
	_, err = r.DiskCreate(t.Context(), r.blank("e", 1))
	gone("project", "default").check(t, err)
	if got := must[[]oxide.Project](t)(r.ProjectListAllPages(t.Context(),
		oxide.ProjectListParams{})); len(got) != 0 {
		t.Errorf("nobody sees the projects %v", got)
	}
	must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))

	role(adminapi.RoleCollaborator)
	if err := r.doDelete("d"); err != nil {
		t.Error(err)
	}
}

func TestMeAndUtilization(t *testing.T) {
	r := newRack(t, engine.Config{QuotaBytes: 10 << 30})
	me := must[*oxide.CurrentUser](t)(r.CurrentUserView(t.Context()))
	if me.SiloName == "" || me.Id == "" || me.SiloId == "" {
		t.Errorf("got %+v", me)
	}
	r.disk("d")
	must[*oxide.Snapshot](t)(r.doSnapshot("s", "d"))
	u := must[*oxide.Utilization](t)(r.UtilizationView(t.Context()))
	if u.Provisioned.Storage != 2<<30 || u.Capacity.Storage != 10<<30 || *u.Provisioned.Cpus != 4 {
		t.Errorf("got %+v", u)
	}
	_, err := r.RackList(t.Context(), oxide.RackListParams{})
	refusedAs(403, "Forbidden", "Forbidden").check(t, err)
}
