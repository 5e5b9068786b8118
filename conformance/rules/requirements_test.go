//go:build linux

package rules

import (
	"strings"
	"testing"
)

// requirements are the requirements that a rack fulfils, each with the rules whose checks prove
// it.
var requirements = map[string]string{
	"OF-1 a new disk is creating in the answer and detached later":             "A22",
	"OF-2 an ID needs no project, a name does; a list ends with an empty page": "A05 A10",
	"OF-3 an attachment is answered as attached, at once":                      "A31",
	"OF-4 a snapshot is ready when answered, and outlives its disk":            "A38 A43",
	"OF-5 others see a disk creating, detached, in maintenance and attached":   "A18 A22 A31 A38",
	"OF-6 a name that is no name is refused, with the reason":                  "A04",
	"OF-7 a size that is no size is refused, with the reason":                  "A08 A25 A28",
	"OF-8 a serial is the first 20 bytes of the name, padded with NULs":        "A54 A56",
	"OF-9 without hot-plug only a stopped instance's disks change":             "A17",
	"OF-10 an instance has at most 12 disks, its boot disk included":           "A16",
	"OF-11 an attach may be repeated, but not to another instance":             "A30 A33 A34",
	"OF-12 an attached disk is not deleted, and its snapshots outlive it":      "A43 A71",
	"OF-13 a client that is newer than the rack is refused":                    "A13",
	"OF-14 a guest finds its instance's ID in its firmware's tables":           "A55",
	"OF-15 disks and snapshots count with their whole size":                    "A29",
	"B-51 the simulator keeps every rule of a rack":                            "A",
}

// checkRequirements demands that the rules of every requirement have passed. With mayBlock they
// may also be blocked.
func checkRequirements(t *testing.T, results map[string]Status, mayBlock bool) {
	for name, needed := range requirements {
		t.Run(name, func(t *testing.T) {
			passed := 0
			for id, status := range results {
				if needed != "A" && !strings.Contains(needed, id) {
					continue
				}
				if status == Passed || mayBlock && status == Blocked {
					passed++
				} else {
					t.Errorf("%s: %s", id, status)
				}
			}
			if ids := len(strings.Fields(needed)); passed < ids {
				t.Errorf("%d of its rules have passed, want %d", passed, ids)
			}
		})
	}
}
