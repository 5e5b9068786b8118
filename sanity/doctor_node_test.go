//go:build linux

package sanity

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"testing"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// nodeSituation is a failing call of a node.
type nodeSituation struct {
	call, reason string
	// fail creates the situation, and returns the volume and the call's error.
	fail func(ctx context.Context, f *nodeFixture) (*placement, error)
	// hidden is the doctor's finding if neither Kubernetes nor the node's report has the reason. It
	// is nil if one of them has it.
	hidden *sight
}

// sight is one finding of a doctor.
type sight struct{ link, reason string }

// These are the calls of a node that fail.
const (
	stageCall, publishCall     = "NodeStageVolume", "NodePublishVolume"
	unpublishCall, unstageCall = "NodeUnpublishVolume", "NodeUnstageVolume"
)

// reasonsAt has, for each link, the reasons of a node that the doctor reports there.
var reasonsAt = map[string][]string{
	"volume": {"FieldInvalid", "DiskNameMissing", "MountFlagsUnsupported"},
	"node":   {"StateNotKept"},
	"device": {"DeviceChanged", "DeviceDiffers", "DeviceHeld", "DeviceLocked", "DeviceNotFound",
		"DeviceNotUnique", "DeviceReadOnly", "DeviceUnreadable", "DeviceWrongSize"},
	"filesystem": {"DiskNotBlank", "DiskProofPending", "DiskSizeUnknown", "FilesystemDamaged",
		"FilesystemFailed", "FilesystemFeature", "FilesystemTooLarge", "LogNotReplayed",
		"NodeToolFailed", "WrongFilesystem"},
	// A mistake in the requested mount is reported where the mount is missing.
	"mounts": {"CapabilityInvalid", "CapabilityUnsupported", "MkfsOptionsInvalid", "NotStaged",
		"PathInvalid", "PublishedDifferently", "PublishedElsewhere", "StagedDifferently",
		"StillMounted", "TargetNotEmpty", "UseDiffers",
		"UseUnknown"},
}

// notOfMounts are the reasons of a node that cannot end a stage, publish, unpublish or unstage of
// Kubernetes.
var notOfMounts = map[string]string{
	"FilesystemNotGrown":  "no call fails with it; a volume's health has it",
	"InstanceUnknown":     "a node without an identity does not start",
	"VolumeIDMissing":     "a PersistentVolume has a handle",
	"VolumeNotAtPath":     "it is of NodeGetVolumeStats and NodeGetVolumeHealth, of pods that run",
	"VolumeUnknownToNode": "it is of NodeGetVolumeStats and NodeGetVolumeHealth, of pods that run",
}

// expected returns the finding that the doctor must report.
func (s nodeSituation) expected() sight {
	if s.hidden != nil {
		return *s.hidden
	}
	for link, reasons := range reasonsAt {
		if slices.Contains(reasons, s.reason) {
			return sight{link, s.reason}
		}
	}
	return sight{}
}

var _ = describeNodes("the doctor of a node", func(f *nodeFixture) {
	var asked, right, unseen int
	AfterAll(func() {
		Expect(proof.Print(proof.Line("doctor-node", "situations", asked, "right", right, "wrong",
			asked-right, "could_not_see", unseen))).To(Succeed())
	})
	for _, s := range nodeSituations {
		It("finds "+s.reason+" of "+s.call, func(ctx SpecContext) {
			p, err := s.fail(ctx, f)
			Expect(harness.ReasonOf(status.Convert(err))).To(Equal(s.reason), "%v", err)
			report := p.inspected(ctx, p.Volume)
			if s.call == unpublishCall || s.call == unstageCall {
				report = anHourOld(report)
			}
			d := f.diagnosed(ctx, f.rack.Token, listOf(clusterAfter(p, s.call, err)), report)
			asked++
			Expect(d.Chains).To(HaveLen(1))
			found := d.Chains[0].Finding
			Expect(sight{found.Link, found.Reason}).To(Equal(s.expected()), "%s", found.Wrong)
			if right++; s.hidden != nil {
				unseen++
			}
		})
	}
})

// clusterAfter returns the objects of Kubernetes after a failed call. For a mount the kubelet
// creates an event about the pod. For an unmount it only writes its log. A pod waits for its
// unmounts, and the node keeps the volume until it is unstaged.
func clusterAfter(p *placement, call string, failed error) []object {
	items := clusterOf(p)
	pod := items[len(items)-1]
	meta := pod["metadata"].(object)
	kind, step := "FailedMount", map[string]string{stageCall: "MountVolume.MountDevice",
		publishCall: "MountVolume.SetUp"}[call]
	if p.Capability.GetBlock() != nil {
		kind, step = "FailedMapVolume", map[string]string{stageCall: "MapVolume.SetUpDevice",
			publishCall: "MapVolume.MapPodDevice"}[call]
	}
	switch call {
	case unpublishCall:
		meta["deletionTimestamp"] = time.Now().UTC().Add(-time.Hour)
		pod["status"] = object{"phase": "Failed"}
		return items
	case unstageCall:
		delete(pod["spec"].(object), "volumes") // as in another pod
		return items
	}
	pod["status"] = object{"phase": "Pending"}
	return append(items, object{"kind": "Event", "type": "Warning", "reason": kind,
		"metadata":       object{"name": "e", "namespace": "default"},
		"involvedObject": object{"kind": "Pod", "name": meta["name"], "namespace": meta["namespace"]},
		"message":        step + ` failed for volume "pv-1" : ` + failed.Error(),
		"lastTimestamp":  time.Now().UTC()})
}

// anHourOld makes every event of the flight recorder in a node's report an hour older, so that
// nothing seems to have changed since.
func anHourOld(path string) string {
	GinkgoHelper()
	text, err := os.ReadFile(path)
	Expect(err).NotTo(HaveOccurred())
	var report object
	Expect(json.Unmarshal(text, &report)).To(Succeed())
	for _, volume := range report["volumes"].([]any) {
		for _, kept := range volume.(object)["flight"].([]any) {
			at, err := time.Parse(time.RFC3339Nano, kept.(object)["time"].(string))
			Expect(err).NotTo(HaveOccurred())
			kept.(object)["time"] = at.Add(-time.Hour)
		}
	}
	text, err = json.Marshal(report)
	Expect(err).NotTo(HaveOccurred())
	return fileWith("older.json", text)
}

// driverSource is the driver's source, in which the reasons of a node are used.
const driverSource = "../driver/"

var (
	reasonUsed    = regexp.MustCompile(`csierr\.([A-Z]\w+)`)
	reasonDefined = regexp.MustCompile(`(?m)^\s+([A-Z]\w+) +Reason = "(\w+)"`)
)

func TestEveryReasonOfANodeHasASituationForTheDoctor(t *testing.T) {
	words := map[string]string{}
	definitions, err := filepath.Glob("../internal/csierr/reasons_*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range definitions {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, match := range reasonDefined.FindAllStringSubmatch(string(text), -1) {
			words[match[1]] = match[2]
		}
	}
	given := map[string]bool{}
	for _, part := range []string{"node", "blockdev", "mount", "filesystem"} {
		files, err := filepath.Glob(driverSource + part + "/*.go")
		if err != nil || len(files) == 0 {
			t.Fatal(part, err)
		}
		for _, file := range files {
			if matched, _ := filepath.Match("*_test.go", filepath.Base(file)); matched {
				continue
			}
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			for _, match := range reasonUsed.FindAllStringSubmatch(string(text), -1) {
				if reason := words[match[1]]; reason != "" {
					given[reason] = true
				}
			}
		}
	}
	if len(given) < len(reasonsAt["device"]) {
		t.Fatalf("found only %v in the source", given)
	}
	for _, s := range nodeSituations {
		if (s.expected() == sight{}) {
			t.Errorf("no link is known for %s", s.reason)
		}
		delete(given, s.reason)
	}
	for reason := range given {
		if notOfMounts[reason] == "" {
			t.Errorf("the doctor is not asked about %s", reason)
		}
	}
}
