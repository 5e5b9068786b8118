package model

import (
	"github.com/oxidecomputer/oxide-csi-plugin/sanity"
)

// rule is a fault with the name of what the driver makes of it: a key of faultCodes, or "".
type rule struct {
	code string
	sanity.Fault
}

// faults are the ways in which the rack may misbehave, by name. Each strikes once.
var faults = func() map[string]rule {
	all := map[string]rule{
		"slow device": {"", sanity.Fault{Operation: "instance_disk_attach",
			Device: &sanity.FaultDevice{Delay: "150ms"}}},
	}
	for _, operation := range []string{"disk_create", "disk_delete", "instance_disk_attach",
		"instance_disk_detach", "snapshot_create", "snapshot_delete"} {
		for _, phase := range []string{"before", "instead", "after"} {
			for code, answer := range map[string]*sanity.FaultAnswer{
				"503": {Status: 503, ErrorCode: "ServiceNotAvailable", Message: "not now"},
				"429": {Status: 429, Message: "too many requests"},
				"500": {Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
				"403": {Status: 403, ErrorCode: "Forbidden", Message: "Forbidden"},
				"cut": nil,
			} {
				all[operation+" "+phase+" "+code] = rule{code, sanity.Fault{
					Operation: operation, Phase: phase, Answer: answer, Cut: answer == nil}}
			}
		}
		all[operation+" twice"] = rule{"", sanity.Fault{Operation: operation, Phase: "twice"}}
		all[operation+" late"] = rule{"", sanity.Fault{
			Operation: operation, Phase: "before", Delay: "60ms"}}
	}
	for _, operation := range []string{"disk_view", "instance_view", "snapshot_view"} {
		all[operation+" before 503"] = rule{"503", sanity.Fault{Operation: operation,
			Phase: "before", Answer: &sanity.FaultAnswer{Status: 503}}}
		all[operation+" before cut"] = rule{"cut", sanity.Fault{Operation: operation,
			Phase: "before", Cut: true}}
	}
	for name, r := range all {
		r.Times = 1
		all[name] = r
	}
	return all
}()
