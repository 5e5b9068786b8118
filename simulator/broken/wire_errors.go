package broken

import "strings"

var wireErrors = []Mutation{
	{
		Name: "A01-no-code", Rule: "A01", Says: "errors have no error_code",
		DriverSays: "RackUnknown",
		After: func(x *Exchange) {
			if x.Answer.Status >= 400 {
				x.EditBody(func(body map[string]any) { delete(body, "error_code") })
			}
		},
	},
	{
		Name: "A01-taken-name-is-conflict", Rule: "A01", Says: "a name that is taken is 409 Conflict",
		After: func(x *Exchange) {
			if x.Refused(400, "ObjectAlreadyExists") {
				x.Answer.Status = 409
				x.EditBody(func(body map[string]any) { body["error_code"] = "Conflict" })
			}
		},
	},
	{
		Name: "A01-taken-name-is-reused", Rule: "A01",
		Says:       "creating a disk whose name is taken returns the disk that has it",
		DriverSays: "VolumeExists",
		Before: func(x *Exchange) {
			if x.Is("disk_create") {
				if d := x.namesake(); d.ID != "" {
					x.Reply(201, d)
				}
			}
		},
	},
	{
		Name: "A01-reasons-of-500", Rule: "A01", Says: "an internal error says what has failed",
		After: func(x *Exchange) {
			if x.Answer.Status == 500 {
				x.EditBody(func(body map[string]any) { body["message"] = "saga ACTION 4 failed" })
			}
		},
	},
	{
		Name: "A01-another-request-id", Rule: "A01",
		Says: "the request's ID in the body is not that of the header",
		After: func(x *Exchange) {
			if x.Answer.Status >= 400 {
				x.EditBody(func(body map[string]any) { body["request_id"] = "0" })
			}
		},
	},
	{
		Name: "A02-local-time", Rule: "A02", Says: "times are in the rack's own time zone",
		After: func(x *Exchange) {
			x.Edit(func(object map[string]any) {
				for key, value := range object {
					if text, is := value.(string); is && strings.HasPrefix(key, "time_") {
						object[key] = strings.TrimSuffix(text, "Z") + "-07:00"
					}
				}
			})
		},
	},
	{
		Name: "A02-no-time", Rule: "A02", Says: "a snapshot does not say when it was taken",
		DriverSays: "EffectUnknown",
		After: func(x *Exchange) {
			if x.Is("snapshot_create", "snapshot_view", "snapshot_list") {
				x.Edit(func(object map[string]any) { delete(object, "time_created") })
			}
		},
	},
	{
		Name: "A02-no-nulls", Rule: "A02", Says: "fields without a value are left out",
		After: func(x *Exchange) {
			x.Edit(func(object map[string]any) {
				for key, value := range object {
					if value == nil {
						delete(object, key)
					}
				}
			})
		},
	},
	{
		Name: "A03-slot", Rule: "A03", Says: "device_path is the PCI address of the disk's slot",
		After: func(x *Exchange) {
			if x.Is("disk_create", "disk_view", "disk_list") {
				x.Edit(func(disk map[string]any) { disk["device_path"] = "/dev/pci/0000:00:10.0" })
			}
		},
	},
}
