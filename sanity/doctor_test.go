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
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func driverCommand(ctx context.Context, env map[string]string, args ...string) *exec.Cmd {
	GinkgoHelper()
	path := got(theRun.Binary(ctx, "oxide-csi-plugin"))
	cmd := exec.CommandContext(ctx, path, args...)
	// By default the race detector delays the end of a process by a second.
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
	for key, value := range env {
		cmd.Env = append(cmd.Env, key+"="+value)
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

type doctored struct {
	harness.Diagnosis
	status int
}

func (n *node) inspected(ctx context.Context, volume *csi.Volume) (path string) {
	GinkgoHelper()
	cmd := driverCommand(ctx, map[string]string{
		"OXIDE_SYSFS_ROOT": filepath.Join(n.Instance.Guest, "sys"),
		"OXIDE_DEV_ROOT":   filepath.Join(n.Instance.Guest, "dev"),
		"OXIDE_STATE_DIR":  filepath.Join(n.Dir, "volumes"),
	}, "inspect", "--volume="+volume.GetVolumeId()+"="+volume.GetVolumeContext()["diskName"])
	report := got(cmd.Output())
	return fileWith("report.json", report)
}

func fileWith(name string, text []byte) (path string) {
	GinkgoHelper()
	path = filepath.Join(GinkgoT().TempDir(), name)
	Expect(os.WriteFile(path, text, 0o600)).To(Succeed())
	return path
}

type object = map[string]any

// kubernetesOf writes a file with the objects that kubectl prints if a pod on the node uses the
// filesystem of the volume.
func kubernetesOf(p *placement) (path string) {
	GinkgoHelper()
	const name, driver = "pv-1", "csi.oxide.computer"
	meta := object{"name": "data", "namespace": "default", "creationTimestamp": time.Now().UTC()}
	text := got(json.Marshal(object{"kind": "List", "items": []object{
		{"kind": "PersistentVolumeClaim", "metadata": meta, "spec": object{"volumeName": name},
			"status": object{"phase": "Bound"}},
		{"kind": "PersistentVolume", "metadata": object{"name": name},
			"spec": object{"claimRef": meta, "volumeMode": "Filesystem", "csi": object{
				"driver": driver, "volumeHandle": p.Volume.GetVolumeId(),
				"volumeAttributes": p.Volume.GetVolumeContext()},
				"capacity": object{"storage": "1Gi"}}, "status": object{"phase": "Bound"}},
		{"kind": "VolumeAttachment", "metadata": object{"name": "csi-1"},
			"spec": object{"attacher": driver, "nodeName": p.Instance.Name,
				"source": object{"persistentVolumeName": name}}, "status": object{"attached": true}},
		{"kind": "CSINode", "metadata": object{"name": p.Instance.Name}, "spec": object{
			"drivers": []object{{"name": driver, "nodeID": p.Instance.ID}}}},
		{"kind": "Pod", "metadata": object{"name": "app", "namespace": "default",
			"uid": filepath.Base(filepath.Dir(p.Target))},
			"spec": object{"nodeName": p.Instance.Name, "volumes": []object{{"name": "data",
				"persistentVolumeClaim": object{"claimName": "data"}}}}, "status": object{"phase": "Running"}},
	}}))
	return fileWith("objects.json", text)
}

func (f *nodeFixture) diagnosed(ctx context.Context, token, objects, report string) doctored {
	GinkgoHelper()
	cmd := driverCommand(ctx, map[string]string{"OXIDE_HOST": f.rack.URL, "OXIDE_TOKEN": token,
		"OXIDE_PROJECT": f.rack.Project}, "doctor", "pvc", "default/data", "--output=json",
		"--objects="+objects, "--node-report="+report)
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	_ = cmd.Run()
	d := doctored{status: cmd.ProcessState.ExitCode()}
	Expect(json.Unmarshal(out.Bytes(), &d)).To(Succeed(), "%s%s", out.String(), log.String())
	Expect(out.String() + log.String()).NotTo(ContainSubstring(token))
	AddReportEntry("doctor", out.String())
	return d
}

var _ = describeNodes("the doctor", func(f *nodeFixture) {
	It("finds no fault in a volume in use, and only reads from the rack", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		objects, report := kubernetesOf(p), f.a.inspected(ctx, p.Volume)
		before := got(f.rack.Admin.Requests(ctx, 0))
		d := f.diagnosed(ctx, f.rack.Token, objects, report)
		Expect(d.status).To(Equal(0), "%+v", d)
		asked := got(f.rack.Admin.Requests(ctx, len(before)))
		Expect(asked).NotTo(BeEmpty())
		for _, r := range asked {
			Expect(r.Method).To(Equal("GET"), "%+v", r)
		}
		By("showing the volume in the tree of the cluster")
		cmd := driverCommand(ctx, map[string]string{"OXIDE_HOST": f.rack.URL,
			"OXIDE_TOKEN": f.rack.Token, "OXIDE_PROJECT": f.rack.Project}, "doctor", "cluster",
			"--objects=-", "--node-report="+report)
		var log bytes.Buffer
		cmd.Stdin, cmd.Stderr = bytes.NewReader(got(os.ReadFile(objects))), &log
		out, err := cmd.Output()
		Expect(err).NotTo(HaveOccurred(), "%s%s", out, log.String())
		tree := string(out)
		Expect(tree).To(ContainSubstring("instance " + p.Instance.Name + " ("))
		Expect(tree).To(MatchRegexp(`ok +nvme\d+n1: .* attached → claim default/data → pod app\n`))
		By("reporting the missing observations with a token that the rack refuses")
		d = f.diagnosed(ctx, "oxide-token-wrong", objects, report)
		Expect(d.status).To(Equal(3), "%+v", d)
		Expect(d.Chains).To(HaveExactElements(HaveField("Links", ContainElements(
			And(HaveField("Link", "disk"), HaveField("State", "unseen")),
			And(HaveField("Link", "mounts"), HaveField("State", "ok"))))))
		f.detached(ctx, p)
	})

	It("finds a volume that was unmounted by hand and a disk that was detached by hand",
		func(ctx SpecContext) {
			p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
			objects := kubernetesOf(p)
			Expect(p.unpublish(ctx)).To(Succeed())
			d := f.diagnosed(ctx, f.rack.Token, objects, f.a.inspected(ctx, p.Volume))
			Expect(d.status).To(Equal(2), "%+v", d)
			Expect(d.Chains[0].Finding.Link).To(Equal("mounts"), "%+v", d)
			Expect(d.Chains[0].Finding.Reason).To(Equal("VolumeNotAtPath"))
			Expect(p.unstage(ctx)).To(Succeed())
			Expect(f.rack.DetachDisk(ctx, p.Volume.GetVolumeId(), p.Instance.ID)).To(Succeed())
			d = f.diagnosed(ctx, f.rack.Token, objects, f.a.inspected(ctx, p.Volume))
			Expect(d.status).To(Equal(2), "%+v", d)
			Expect(d.Chains[0].Finding.Link).To(Equal("disk"), "%+v", d)
			Expect(d.Chains[0].Finding.Reason).To(Equal("DeviceNotFound"))
		})
})

var _ = describeNodes("the doctor on a rack that records attaches early", func(f *nodeFixture) {
	It("explains a volume that is attached without a device (NS-5, D-61)", func(ctx SpecContext) {
		volume := f.volume(ctx)
		impatient := f.node(ctx, "a", harness.PluginOptions{Args: []string{"--device-timeout=500ms"}})
		f.fault(ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
			Device: &adminapi.DeviceFault{Fails: true}})
		p := f.attachedTo(ctx, volume, impatient, harness.Mounted(""))
		expectReason(p.stage(ctx), codes.NotFound, "DeviceNotFound")
		d := f.diagnosed(ctx, f.rack.Token, kubernetesOf(p), p.inspected(ctx, volume))
		Expect(d.Chains[0].Finding.Link).To(Equal("device"), "%+v", d)
		Expect(d.Chains[0].Finding.Wrong).To(ContainSubstring("recorded the disk as attached"))
		Expect(d.Chains[0].Finding.Do).To(ContainSubstring("Stop the instance and start it again"))
	})
}, "--hotplug="+string(adminapi.HotplugFull.With(adminapi.RecordFirst)))

// FUSE serves the disks of this rack, because it refuses every waiting write when the rack removes
// a disk. A loop device over a file on tmpfs would acknowledge such a write, although the write
// would not reach the file.
var _ = describeNodes("the driver on a rack that removes disks by surprise", func(f *nodeFixture) {
	DescribeTable("reports a detach while a pod writes, and keeps data that fsync acknowledged "+
		"(UP-5, D-61)", func(ctx SpecContext, name string) {
		p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
		written := p.writeUntilItFails()
		Expect(f.unpublish(ctx, p.Volume, "a")).To(Succeed())
		var lines int
		Eventually(ctx, written).Should(Receive(&lines), "an fsync of the pod fails")
		Expect(lines).NotTo(BeZero())
		var statuses []csi.VolumeHealthErrorType
		for _, entry := range p.health(ctx) {
			Expect(entry.GetReason()).NotTo(BeEmpty())
			statuses = append(statuses, entry.GetStatus())
		}
		Expect(statuses).To(ConsistOf(csi.VolumeHealthErrorType_INACCESSIBLE))
		health := expectOK(ctx, p.Node().NodeGetVolumeHealth,
			&csi.NodeGetVolumeHealthRequest{VolumeId: p.Volume.GetVolumeId()})
		Expect(fmt.Sprint(health)).To(ContainSubstring("DeviceNotFound"))
		p.remove(ctx)

		moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
		found := strings.Fields(string(got(os.ReadFile(filepath.Join(moved.Target, "lines")))))
		Expect(len(found)).To(BeNumerically(">=", lines))
		for i := range lines {
			Expect(found[i]).To(Equal(fmt.Sprint(i)))
		}
	}, Entry(nil, "ext4"), Entry(nil, "xfs"), Entry(nil, "btrfs"))
}, "--disks=fuse", "--hotplug="+string(adminapi.HotplugFull.With(adminapi.SurpriseRemoval)))

func recorded(p *harness.Plugin) []harness.Change {
	GinkgoHelper()
	return got(harness.Changes(p.LogFile))
}

func eventsOf(changes []harness.Change) (events []string) {
	for _, c := range changes {
		events = append(events, c.Event)
	}
	return events
}

var operationOf = map[string]string{"DiskCreated": "disk_create", "DiskDeleted": "disk_delete",
	"DiskAttached": "instance_disk_attach", "DiskDetached": "instance_disk_detach",
	"SnapshotCreated": "snapshot_create", "SnapshotDeleted": "snapshot_delete"}

func metric(ctx SpecContext, p *harness.Plugin, name string) float64 {
	GinkgoHelper()
	samples := got(p.Metrics(ctx))
	return samples[name]
}

var rackRequests = regexp.MustCompile(
	`^oxide_csi_rack_request_seconds_count\{operation="(.*)",status="(.*)"\}$`)

var _ = describeNodes("the flight recorder", func(f *nodeFixture) {
	inJSON := harness.PluginOptions{Args: []string{"--log-format=json"}}

	It("records each change of the rack once, with the ID of its request, and counts all requests",
		func(ctx SpecContext) {
			before := got(f.rack.Admin.Requests(ctx, 0))
			controller := f.controller(ctx, inJSON)
			ctl, at := controller.Controller(), f.rack.Instance("a").ID
			req := harness.CreateRequest(fresh("recorded"))
			req.Parameters = map[string]string{"csi.storage.k8s.io/pvc/name": "data",
				"csi.storage.k8s.io/pvc/namespace": "shop"}
			var volume *csi.Volume
			for range 2 { // repeated calls change nothing
				resp := expectOK(ctx, ctl.CreateVolume, req)
				volume = resp.GetVolume()
				expectOK(ctx, ctl.ControllerPublishVolume, harness.PublishRequest(volume, at))
			}
			snapshot := expectOK(ctx, ctl.CreateSnapshot, &csi.CreateSnapshotRequest{
				Name: fresh("recorded"), SourceVolumeId: volume.GetVolumeId()})
			id := snapshot.GetSnapshot().GetSnapshotId()
			expectOK(ctx, ctl.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: id})
			expectOK(ctx, ctl.ListSnapshots, &csi.ListSnapshotsRequest{})
			expectOK(ctx, ctl.ListVolumes, &csi.ListVolumesRequest{})
			expectOK(ctx, ctl.GetCapacity, &csi.GetCapacityRequest{})
			for range 2 {
				expectOK(ctx, ctl.ControllerUnpublishVolume, harness.UnpublishRequest(volume, at))
				expectOK(ctx, ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})
				expectOK(ctx, ctl.DeleteSnapshot, &csi.DeleteSnapshotRequest{SnapshotId: id})
			}
			samples := got(controller.Metrics(ctx))
			requests := got(f.rack.Admin.Requests(ctx, len(before)))
			want, got := map[string]int{}, map[string]int{}
			var made, recordedChanges []string
			for _, r := range requests {
				want[fmt.Sprintf("%s %d", r.Operation, r.Status)]++
				if r.Method != http.MethodGet && r.Status < 300 {
					made = append(made, r.Operation+" "+r.RequestID)
				}
			}
			for name, value := range samples {
				if match := rackRequests.FindStringSubmatch(name); match != nil {
					got[match[1]+" "+match[2]] = int(value)
				}
			}
			Expect(got).To(Equal(want))
			Expect(samples["oxide_csi_rack_up"]).To(Equal(1.0))
			for _, c := range recorded(controller) {
				recordedChanges = append(recordedChanges, operationOf[c.Event]+" "+c.Request)
			}
			Expect(recordedChanges).To(Equal(made))
			Expect(harness.CheckChanges(recorded(controller))).To(Succeed())
			Expect(recorded(controller)[0]).To(HaveField("Claim", "shop/data"))
		})

	DescribeTable("records each change on a node once, in the log, the volume's file and the metrics",
		func(ctx SpecContext, access string, stage ...string) {
			n := f.node(ctx, "a", inJSON)
			volume := f.volume(ctx, harness.Access(access))
			p := f.inUse(ctx, volume, n, harness.Access(access))
			for range 2 { // repeated calls change nothing
				Expect(p.stage(ctx)).To(Succeed())
				Expect(p.publish(ctx)).To(Succeed())
			}
			if access != "block" {
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(1.0))
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(1.0))
				Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks_limit")).To(Equal(12.0))
				for _, event := range stage {
					Expect(metric(ctx, n.Plugin, fmt.Sprintf("oxide_csi_changes_total{event=%q}", event))).
						To(Equal(1.0))
				}
				other := *p
				other.Capability = harness.Access("block")
				Expect(other.stage(ctx)).NotTo(Succeed())
				Expect(metric(ctx, n.Plugin, `oxide_csi_calls_total{code="FailedPrecondition",`+
					`method="NodeStageVolume",reason="UseDiffers"}`)).To(Equal(1.0))
			}
			f.detached(ctx, p)
			f.detached(ctx, p)
			Expect(metric(ctx, n.Plugin, "oxide_csi_node_volumes")).To(Equal(0.0))
			Expect(metric(ctx, n.Plugin, "oxide_csi_node_disks")).To(Equal(0.0))
			changes := recorded(n.Plugin)
			want := append(stage, "Published", "Unpublished")
			if access != "block" {
				want = append(want, "Unmounted")
			}
			Expect(eventsOf(changes)).To(Equal(want))
			for _, c := range changes {
				Expect(c.Volume).To(Equal(volume.GetVolumeId()), fmt.Sprint(c))
				Expect(c.Instance).To(Equal(n.Instance.ID), fmt.Sprint(c))
			}
			kept := got(harness.Changes(n.FlightFile(volume.GetVolumeId())))
			var done []harness.Change
			for _, c := range kept {
				if c.Outcome == "done" {
					done = append(done, c)
				}
			}
			Expect(eventsOf(done)).To(Equal(want))
			Expect(harness.CheckChanges(kept)).To(Succeed())
		},
		Entry("ext4", "ext4", "ProvenBlank", "Formatted", "Mounted"), Entry("block", "block"))
})
