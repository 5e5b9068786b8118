package rules

import (
	"encoding/json"
	"regexp"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func checkDevicePath(c *Check) {
	disk := c.Disk()
	Equal(c, "the device path of the disk "+string(disk.Name), disk.DevicePath,
		"/mnt/"+string(disk.Name))
}

func checkErrors(c *Check) {
	missing := uuid.NewString()
	a := c.Send(get("/v1/disks/" + missing))
	Equal(c, "read a disk that is not there", a.Refused(), notFound("disk", "id", missing))
	c.hasID("its answer", a)
	Equal(c, "its body", string(a.Body), pretty(c.idOf(a), "ObjectNotFound", a.Refused().Message))

	name := c.Disk().Name
	again := c.Blank()
	again.Body.Name = name
	_, err := c.CreateDisk(again)
	c.Refuses("create a disk whose name is taken", err, nameTaken("disk", name))

	a = c.Send(get("/v1/disk"))
	c.hasID("the answer to a path that a rack does not have", a)
	Equal(c, "a path that a rack does not have", a.Status, 404)
	Equal(c, "its body", string(a.Body), pretty(c.idOf(a), "", "Not Found"))
	a = c.Send(Plain{Method: "PATCH", Path: "/v1/disks/" + missing})
	c.hasID("the answer to a method that a path does not have", a)
	Equal(c, "a method that a path does not have", a.Refused(), Refused{405, "",
		"Method Not Allowed"})
	Equal(c, "its Allow", a.Header.Get("Allow"), "DELETE, GET")
	c.hasID("the answer to a ping", c.Send(get("/v1/ping")))

	if c.Arrange("a creation that fails") {
		c.Fault(adminapi.Fault{Operation: "disk_create", Phase: adminapi.Unwind})
		c.MustRefuse("create a disk while the rack fails", internalError)(c.CreateDisk(c.Blank()))
	}
	if c.withoutID {
		c.NotTested("an answer has no x-request-id: a proxy in front of the rack may have removed it")
	}
}

// hasID demands that an answer has its request's ID.
func (c *Check) hasID(what string, a Answer) {
	id := a.Header.Get("X-Request-Id")
	if id == "" && !c.Simulated() {
		c.withoutID = true
		return
	}
	if uuid.Validate(id) != nil {
		c.Errorf("%s: expected a UUID in x-request-id; found %q", what, id)
	}
}

// idOf returns the request's ID that the body of a refusal must contain: the one in the header,
// unless a proxy in front of a real rack has removed it.
func (c *Check) idOf(a Answer) string {
	id := a.Header.Get("X-Request-Id")
	if id == "" && !c.Simulated() {
		var body struct {
			RequestID string `json:"request_id"`
		}
		_ = json.Unmarshal(a.Body, &body) // only a refusal has an ID
		id = body.RequestID
	}
	return id
}

// pretty returns an error in a rack's format.
func pretty(requestID, code, message string) string {
	text, _ := json.MarshalIndent(struct {
		RequestID string `json:"request_id"`
		Code      string `json:"error_code,omitempty"`
		Message   string `json:"message"`
	}{requestID, code, message}, "", "  ") // strings can always be encoded
	return string(text)
}

// rackTime matches a time in a rack's format, which omits trailing zeroes three at a time.
var rackTime = regexp.MustCompile(`^"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3}|\.\d{6})?Z"$`)

func checkTimes(c *Check) {
	disk := c.Disk()
	snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(disk.Id))
	var before time.Time
	for _, read := range []struct {
		path  string
		nulls []string
	}{
		{"disks/" + disk.Id, []string{"snapshot_id", "image_id"}},
		{"snapshots/" + snapshot.Id, nil},
		{"disks/" + c.Disk().Id, nil},
	} {
		kind, _, _ := strings.Cut(read.path, "s/")
		fields := c.object("read a "+kind, c.Send(get("/v1/"+read.path)))
		for _, field := range read.nulls {
			Equal(c, "the "+field+" of a blank disk", string(fields[field]), "null")
		}
		for _, field := range []string{"time_created", "time_modified"} {
			text := string(fields[field])
			if !rackTime.MatchString(text) {
				c.Fatalf("the %s of a %s: expected RFC 3339 in UTC with microseconds; found %q", field,
					kind, text)
			}
		}
		var created time.Time
		c.must("read the time of a "+kind, json.Unmarshal(fields["time_created"], &created))
		if created.Before(before) {
			c.Errorf("a %s that was made last: expected a time after %s; found %s", kind, before,
				created)
		}
		before = created
	}
}
