package broken

import (
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

var wireNames = []Mutation{
	{
		Name: "A04-upper-case", Says: "names may have upper case, and are kept in lower",
		Before: sends("name", strings.ToLower, "disk_create"),
	},
	{
		Name: "A04-cut", Says: "names are cut after 16 characters", DriverSays: "RackResponseInvalid",
		Before: sends("name", func(name string) string {
			if len(name) >= 64 {
				return name
			}
			return name[:min(len(name), 16)]
		}, "disk_create"),
	},
	{
		Name: "A05-both", Says: "a project beside an ID is ignored",
		Before: func(x *Interception) {
			for _, named := range x.Path {
				if isID(named[0]) {
					x.query(func(query map[string][]string) { delete(query, "project") })
				}
			}
		},
	},
	{
		Name: "A05-any-subnet", Says: "a subnet is looked up in all VPCs of the project",
		Before: func(x *Interception) {
			name := x.Path.Get("subnet")
			if x.Is("vpc_subnet_view") && !isID(name) && !x.Request.URL.Query().Has("vpc") {
				x.Refuse(404, "ObjectNotFound", "not found: vpc-subnet with name %q", name)
			}
		},
	},
	{
		Name: "A05-another-disk", Says: "a disk read by ID is another one",
		DriverSays: "RackResponseInvalid",
		Before: func(x *Interception) {
			id := x.Path.Get("disk")
			if x.Is("disk_view") && isID(id) {
				x.eachDisk(func(d store.Disk) {
					if d.ID != strings.ToLower(id) {
						x.Request.URL.Path = "/v1/disks/" + d.ID
					}
				})
			}
		},
	},
	{
		Name: "A61-tidy", Says: "dots in a path are resolved",
		Before: func(x *Interception) {
			url := x.Request.URL
			for _, dots := range []string{"/./", "/disks/../"} {
				url.Path = strings.Replace(url.Path, dots, "/", 1)
			}
		},
	},
}
