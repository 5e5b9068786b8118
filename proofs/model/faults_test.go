//go:build linux

package model

import (
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// rule is a fault with the name of its consequence for the driver: a key of faultCodes, or "".
type rule struct {
	code string
	adminapi.Fault
}

// noDevice is the fault of a rack that records an attach first: the answer is a 500, and the disk
// is attached without a device (docs/hot-plug.md).
const noDevice = "no device"

// faults contains the faults of the rack, by name. Each applies once.
var faults = func() map[string]rule {
	all := map[string]rule{
		"slow device": {"", adminapi.Fault{Operation: "instance_disk_attach",
			Device: &adminapi.DeviceFault{Delay: adminapi.Duration(150 * time.Millisecond)}}},
		noDevice: {"", adminapi.Fault{Operation: "instance_disk_attach",
			Device: &adminapi.DeviceFault{Fails: true}}},
	}
	for _, operation := range []string{"disk_create", "disk_delete", "instance_disk_attach",
		"instance_disk_detach", "snapshot_create", "snapshot_delete"} {
		for _, phase := range []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After} {
			for code, answer := range map[string]*adminapi.Response{
				"503": {Status: 503, ErrorCode: "ServiceNotAvailable", Message: "not now"},
				"429": {Status: 429, Message: "too many requests"},
				"500": {Status: 500, ErrorCode: "Internal", Message: "Internal Server Error"},
				"403": {Status: 403, ErrorCode: "Forbidden", Message: "Forbidden"},
				"cut": nil,
			} {
				all[operation+" "+string(phase)+" "+code] = rule{code, adminapi.Fault{
					Operation: operation, Phase: phase, Response: answer, Cut: answer == nil}}
			}
		}
		all[operation+" twice"] = rule{"", adminapi.Fault{Operation: operation, Phase: adminapi.Twice}}
		all[operation+" late"] = rule{"", adminapi.Fault{
			Operation: operation, Phase: adminapi.Before, Delay: adminapi.Duration(60 * time.Millisecond)}}
	}
	for _, operation := range []string{"disk_view", "instance_view", "snapshot_view"} {
		all[operation+" before 503"] = rule{"503", adminapi.Fault{Operation: operation,
			Phase: adminapi.Before, Response: &adminapi.Response{Status: 503}}}
		all[operation+" before cut"] = rule{"cut", adminapi.Fault{Operation: operation,
			Phase: adminapi.Before, Cut: true}}
	}
	for name, r := range all {
		r.Times = 1
		all[name] = r
	}
	return all
}()
