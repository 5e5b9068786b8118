//go:build linux

package rules

import (
	"io/fs"
	"path"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// TestATrialOfHotPlugRepeatsWhatTheRackDidNotAnswer loses one answer of a trial. A lost answer must
// not look like a refusal, or like an attach that failed and stayed recorded (A17).
func TestATrialOfHotPlugRepeatsWhatTheRackDidNotAnswer(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		hotplug            adminapi.Hotplug
		fault              adminapi.Fault
		detaches, attaches bool
	}{
		"a detach without an effect on a rack with hot-plug": {adminapi.HotplugFull,
			adminapi.Fault{Operation: "instance_disk_detach", Phase: adminapi.Before}, true, false},
		"a detach on a rack without hot-plug": {adminapi.HotplugNone,
			adminapi.Fault{Operation: "instance_disk_detach", Phase: adminapi.After}, false, false},
		"an attach with its effect on a rack that only attaches": {adminapi.HotplugAttachOnly,
			adminapi.Fault{Operation: "instance_disk_attach", Phase: adminapi.After}, false, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rack := startRack(t, harness.RackOptions{Hotplug: test.hotplug})
			test.fault.Times, test.fault.Cut = 1, true
			if _, err := rack.Admin.AddFault(t.Context(), test.fault); err != nil {
				t.Fatal(err)
			}
			trial, result := openRack(t, rack, test.detaches).TryHotplug(t.Context())
			if trial.Detaches != test.detaches || trial.Attaches != test.attaches ||
				test.attaches != (len(trial.Says) == 1) ||
				result.Status != Passed || result.Tries != 2 {
				t.Errorf("got %+v after %d tries: %s %s", trial, result.Tries, result.Status, result.Reason)
			}
		})
	}
}

// qemuFiles is a guest's /sys in which QEMU has the NVMe controllers.
type qemuFiles struct{ fs.FS }

func (f qemuFiles) ReadFile(name string) ([]byte, error) {
	if path.Base(name) == "model" {
		return []byte("QEMU NVMe Ctrl                          \n"), nil
	}
	return fs.ReadFile(f.FS, name)
}

// TestPaddingIsNotTestedOnQEMU checks that a virtual machine of a simulated rack does not break
// A56.
func TestPaddingIsNotTestedOnQEMU(t *testing.T) {
	t.Parallel()
	rack := startRack(t, harness.RackOptions{})
	r := openRack(t, rack, true)
	r.Here.Sys = qemuFiles{r.Here.Sys}
	all := All()
	i := slices.IndexFunc(all, func(rule Rule) bool { return rule.ID == "A56" })
	if got := r.Run(t.Context(), all[i]); got.Status != NotTested || got.Undecided {
		t.Errorf("A56 is %s: %s", got.Status, got.Reason)
	}
}
