package rules

import (
	"encoding/json"

	"github.com/google/uuid"
)

// wireRules are about what every request and every answer has: errors, names, bodies, pages,
// versions, tokens.
var wireRules = []Rule{
	{
		ID: "A01",
		Says: "Errors are pretty-printed `{\"request_id\",\"error_code\",\"message\"}`; `error_code` " +
			"is left out by the HTTP layer's own refusals; a name that is taken is 400 " +
			"ObjectAlreadyExists; internal errors say \"Internal Server Error\" only; unknown paths " +
			"are 404, other methods 405 with Allow; every answer carries `x-request-id`",
		Why:    "The driver decides by status and code, and shows the message and the request's ID.",
		Source: "read: dropshot/src/error.rs, common/src/api/external/error.rs",
		Calls:  []string{"disk_create", "disk_view"},
		Check:  checkErrors,
	},
}

func checkErrors(c *Check) {
	missing := uuid.NewString()
	a := c.Send(Plain{Method: "GET", Path: "/v1/disks/" + missing})
	Equal(c, "read a disk that is not there", a.Refused(), Refused{404, "ObjectNotFound",
		"not found: disk with id \"" + missing + "\""})
	id := a.Header.Get("X-Request-Id")
	pretty, err := json.MarshalIndent(struct {
		RequestID string `json:"request_id"`
		Code      string `json:"error_code"`
		Message   string `json:"message"`
	}{id, "ObjectNotFound", a.Refused().Message}, "", "  ")
	c.must("write an error as a rack does", err)
	Equal(c, "its body", string(a.Body), string(pretty))

	taken := c.Blank()
	taken.Body.Name = c.Disk().Name
	_, err = c.CreateDisk(taken)
	c.Refuses("create a disk whose name is taken", err, Refused{400, "ObjectAlreadyExists",
		"already exists: disk \"" + string(taken.Body.Name) + "\""})

	Equal(c, "a path that a rack does not have", c.Send(Plain{Method: "GET",
		Path: "/v1/disk"}).Refused(), Refused{404, "", "Not Found"})
	a = c.Send(Plain{Method: "PATCH", Path: "/v1/disks/" + missing})
	Equal(c, "a method that a path does not have", a.Refused(), Refused{405, "",
		"Method Not Allowed"})
	Equal(c, "its Allow", a.Header.Get("Allow"), "DELETE, GET")
}
