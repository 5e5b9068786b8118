package broken

import (
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var wireAccess = []Mutation{
	{
		Name: "A11-case", Says: "the scheme of a token is compared with its case",
		Before: func(x *Interception) {
			if strings.HasPrefix(x.Request.Header.Get("Authorization"), "bearer") {
				x.Refuse(401, "Unauthorized", "credentials missing or invalid")
			}
		},
	},
	{
		Name: "A11-forbidden", Says: "a wrong token is 403",
		After: reword(401, "", 403, "Forbidden", "Forbidden"),
	},
	{
		Name: "A13-any", Says: "a version of the future is answered as the newest",
		Before: func(x *Interception) {
			if x.Request.Header.Get("Api-Version") > "9" {
				x.Request.Header.Del("Api-Version")
			}
		},
	},
	{
		Name: "A13-v20", Says: "a version newer than that of v20 is refused",
		Before: func(x *Interception) {
			if version := x.Request.Header.Get("Api-Version"); version > "2026060800.0.0" &&
				version < "9" {
				x.Refuse(400, "", "server does not support this API version: %s", version)
			}
		},
	},
	{
		Name: "A13-path-first", Says: "an unknown path is 404 in every version",
		Before: func(x *Interception) {
			if x.Is("") {
				x.Refuse(404, "", "Not Found")
			}
		},
	},
	{
		Name: "A15-forbidden", Says: "who may not read an object gets 403",
		After: func(x *Interception) {
			if x.Rack.Switches().Role == adminapi.RoleNone && x.Answer.Status == 404 {
				x.Refuse(403, "Forbidden", "Forbidden")
			}
		},
	},
	{
		Name: "A15-not-found", Says: "who may read an object and not change it gets 404",
		DriverSays: "DiskBusy",
		After: func(x *Interception) {
			if x.Answer.Status == 403 && x.Is("disk_delete") {
				x.Refuse(404, "ObjectNotFound", "not found: disk with id %q", x.Path.Get("disk"))
			}
		},
	},
	{
		Name: "A21-another-silo", Says: "another silo is known to exist: 403",
		After: reword(404, "silo with id", 403, "Forbidden", "Forbidden"),
	},
	{
		Name: "A21-open", Says: "everybody may list the racks",
		Before: func(x *Interception) {
			if x.Is("rack_list") {
				x.Reply(200, map[string]any{"next_page": nil, "items": []any{}})
			}
		},
	},
}
