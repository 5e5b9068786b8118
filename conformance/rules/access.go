package rules

import (
	"encoding/json"
	"errors"
	"math/rand/v2"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var ofAccess = []tested{
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
	{"A03", "disk_create disk_view", func(c *Check) { // the device path
		disk := c.disk()
		equal(c, "the device path of the disk "+string(disk.Name), disk.DevicePath,
			"/mnt/"+string(disk.Name))
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
	{"A15", "utilization_view image_list", func(c *Check) { // roles
		everybodys := func() {
			c.utilization()
			asked(c.Client.ImageList(c.ctx, oxide.ImageListParams{Limit: oxide.NewPointer(1)}))(c,
				"list the silo's images").must()
		}
		everybodys()
		if !c.arrange("a token with fewer rights") {
			return
		}
		disk, instance := c.disk(), c.StoppedInstance()
		c.Switch("role", adminapi.RoleViewer)
		c.look(disk.Id)
		c.deleteDisk(disk.Id).refused(forbidden)
		c.createDisk(c.blank()).refused(forbidden)
		c.attach(disk.Id, instance.Id).refused(forbidden)
		impossible := c.newInstance()
		impossible.Body.Ncpus, impossible.Body.Memory = 0, 1
		c.createInstance(impossible).refused(forbidden)
		everybodys()

		c.Switch("role", adminapi.RoleNone)
		unseen := unknownID("disk", disk.Id)
		c.viewDisk(disk.Id).refused(unseen)
		c.deleteDisk(disk.Id).refused(unseen)
		by := "name"
		if uuid.Validate(c.Project) == nil {
			by = "id"
		}
		projects := asked(c.Client.ProjectListAllPages(c.ctx, oxide.ProjectListParams{}))(c,
			"list the projects without a role").must()
		equal(c, "the projects that are listed without a role", len(projects), 0)
		hidden := notFound("project", by, c.Project)
		c.viewProject(c.Project).refused(hidden)
		c.createDisk(c.blank()).refused(hidden)
		c.createInstance(impossible).refused(hidden)
		everybodys()
	}},
	{"A21", "current_user_view utilization_view", func(c *Check) {
		me := asked(c.Client.CurrentUserView(c.ctx))(c, "read who the token belongs to").must()
		if me.FleetViewer != nil && *me.FleetViewer {
			c.notTested("the token's user is a fleet viewer; use the token of a project's collaborator")
		}
		c.expect([]expected{
			{"the racks", get("/v1/system/hardware/racks"), forbidden},
			{"the utilization of all silos", get("/v1/system/utilization/silos"), forbidden},
			{"the quotas of all silos", get("/v1/system/silo-quotas"), forbidden},
		})
		for _, silo := range []string{me.SiloId, string(me.SiloName)} {
			c.steadily(func() { c.checkOwnSilo(me, oxide.NameOrId(silo)) })
		}
		another := uuid.NewString()
		c.expect([]expected{
			{"the quotas of another silo", get("/v1/system/silos/" + another + "/quotas"),
				unknownID("silo", another)},
			{"the utilization of another silo", get("/v1/system/utilization/silos/" + another),
				unknownID("silo", another)},
		})
	}},
}

var (
	unauthorized = Refused{401, "Unauthorized", "credentials missing or invalid"}
	forbidden    = Refused{403, "Forbidden", "Forbidden"}
)

// checkOwnSilo checks that requests with and without the silo's name or ID show the same use.
func (c *Check) checkOwnSilo(me *oxide.CurrentUser, silo oxide.NameOrId) {
	use := c.utilization()
	quotas := asked(c.Client.SiloQuotasView(c.ctx, oxide.SiloQuotasViewParams{Silo: silo}))(c,
		"read the own silo's quotas").must()
	c.same("the own silo's quotas", quotas, oxide.SiloQuotas{SiloId: me.SiloId,
		Cpus: use.Capacity.Cpus, Memory: use.Capacity.Memory, Storage: use.Capacity.Storage})
	named := asked(c.Client.SiloUtilizationView(c.ctx, oxide.SiloUtilizationViewParams{Silo: silo}))(c,
		"read the own silo's utilization by its name or ID").must()
	c.same("the own silo's utilization", named, oxide.SiloUtilization{SiloId: me.SiloId,
		SiloName: me.SiloName, Allocated: use.Capacity, Provisioned: use.Provisioned})
}

func (c *Check) storageUsed() int64 { return int64(c.utilization().Provisioned.Storage) }

func (c *Check) utilization() *oxide.Utilization {
	return asked(c.Client.UtilizationView(c.ctx))(c, "read the silo's utilization").must()
}

// looks is how often steadily calls look on a real rack, because others may change what the silo
// has provisioned between two reads.
const looks = 3

// steadily calls look, which checks what the silo has provisioned. If look finds a problem on a
// real rack, steadily calls it again, because other users may have caused the problem. A rack that
// breaks the rule causes the same problem each time.
func (c *Check) steadily(look func()) {
	before := len(c.problems)
	var found []string
	var looked, took time.Duration
	for len(found) < looks {
		// Without a random pause, two runs could disturb each other in the same way each time.
		pause := harness.Backoff{Next: rand.N(took + 1)}
		_ = pause.Wait(c.ctx) // the next request notices an interrupt
		c.problems = c.problems[:before]
		began := time.Now()
		look()
		if len(c.problems) == before || c.simulated() {
			return
		}
		found = append(found, strings.Join(c.problems[before:], "\n"))
		took = time.Since(began)
		looked += took
	}
	changes := len(slices.Compact(found)) > 1
	if !changes { // does the amount change while the check does nothing for a time?
		first := c.utilization()
		changes = harness.Await(c.ctx, looked, func() error {
			now, err := c.Client.UtilizationView(c.ctx)
			if err == nil && reflect.DeepEqual(now.Provisioned, first.Provisioned) {
				err = errors.New("nothing has changed")
			}
			return err
		}) == nil
	}
	if changes {
		c.problems = c.problems[:before]
		c.notTested("others change what the silo has provisioned: %d looks found something else than "+
			"the check had caused, such as: %s", looks, found[0])
	}
}

// idOf returns the request's ID, which the body of a refusal must contain. It is in the header or,
// if a proxy in front of a real rack removed that, only in the body.
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
