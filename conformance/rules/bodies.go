package rules

import (
	"fmt"
	"strings"
	"unicode/utf8"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

// diskBody returns a body that creates a disk named d. The arguments are pairs of a text and its
// replacement.
func diskBody(change ...string) string {
	return strings.NewReplacer(change...).Replace(`{"name":"d","description":"made by a check",` +
		`"size":1073741824,"disk_backend":{"type":"distributed",` +
		`"disk_source":{"type":"blank","block_size":512}}}`)
}

// named gives the disk in a body a name, and the description of the check.
func (c *Check) named(name oxide.Name, body string) string {
	return strings.NewReplacer(`"d"`, fmt.Sprintf("%q", name), `"made by a check"`,
		fmt.Sprintf("%q", c.Description)).Replace(body)
}

// badBodies demands that the rack refuses each body. A case is a description, the body and the
// reason.
func (c *Check) badBodies(cases [][3]string) {
	for _, test := range cases {
		equal(c, "create a disk with "+test[0], unplaced(c.sendDisk(test[1]).Refused()), badBody(test[2]))
	}
}

func checkBodies(c *Check) {
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
}

func checkByteCounts(c *Check) {
	const tooLarge = "size: value is too large for a byte count"
	c.badBodies([][3]string{
		{"2^63 bytes", diskBody("1073741824", "9223372036854775808"), tooLarge},
		{"2^64-1 bytes", diskBody("1073741824", "18446744073709551615"), tooLarge},
		{"a negative size", diskBody("1073741824", "-1"),
			"size: invalid value: integer `-1`, expected u64"},
	})
	equal(c, "create a disk with 2^63-1 bytes, which is a byte count and no whole block",
		c.sendDisk(diskBody("1073741824", "9223372036854775807")).Refused(), noWholeBlock)
}

func checkBlockSizes(c *Check) {
	for _, size := range []oxide.BlockSize{512, 2048, 4096} {
		made := c.createDisk(c.diskFrom(&oxide.DiskSourceBlank{BlockSize: size})).must()
		equal(c, "the blocks in the answer", made.BlockSize, size)
		equal(c, "the blocks of the disk as it is read", c.look(made.Id).BlockSize, size)
	}
	c.badBodies([][3]string{
		{"blocks of 1024 bytes", diskBody(":512", ":1024"),
			"disk_backend.disk_source.block_size: invalid block size 1024"},
		{"blocks of no bytes", diskBody(":512", ":0"),
			"disk_backend.disk_source.block_size: invalid block size 0"},
	})
}

func checkBodyLimits(c *Check) {
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
}

func checkDescriptions(c *Check) {
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
}

func checkOrderOfReading(c *Check) {
	nobody := map[string]string{"Authorization": ""}
	create := c.post("disks", "{")
	create.Header = nobody
	equal(c, "a bad body without a token", unplaced(c.Send(create).Refused()),
		badBody("EOF while parsing an object"))
	c.expect([]expected{
		{"a bad query without a token", Plain{Method: "GET", Path: "/v1/disks",
			Header: nobody}, badQuery("missing field `project`")},
		{"a bad path without a token", Plain{Method: "GET", Path: "/v1/disks/D",
			Header: nobody}, bad("bad parameter in URL path: " + notAName)},
	})
	create.Body = c.named(c.name(), diskBody())
	c.expect([]expected{{"a good body without a token", create, unauthorized}})
}

func checkRepeatedKeys(c *Check) {
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
}

const notAName = "data did not match any variant of untagged enum NameOrId"

func checkNames(c *Check) {
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
}

func checkNamesAndIDs(c *Check) {
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
}

func checkPaths(c *Check) {
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
}
