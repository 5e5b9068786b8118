//go:build linux

package sanity

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
)

// auditCluster is the cluster of the controller in the audit's fixture.
const auditCluster = "one"

// auditReport is the audit's JSON output and exit status.
type auditReport struct {
	Owned    int `json:"owned"`
	Deleted  int `json:"deleted"`
	TooYoung int `json:"tooYoung"`
	Orphans  []struct {
		ID, State, AttachedTo, CSIName, Claim, SkipReason string
		Deleted                                           bool
	} `json:"orphans"`
	Missing []struct{ ID, WantedBy string } `json:"missing"`
	Static  []struct{ ID, Why string }      `json:"static"`

	status int
	log    string
}

func (r auditReport) orphans() []string {
	ids := []string{}
	for _, o := range r.Orphans {
		ids = append(ids, o.ID)
	}
	return ids
}

func (f *fixture) auditCommand(ctx context.Context, args ...string) *exec.Cmd {
	GinkgoHelper()
	return driverCommand(ctx, map[string]string{"OXIDE_HOST": f.rack.URL,
		"OXIDE_TOKEN": f.rack.Token, "OXIDE_PROJECT": f.rack.Project,
		"OXIDE_CLUSTER_ID": auditCluster}, append([]string{"audit", "--output=json",
		// The specs create the disks that they audit, and the rack and the list have the same clock.
		"--min-age=0s"}, args...)...)
}

// audit runs an audit to its end.
func (f *fixture) audit(ctx context.Context, args ...string) auditReport {
	GinkgoHelper()
	cmd := f.auditCommand(ctx, args...)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	_ = cmd.Run()
	report := auditReport{status: cmd.ProcessState.ExitCode(), log: log.String()}
	if out.Len() > 0 {
		Expect(json.Unmarshal(out.Bytes(), &report)).To(Succeed(), out.String())
	}
	Expect(report.log).NotTo(ContainSubstring(f.rack.Token))
	return report
}

// auditFiles creates a directory for the lists and state files of one spec.
func auditFiles() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp("", "audit-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// kubernetes writes the output of kubectl for a cluster with these volumes and snapshots.
func kubernetes(path string, volumes []*csi.Volume, snapshots ...*csi.Snapshot) string {
	GinkgoHelper()
	items := []any{}
	for i, v := range volumes {
		items = append(items, map[string]any{"kind": "PersistentVolume",
			"metadata": map[string]any{"name": fmt.Sprintf("pv-%d", i)},
			"spec": map[string]any{"csi": map[string]any{"driver": "csi.oxide.computer",
				"volumeHandle": v.GetVolumeId()}}})
	}
	for i, snapshot := range snapshots {
		items = append(items, map[string]any{"kind": "VolumeSnapshotContent",
			"metadata": map[string]any{"name": fmt.Sprintf("content-%d", i)},
			"spec":     map[string]any{"driver": "csi.oxide.computer"},
			"status":   map[string]any{"snapshotHandle": snapshot.GetSnapshotId()}})
	}
	data, err := json.Marshal(map[string]any{"kind": "List", "items": items})
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(path, data, 0o600)).To(Succeed())
	// A file's time is that of the kernel's last tick, which may be before the creation of the
	// disks.
	now := time.Now()
	Expect(os.Chtimes(path, now, now)).To(Succeed())
	return path
}

// showAged makes the rack report every object as three days old, until honest is called.
func (f *faultFixture) showAged(ctx context.Context) {
	GinkgoHelper()
	for noun, path := range map[string]string{"disk": "/v1/disks", "snapshot": "/v1/snapshots"} {
		page := f.rackPage(ctx, path)
		for _, item := range page["items"].([]any) {
			object := item.(map[string]any)
			object["time_created"] = time.Now().Add(-72 * time.Hour).UTC().Truncate(time.Hour)
			f.answer(ctx, noun+"_view", object["id"].(string), object)
		}
		page["next_page"] = nil
		f.answer(ctx, noun+"_list", "", page)
	}
}

func (f *faultFixture) clearFaults(ctx context.Context) {
	GinkgoHelper()
	Expect(f.rack.Admin.ClearFaults(ctx)).To(Succeed())
}

// ageFirstSeen moves every first-seen time in a state file two hours back, instead of waiting.
func ageFirstSeen(path string) {
	GinkgoHelper()
	data, err := os.ReadFile(path)
	Expect(err).NotTo(HaveOccurred())
	var state map[string]any
	Expect(json.Unmarshal(data, &state)).To(Succeed())
	for _, object := range state["objects"].(map[string]any) {
		object.(map[string]any)["firstSeen"] = time.Now().Add(-2 * time.Hour).UTC()
	}
	data, err = json.Marshal(state)
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(path, data, 0o600)).To(Succeed())
}

// orphan creates a volume that no list contains. It is deleted when the spec ends.
func (f *fixture) orphan(ctx context.Context) string {
	return f.volume(ctx).GetVolumeId()
}

func (f *rackFixture) ids(ctx context.Context) []string {
	GinkgoHelper()
	ids := []string{}
	for _, disk := range f.disks(ctx) {
		ids = append(ids, disk.Id)
	}
	return ids
}

// deletions counts the deleted disks in the rack's request log.
func (f *rackFixture) deletions(ctx context.Context) int {
	GinkgoHelper()
	requests, err := f.rack.Admin.Requests(ctx, 0)
	Expect(err).NotTo(HaveOccurred())
	n := 0
	for _, r := range requests {
		if r.Operation == "disk_delete" && r.Status == http.StatusNoContent {
			n++
		}
	}
	return n
}
