package rules

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofPlain = []tested{
	{"A01", "disk_create disk_view", func(c *Check) { // the form of errors
		missing := uuid.NewString()
		a := c.Send(get("/v1/disks/" + missing))
		equal(c, "read a disk that is not there", a.Refused(), unknownID("disk", missing))
		equal(c, "its body", string(a.Body), pretty(c.idOf("its answer", a), "ObjectNotFound",
			a.Refused().Message))

		name := c.disk().Name
		again := c.blank()
		again.Body.Name = name
		c.createDisk(again).refused(nameTaken("disk", name))

		a = c.Send(get("/v1/disk"))
		id := c.idOf("the answer to a path that a rack does not have", a)
		equal(c, "a path that a rack does not have", a.Status, 404)
		equal(c, "its body", string(a.Body), pretty(id, "", "Not Found"))
		a = c.Send(Plain{Method: "PATCH", Path: "/v1/disks/" + missing})
		c.idOf("the answer to a method that a path does not have", a)
		equal(c, "a method that a path does not have", a.Refused(),
			Refused{405, "", "Method Not Allowed"})
		equal(c, "its Allow", a.Header.Get("Allow"), "DELETE, GET")
		c.idOf("the answer to a ping", c.Send(get("/v1/ping")))

		if c.arrange("a creation that fails") {
			c.fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind})
			c.createDisk(c.blank()).refused(internalError)
		}
		if c.withoutID {
			c.notTested("an answer has no x-request-id: a proxy in front of the rack may have removed it")
		}
	}},
	{"A02", "disk_create disk_view snapshot_create snapshot_view", func(c *Check) { // times
		disk := c.disk()
		snapshot := c.snapshot(disk.Id).must()
		var before time.Time
		for _, path := range []string{"disks/" + disk.Id, "snapshots/" + snapshot.Id,
			"disks/" + c.disk().Id} {
			kind, _, _ := strings.Cut(path, "s/")
			fields := c.object("read a "+kind, c.Send(get("/v1/"+path)))
			if kind == "disk" {
				equal(c, "the snapshot_id of a blank disk", string(fields["snapshot_id"]), "null")
				equal(c, "the image_id of a blank disk", string(fields["image_id"]), "null")
			}
			for _, field := range []string{"time_created", "time_modified"} {
				text := string(fields[field])
				if !rackTime.MatchString(text) {
					c.fatalf("the %s of a %s: expected RFC 3339 in UTC with microseconds; found %q", field,
						kind, text)
				}
			}
			var created time.Time
			c.must("read the time of a "+kind, json.Unmarshal(fields["time_created"], &created))
			if created.Before(before) {
				c.errorf("a %s that was made last: expected a time after %s; found %s", kind, before, created)
			}
			before = created
		}
	}},
	{"A04", "disk_create", func(c *Check) { // names
		longest := c.blank()
		longest.Body.Name += oxide.Name(strings.Repeat("x", 63-len(longest.Body.Name)))
		disk := c.createDisk(longest).must()
		equal(c, "its name", disk.Name, longest.Body.Name)
		const charset = `(allowed characters are lowercase ASCII, digits, and "-")`
		for _, test := range []struct{ name, problem string }{
			{"", "name requires at least one character"},
			{strings.Repeat("a", 64), "name may contain at most 63 characters"},
			{"0a", "name must begin with an ASCII lowercase character"},
			{"Conf", "name must begin with an ASCII lowercase character"},
			{"conF", `name contains invalid character: "F" ` + charset},
			{"con_f", `name contains invalid character: "_" ` + charset},
			{"conf-", `name cannot end with "-"`},
			{"a" + uuid.NewString()[1:], "name cannot be a UUID to avoid ambiguity with IDs"},
		} {
			equal(c, fmt.Sprintf("create a disk named %q", test.name),
				unplaced(c.sendDisk(diskBody(`"name":"d"`, fmt.Sprintf(`"name":%q`, test.name))).Refused()),
				badBody(test.problem))
		}
	}},
	{"A05", "disk_view disk_list snapshot_view instance_view image_view project_view", func(c *Check) {
		first, disk := c.disk(), c.disk()
		snapshot := c.snapshot(disk.Id).must()
		instance, project := c.StoppedInstance(), "?"+c.inProject()
		for _, id := range []string{first.Id, disk.Id, strings.ToUpper(disk.Id)} {
			read := c.viewDisk(id).must()
			equal(c, "the ID of the disk that was read by ID "+id, read.Id, strings.ToLower(id))
		}
		read := c.viewDisk(string(disk.Name)).must()
		equal(c, "the ID of the disk that was read by name", read.Id, disk.Id)
		owner := c.viewProject(disk.ProjectId).must()
		if !strings.EqualFold(c.Project, owner.Id) && c.Project != string(owner.Name) {
			c.errorf("the project of a disk: expected %s; found %s (%s)", c.Project, owner.Name, owner.Id)
		}
		const both = "when providing %s as an ID project should not be specified"
		const neither = "%s should either be UUID or project should be specified"
		for _, test := range []struct{ kind, id, name, both, neither string }{
			{"disk", disk.Id, string(disk.Name), both, neither},
			{"instance", instance.Id, string(instance.Name), both, neither},
			{"snapshot", snapshot.Id, string(snapshot.Name),
				"when providing %s as an ID, project should not be specified",
				"%s should either be an ID or project should be specified"},
		} {
			path := "/v1/" + test.kind + "s/"
			c.expect([]expected{
				{test.kind + " by ID, with a project", get(path + test.id + project),
					invalidRequest(test.both, test.kind)},
				{test.kind + " by name, without a project", get(path + test.name),
					invalidRequest(test.neither, test.kind)},
			})
		}
		nobodys := string(c.name())
		c.expect([]expected{
			{"disks of a project that is not there", get("/v1/disks?project=" + nobodys),
				notFound("project", "name", nobodys)},
			{"a disk by name in a project by ID",
				get("/v1/disks/" + string(disk.Name) + "?project=" + disk.ProjectId), ok},
			{"an image by ID, with a project", get("/v1/images/" + uuid.NewString() + project),
				invalidRequest("when providing image as an ID, project should not be specified")},
			{"an image by name, without a project", get("/v1/images/" + string(disk.Name)),
				unknownName("silo-image", disk.Name)},
			{"a subnet by ID, with a project", get("/v1/vpc-subnets/" + uuid.NewString() + project),
				invalidRequest("when providing subnet as an ID, vpc and project should not be specified")},
			{"a subnet by name, without a VPC", get("/v1/vpc-subnets/" + nobodys + project),
				invalidRequest("subnet should either be an ID or vpc should be specified")},
			{"what is neither a name nor an ID", get("/v1/disks/D"),
				bad("bad parameter in URL path: " + notAName)},
			{"disks of what is no project's name", get("/v1/disks?project=D"), badQuery(notAName)},
		})
	}},
	{"A06", "disk_create", func(c *Check) { // malformed bodies
		equal(c, "create a disk with a field that is unknown",
			c.sendDisk(diskBody(`"size"`, `"color":"red","size"`)).Refused(), Refused{Status: 201})
		c.badBodies([][3]string{
			{"nothing", " ", "EOF while parsing a value"},
			{"the beginning of an object", "{", "EOF while parsing an object"},
			{"no name", diskBody(`"name":"d",`, ""), "missing field `name`"},
			{"no size", diskBody(`"size":1073741824,`, ""), "missing field `size`"},
			{"a bad name", diskBody(`"d"`, `"D"`), "name must begin with an ASCII lowercase character"},
			{"a text for a size", diskBody("1073741824", `"1"`),
				`size: invalid type: string "1", expected u64`},
			{"an unknown backend", diskBody(`"distributed"`, `"tape"`),
				"disk_backend: unknown variant `tape`, expected `local` or `distributed`"},
			{"an unknown source", diskBody(`"blank"`, `"tape"`),
				"disk_backend.disk_source: unknown variant `tape`, expected one of `blank`, " +
					"`snapshot`, `image`, `importing_blocks`"},
		})
	}},
	{"A07", "disk_create", func(c *Check) { // byte counts
		const tooLarge = "size: value is too large for a byte count"
		c.badBodies([][3]string{
			{"2^63 bytes", diskBody("1073741824", "9223372036854775808"), tooLarge},
			{"2^64-1 bytes", diskBody("1073741824", "18446744073709551615"), tooLarge},
			{"a negative size", diskBody("1073741824", "-1"),
				"size: invalid value: integer `-1`, expected u64"},
		})
		equal(c, "create a disk with 2^63-1 bytes, which is a byte count and no whole block",
			c.sendDisk(diskBody("1073741824", "9223372036854775807")).Refused(), noWholeBlock)
	}},
	{"A08", "disk_create disk_view", func(c *Check) { // block sizes
		for _, size := range []oxide.BlockSize{512, 2048, 4096} {
			blank := oxide.DiskSource{Value: &oxide.DiskSourceBlank{BlockSize: size}}
			made := c.createDisk(c.diskFrom(blank)).must()
			equal(c, "the blocks in the answer", made.BlockSize, size)
			equal(c, "the blocks of the disk as it is read", c.look(made.Id).BlockSize, size)
		}
		c.badBodies([][3]string{
			{"blocks of 1024 bytes", diskBody(":512", ":1024"),
				"disk_backend.disk_source.block_size: invalid block size 1024"},
			{"blocks of no bytes", diskBody(":512", ":0"),
				"disk_backend.disk_source.block_size: invalid block size 0"},
		})
	}},
	{"A11", "ping current_user_view", func(c *Check) { // tokens
		as := func(path, value string) Plain { return getWith(path, "Authorization", value) }
		c.expect([]expected{
			{"a ping without a token", as("/v1/ping", ""), ok},
			{"a ping with another's token", as("/v1/ping", "Bearer oxide-token-"+uuid.NewString()), ok},
			{"the check's own token", as("/v1/me", "Bearer "+c.Token), ok},
			{"the scheme in lower case", as("/v1/me", "bearer "+c.Token), ok},
			{"no token", as("/v1/me", ""), unauthorized},
			{"a wrong token", as("/v1/me", "Bearer oxide-token-"+uuid.NewString()), unauthorized},
			{"a bearer that is no token of Oxide's", as("/v1/me", "Bearer conformance"), unauthorized},
			{"another scheme", as("/v1/me", "Basic b3hpZGU6dG9rZW4="), unauthorized},
		})
	}},
	{"A12", "disk_create", func(c *Check) { // the size of bodies
		const limit = 1 << 20
		within := c.named(c.name(), diskBody(`"size":1073741824`, `"size":1,"pad":"%s"`))
		within = strings.Replace(within, "%s", strings.Repeat("x", limit-len(within)+2), 1)
		equal(c, "a body of 1 MiB, with a size of one byte", c.sendDisk(within).Refused(), noWholeBlock)
		equal(c, "a body of 1 MiB and a byte", c.sendDisk(within+" ").Refused(),
			bad("request body exceeded maximum size of 1048576 bytes"))
		form := c.post("disks", "{}")
		form.Header = map[string]string{"Content-Type": "application/x-www-form-urlencoded"}
		a := c.Send(form)
		equal(c, "a body that says it is a form", Refused{a.Status, a.Refused().Code, ""},
			Refused{Status: 400})
		if !strings.Contains(a.Refused().Message, "content type") {
			c.errorf("a body that says it is a form: expected a refusal of its content type; found %q",
				a.Refused().Message)
		}
	}},
	{"A13", "ping current_user_view", func(c *Check) { // versions
		const newer, next = "9999999999.0.0", "2026073101.0.0"
		as := func(path, value string) Plain { return getWith(path, "Api-Version", value) }
		unsupported := func(version string) Refused {
			return bad("server does not support this API version: " + version)
		}
		c.expect([]expected{
			{"no version", as("/v1/me", ""), ok},
			{"the client's version", as("/v1/me", APIVersion), ok},
			{"a version of the future", as("/v1/me", newer), unsupported(newer)},
			{"a ping of the future", as("/v1/ping", newer), unsupported(newer)},
			{"an unknown path of the future", as("/v1/nope", newer), unsupported(newer)},
		})
		if c.arrange("versions of other releases") {
			c.expect([]expected{
				{"the version of v21", as("/v1/me", "2026061000.0.0"), ok},
				{"the version of v22", as("/v1/me", "2026073100.0.0"), ok},
				{"the version after v22's", as("/v1/me", next), unsupported(next)},
			})
		}
		const head, tail = `bad value for header "api-version": `, ": latest"
		got := c.Send(as("/v1/ping", "latest")).Refused()
		if len(got.Message) > len(head)+len(tail) {
			got.Message = got.Message[:len(head)] + got.Message[len(got.Message)-len(tail):]
		}
		equal(c, "what is no version (with its reason left out)", got, bad(head+tail))
	}},
	{"A14", "disk_create disk_view disk_list", func(c *Check) { // errors found before the token
		nobodys := func(path string) Plain { return getWith(path, "Authorization", "") }
		create := c.post("disks", "{")
		create.Header = map[string]string{"Authorization": ""}
		good := create
		good.Body = c.named(c.name(), diskBody())
		equal(c, "a bad body without a token", unplaced(c.Send(create).Refused()),
			badBody("EOF while parsing an object"))
		c.expect([]expected{
			{"a bad query without a token", nobodys("/v1/disks"), badQuery("missing field `project`")},
			{"a bad path without a token", nobodys("/v1/disks/D"),
				bad("bad parameter in URL path: " + notAName)},
			{"a good body without a token", good, unauthorized},
		})
	}},
	{"A61", "disk_view", func(c *Check) { // paths
		disk := c.disk()
		c.expect([]expected{
			{"an empty segment behind", get("/v1/disks/" + disk.Id + "/"), ok},
			{"empty segments within", get("/v1//disks///" + disk.Id), ok},
			{"a dot", get("/v1/./disks/" + disk.Id), bad("invalid path encoding")},
			{"two dots", get("/v1/disks/../disks/" + disk.Id), bad("invalid path encoding")},
			{"what is not UTF-8", get("/v1/disks/%ff"), bad("invalid path encoding")},
			{"an escaped letter", get("/v1/%64isks/" + disk.Id), ok},
			{"an escaped dot, which is a name", get("/v1/disks/%2e"),
				bad("bad parameter in URL path: " + notAName)},
			{"an escaped slash, which separates nothing", get("/v1%2fdisks/" + disk.Id),
				Refused{404, "", "Not Found"}},
		})
	}},
	{"A63", "disk_create", func(c *Check) { // repeated keys
		c.badBodies([][3]string{
			{"a known key twice", diskBody(`{"name"`, `{"name":"d","name"`), "duplicate field `name`"},
			{"a key twice in an object below", diskBody(`"block_size"`,
				`"block_size":512,"block_size"`), "disk_backend.disk_source: duplicate field `block_size`"},
		})
		for what, body := range map[string]string{
			"an unknown key twice":        diskBody(`{"name"`, `{"x":1,"x":2,"name"`),
			"something behind the object": diskBody() + " and more",
		} {
			equal(c, "create a disk with "+what, c.sendDisk(body).Refused(), Refused{Status: 201})
		}
	}},
	{"A70", "disk_create snapshot_create instance_create", func(c *Check) { // descriptions
		usual := c.Description
		defer func() { c.Description = usual }()
		padded := func(length int) string { // the mark stays readable
			text := strings.TrimSuffix(usual, "}") + `,"pad":"`
			return text + strings.Repeat("é", length-2-utf8.RuneCountInString(text)) + `"}`
		}
		longest := padded(512)
		c.Description = longest
		disk := c.disk()
		equal(c, "the description of a disk, of 512 characters", disk.Description, longest)
		snapshot := c.snapshot(disk.Id).must()
		equal(c, "the description of a snapshot, of 512 characters", snapshot.Description, longest)
		instance := c.createInstance(c.newInstance()).must()
		equal(c, "the description of an instance, of 512 characters", instance.Description, longest)
		c.Description = padded(513)
		c.createDisk(c.blank()).refused(internalError)
		c.snapshot(disk.Id).refused(internalError)
		c.createInstance(c.newInstance()).refused(internalError)
		if c.arrange("a silo without quota") {
			c.Switch("quota_bytes", c.storageUsed())
			c.createDisk(c.blank()).refused(quotaExceeded)
		}
	}},
	{"A72", "disk_create disk_view disk_list instance_disk_list snapshot_create snapshot_view " +
		"snapshot_list instance_create instance_view instance_list", func(c *Check) {
		taken := c.snapshot(c.disk().Id).must()
		snapshot := c.viewSnapshot(taken.Id).must()
		c.same("the answer to the creation of a snapshot", taken, snapshot, "time_modified")
		c.same("the snapshot that is read by name", c.viewSnapshot(string(taken.Name)).must(), snapshot)
		c.listed("the list of snapshots", asked(c.Client.SnapshotListAllPages(c.ctx,
			oxide.SnapshotListParams{Project: c.project()}))(c, "list the snapshots").must(), snapshot)

		made := c.instance()
		instance := c.see(made.Id)
		c.same("the answer to the creation of an instance", made, instance, "run_state", "time_modified",
			"time_run_state_updated")
		c.same("the instance that is read by name", c.viewInstance(string(made.Name)).must(), instance)
		c.listed("the list of instances", asked(c.Client.InstanceListAllPages(c.ctx,
			oxide.InstanceListParams{Project: c.project()}))(c, "list the instances").must(), instance)

		restored := c.createDisk(c.fromSnapshot(taken.Id, false)).must()
		c.same("the answer to the creation of a disk", restored, c.look(restored.Id), "state",
			"time_modified")
		c.attach(restored.Id, instance.Id).must()
		disk := c.look(restored.Id)
		c.same("the disk when it is attached", disk, restored, "state", "time_modified")
		c.same("the disk that is read by name", c.viewDisk(string(disk.Name)).must(), disk)
		c.listed("the list of disks", asked(c.Client.DiskListAllPages(c.ctx,
			oxide.DiskListParams{Project: c.project()}))(c, "list the disks").must(), disk)
		c.listed("the list of the instance's disks", c.disksOf(instance.Id), disk)
	}},
}

// expected is a request with its answer. A successful answer has neither code nor message.
type expected struct {
	what    string
	request Plain
	answer  Refused
}

func (c *Check) expect(cases []expected) {
	for _, e := range cases {
		equal(c, e.what, c.Send(e.request).Refused(), e.answer)
	}
}

func get(path string) Plain { return Plain{Method: "GET", Path: path} }

func getWith(path, header, value string) Plain {
	return Plain{Method: "GET", Path: path, Header: map[string]string{header: value}}
}

var ok = Refused{Status: 200}

func bad(message string) Refused      { return Refused{400, "", message} }
func badQuery(message string) Refused { return bad("unable to parse query string: " + message) }
func badBody(message string) Refused  { return bad("unable to parse JSON body: " + message) }

func (c *Check) inProject() string { return "project=" + url.QueryEscape(c.Project) }

// place matches the end of an error message of serde: the position of the mistake.
var place = regexp.MustCompile(` at line \d+ column \d+$`)

func unplaced(r Refused) Refused {
	r.Message = place.ReplaceAllString(r.Message, "")
	return r
}

func (c *Check) post(collection, body string) Plain {
	return Plain{Method: "POST", Path: "/v1/" + collection + "?" + c.inProject(), Body: body}
}

// sendDisk creates a disk with a body of diskBody, and removes it at the end of the check.
func (c *Check) sendDisk(body string) Answer {
	name := c.name()
	plain := c.post("disks", c.named(name, body))
	a, err := c.send(plain)
	if err != nil || leavesOpen(a.Status) {
		c.disks().removeNamed(c, name)
	}
	c.must(plain.Method+" "+plain.Path, err)
	var disk struct{ ID string }
	if a.Status < 300 && json.Unmarshal(a.Body, &disk) == nil && disk.ID != "" {
		c.cleanup(func(ctx context.Context) error { return c.removeDisk(ctx, disk.ID) })
	}
	return a
}

func (c *Check) object(what string, a Answer) map[string]json.RawMessage {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(a.Body, &fields); err != nil || a.Status >= 300 {
		c.fatalf("%s: expected an object; found HTTP %d %s", what, a.Status, a.Body)
	}
	return fields
}

// Plain is a request that Oxide's client cannot send, or whose answer the client hides.
type Plain struct {
	Method string
	// Path is the encoded path and query, with the leading slash.
	Path string
	Body string
	// Header is added to the token, the content type and the version of the API. An empty value
	// removes one of these.
	Header map[string]string
}

// Send sends a plain request. Without an answer it ends the check.
func (c *Check) Send(p Plain) Answer {
	return asked(c.send(p))(c, p.Method+" "+p.Path).must()
}

func (c *Check) send(p Plain) (Answer, error) {
	req, err := http.NewRequestWithContext(c.ctx, p.Method,
		strings.TrimSuffix(c.Client.Host(), "/")+"/", strings.NewReader(p.Body))
	if err != nil {
		return Answer{}, fmt.Errorf("make the request: %w", err)
	}
	// The client would normalize the path in URL.Path. It sends the path in URL.Opaque unchanged.
	route, query, _ := strings.Cut(p.Path, "?")
	req.URL.Opaque = route
	req.URL.RawQuery = query
	header := map[string]string{"Authorization": "Bearer " + c.Token,
		"Content-Type": "application/json", "Api-Version": APIVersion}
	maps.Copy(header, p.Header)
	for name, value := range header {
		if value != "" {
			req.Header.Set(name, value)
		}
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return Answer{}, fmt.Errorf("expected an answer; found %w", err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return Answer{}, fmt.Errorf("read the answer: %w", err)
	}
	return Answer{resp.StatusCode, resp.Header, body}, nil
}

// APIVersion is the version that the pinned client requests.
const APIVersion = "2026060800.0.0"

func invalidRequest(format string, args ...any) Refused {
	return Refused{400, "InvalidRequest", fmt.Sprintf(format, args...)}
}

func invalidValue(label, problem string) Refused {
	return Refused{400, "InvalidValue", fmt.Sprintf("unsupported value for %q: %s", label, problem)}
}

func inConflict(message string) Refused { return Refused{409, "Conflict", message} }

func notFound(kind, by, what string) Refused {
	return Refused{404, "ObjectNotFound", fmt.Sprintf("not found: %s with %s %q", kind, by, what)}
}

func unknownID(kind, id string) Refused { return notFound(kind, "id", id) }

func unknownName(kind string, name oxide.Name) Refused {
	return notFound(kind, "name", string(name))
}

func nameTaken(kind string, name oxide.Name) Refused {
	return Refused{400, "ObjectAlreadyExists", fmt.Sprintf("already exists: %s %q", kind, name)}
}

var (
	unauthorized  = Refused{401, "Unauthorized", "credentials missing or invalid"}
	forbidden     = Refused{403, "Forbidden", "Forbidden"}
	internalError = Refused{500, "Internal", "Internal Server Error"}
	unavailable   = Refused{503, "ServiceNotAvailable", "Service Unavailable"}
	quotaExceeded = Refused{507, "InsufficientCapacity", "Insufficient capacity: Storage Limit " +
		"Exceeded: Not enough storage to complete request. Either remove unneeded disks and " +
		"snapshots to free up resources or contact the rack operator to request a capacity increase."}
)

// fields has an object's fields that the client knows, with their JSON names.
type fields map[string]json.RawMessage

// fieldsOf splits an object into [fields], or a list into []fields.
func fieldsOf[T any](c *Check, object any) (parts T) {
	text, err := json.Marshal(object)
	if err == nil {
		err = json.Unmarshal(text, &parts)
	}
	c.must("take an answer of the rack apart", err)
	return parts
}

// same checks that two answers show the same object, except for the fields named in but.
func (c *Check) same(what string, got, want any, but ...string) {
	g, w := fieldsOf[fields](c, got), fieldsOf[fields](c, want)
	all := maps.Clone(w)
	maps.Copy(all, g)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(but, name) {
			equal(c, what+": its "+name, string(g[name]), string(w[name]))
		}
	}
}

// listed checks that a list contains an object exactly once, with the same fields.
func (c *Check) listed(what string, list, want any) {
	id := string(fieldsOf[fields](c, want)["id"])
	items := fieldsOf[[]fields](c, list)
	items = slices.DeleteFunc(items, func(f fields) bool { return string(f["id"]) != id })
	equal(c, what+": how often it has "+id, len(items), 1)
	for _, item := range items {
		c.same(what, item, want)
	}
}

// diskBody returns a body that creates a disk named d. The arguments are texts and their
// replacements.
func diskBody(change ...string) string {
	return strings.NewReplacer(change...).Replace(`{"name":"d","description":"made by a check",` +
		`"size":1073741824,"disk_backend":{"type":"distributed",` +
		`"disk_source":{"type":"blank","block_size":512}}}`)
}

// named puts a name, and the description of the check, into a body.
func (c *Check) named(name oxide.Name, body string) string {
	return strings.NewReplacer(`"d"`, fmt.Sprintf("%q", name), `"made by a check"`,
		fmt.Sprintf("%q", c.Description)).Replace(body)
}

// badBodies demands that bodies are refused. A case has a description, a body and the reason.
func (c *Check) badBodies(cases [][3]string) {
	for _, test := range cases {
		equal(c, "create a disk with "+test[0], unplaced(c.sendDisk(test[1]).Refused()), badBody(test[2]))
	}
}

const notAName = "data did not match any variant of untagged enum NameOrId"

// idOf returns the request's ID from the header. If a proxy in front of a real rack removed the
// header, the ID is from the body of a refusal.
func (c *Check) idOf(what string, a Answer) string {
	id := a.Header.Get("X-Request-Id")
	if id == "" && !c.simulated() {
		c.withoutID = true
		return errorIn(a.Body).RequestId
	}
	if uuid.Validate(id) != nil {
		c.errorf("%s: expected a UUID in x-request-id; found %q", what, id)
	}
	return id
}

func pretty(requestID, code, message string) string {
	text, _ := json.MarshalIndent(struct {
		RequestID string `json:"request_id"`
		Code      string `json:"error_code,omitempty"`
		Message   string `json:"message"`
	}{requestID, code, message}, "", "  ") // strings can always be encoded
	return string(text)
}

var rackTime = regexp.MustCompile(`^"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6})?Z"$`)
