package rules

import (
	"fmt"
	"strings"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"
)

const notAName = "data did not match any variant of untagged enum NameOrId"

func checkNames(c *Check) {
	longest := c.Blank()
	longest.Body.Name += oxide.Name(strings.Repeat("x", 63-len(longest.Body.Name)))
	disk := Must[*oxide.Disk](c, "create a disk with a name of 63 characters")(c.CreateDisk(longest))
	Equal(c, "its name", disk.Name, longest.Body.Name)
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
		Equal(c, fmt.Sprintf("create a disk named %q", test.name),
			unplaced(c.SendDisk(diskBody(`"name":"d"`, fmt.Sprintf(`"name":%q`, test.name))).Refused()),
			badBody(test.problem))
	}
}

func checkNamesAndIDs(c *Check) {
	first, disk := c.Disk(), c.Disk()
	snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(disk.Id))
	instance, project := c.StoppedInstance(), "?"+c.inProject()
	for _, id := range []string{first.Id, disk.Id, strings.ToUpper(disk.Id)} {
		read := Must[*oxide.Disk](c, "read a disk by its ID")(c.Client.DiskView(c.ctx,
			oxide.DiskViewParams{Disk: oxide.NameOrId(id)}))
		Equal(c, "the ID of the disk that was read by ID "+id, read.Id, strings.ToLower(id))
	}
	read := Must[*oxide.Disk](c, "read a disk by its name")(c.Client.DiskView(c.ctx,
		oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Name), Project: c.project()}))
	Equal(c, "the ID of the disk that was read by name", read.Id, disk.Id)
	owner := Must[*oxide.Project](c, "read the project by its ID")(c.Client.ProjectView(c.ctx,
		oxide.ProjectViewParams{Project: oxide.NameOrId(disk.ProjectId)}))
	if !strings.EqualFold(c.Project, owner.Id) && c.Project != string(owner.Name) {
		c.Errorf("the project of a disk: expected %s; found %s (%s)", c.Project, owner.Name, owner.Id)
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
		c.Expect(
			expected{test.kind + " by ID, with a project", get(path + test.id + project),
				invalidRequest(test.both, test.kind)},
			expected{test.kind + " by name, without a project", get(path + test.name),
				invalidRequest(test.neither, test.kind)})
	}
	nobodys := string(c.Name())
	c.Expect(
		expected{"disks of a project that is not there", get("/v1/disks?project=" + nobodys),
			notFound("project", "name", nobodys)},
		expected{"a disk by name in a project by ID",
			get("/v1/disks/" + string(disk.Name) + "?project=" + disk.ProjectId), ok},
		expected{"an image by ID, with a project", get("/v1/images/" + uuid.NewString() + project),
			invalidRequest("when providing image as an ID, project should not be specified")},
		expected{"an image by name, without a project", get("/v1/images/" + string(disk.Name)),
			notFound("silo-image", "name", string(disk.Name))},
		expected{"a subnet by ID, with a project", get("/v1/vpc-subnets/" + uuid.NewString() + project),
			invalidRequest("when providing subnet as an ID, vpc and project should not be specified")},
		expected{"a subnet by name, without a VPC", get("/v1/vpc-subnets/" + nobodys + project),
			invalidRequest("subnet should either be an ID or vpc should be specified")},
		expected{"what is neither a name nor an ID", get("/v1/disks/D"),
			bad("bad parameter in URL path: " + notAName)},
		expected{"disks of what is no project's name", get("/v1/disks?project=D"), badQuery(notAName)})
}

func checkPaths(c *Check) {
	disk := c.Disk()
	c.Expect(
		expected{"an empty segment behind", get("/v1/disks/" + disk.Id + "/"), ok},
		expected{"empty segments within", get("/v1//disks///" + disk.Id), ok},
		expected{"a dot", get("/v1/./disks/" + disk.Id), bad("invalid path encoding")},
		expected{"two dots", get("/v1/disks/../disks/" + disk.Id), bad("invalid path encoding")},
		expected{"what is not UTF-8", get("/v1/disks/%ff"), bad("invalid path encoding")},
		expected{"an escaped letter", get("/v1/%64isks/" + disk.Id), ok},
		expected{"an escaped dot, which is a name", get("/v1/disks/%2e"),
			bad("bad parameter in URL path: " + notAName)},
		expected{"an escaped slash, which separates nothing", get("/v1%2fdisks/" + disk.Id),
			Refused{404, "", "Not Found"}})
}
