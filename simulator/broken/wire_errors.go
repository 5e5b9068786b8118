package broken

var wireErrors = []Mutation{
	{
		Name: "A01-no-code", Says: "errors have no error_code", DriverSays: "RackUnknown",
		After: onErrors(func(body map[string]any) { delete(body, "error_code") }),
	},
	{
		Name: "A01-taken-name-is-conflict", Says: "a name that is taken is 409 Conflict",
		After: reword(400, "ObjectAlreadyExists", 409, "Conflict", ""),
	},
	{
		Name:       "A01-taken-name-is-reused",
		Says:       "creating a disk whose name is taken returns the disk that has it",
		DriverSays: "EffectUnknown",
		Before: func(x *Interception) {
			if x.Is("disk_create") {
				if d := x.namesake(); d.ID != "" {
					x.Reply(201, d)
				}
			}
		},
	},
	{
		Name: "A01-reasons-of-500", Says: "an internal error says what has failed",
		After: reword(500, "", 500, "", "saga ACTION 4 failed"),
	},
	{
		Name: "A01-another-request-id", Says: "the request's ID in the body is not that of the header",
		After: onErrors(set("request_id", "0")),
	},
	{
		Name: "A02-no-time", Says: "a snapshot does not say when it was taken",
		DriverSays: "RackResponseInvalid",
		After:      on(func(object map[string]any) { delete(object, "time_created") }, shownSnapshots...),
	},
	{
		Name: "A03-slot", Says: "device_path is the PCI address of the disk's slot",
		After: on(set("device_path", "/dev/pci/0000:00:10.0"), shownDisks...),
	},
}

// onErrors returns a hook that changes every error.
func onErrors(change func(map[string]any)) func(*Interception) {
	return func(x *Interception) {
		if x.Answer.Status >= 400 {
			x.EditBody(change)
		}
	}
}
