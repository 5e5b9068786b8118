//go:build linux

package sanity

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
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
		ID, State, AttachedTo, CSIName, Claim string
		Deleted                               bool
	} `json:"orphans"`
	Kept    []struct{ ID, Reason string }   `json:"kept"`
	Missing []struct{ ID, WantedBy string } `json:"missing"`
	Static  []struct{ ID, Why string }      `json:"static"`

	status int
	text   []byte
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

// kubectlCommand is an audit of the cluster of which kubectl prints the list.
func (f *fixture) kubectlCommand(ctx context.Context, list string, args ...string) *exec.Cmd {
	GinkgoHelper()
	dir := filepath.Dir(list)
	Expect(os.WriteFile(dir+"/kubectl", []byte("#!/bin/sh\n"+
		"test \"$2\" = customresourcedefinitions || cat "+list+"\n"), 0o700)).To(Succeed())
	cmd := f.auditCommand(ctx, append([]string{"--kubectl"}, args...)...)
	cmd.Env = append(cmd.Env, "PATH="+dir+":"+os.Getenv("PATH"))
	return cmd
}

// audit runs an audit to its end.
func (f *fixture) audit(cmd *exec.Cmd) auditReport {
	GinkgoHelper()
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	_ = cmd.Run()
	report := auditReport{status: cmd.ProcessState.ExitCode(), text: out.Bytes(), log: log.String()}
	if out.Len() > 0 {
		Expect(json.Unmarshal(out.Bytes(), &report)).To(Succeed(), out.String())
	}
	Expect(report.log).NotTo(ContainSubstring(f.rack.Token))
	return report
}

// auditFiles creates a directory for the lists and reports of one spec.
func auditFiles() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp("", "audit-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// kubernetes writes the output of kubectl for a cluster with these volumes and snapshots.
func (f *fixture) kubernetes(ctx context.Context, path string, volumes []*csi.Volume,
	snapshots ...*csi.Snapshot) string {
	GinkgoHelper()
	names := map[string]string{} // the external provisioner calls a PersistentVolume as the volume
	for _, disk := range f.disks(ctx) {
		var tag struct{ Name string }
		_, text, _ := strings.Cut(disk.Description, " ")
		_ = json.Unmarshal([]byte(text), &tag) // another disk has no tag
		names[disk.Id] = tag.Name
	}
	items := []any{}
	for i, v := range volumes {
		items = append(items, map[string]any{"kind": "PersistentVolume",
			"metadata": map[string]any{"name": cmp.Or(names[v.GetVolumeId()], fmt.Sprintf("pv-%d", i))},
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

// named writes what is left of a report when a person keeps only the orphans with these ids.
func named(path string, report auditReport, ids ...string) string {
	GinkgoHelper()
	var whole map[string]any
	Expect(json.Unmarshal(report.text, &whole)).To(Succeed())
	whole["orphans"] = slices.DeleteFunc(whole["orphans"].([]any), func(o any) bool {
		return !slices.Contains(ids, o.(map[string]any)["id"].(string))
	})
	data, err := json.Marshal(whole)
	Expect(err).NotTo(HaveOccurred())
	Expect(os.WriteFile(path, data, 0o600)).To(Succeed())
	return path
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
