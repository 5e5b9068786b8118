//go:build linux

package sanity

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// driverCommand returns a command that runs the driver with exactly that environment and the
// machine's PATH.
func driverCommand(ctx context.Context, env map[string]string, args ...string) *exec.Cmd {
	GinkgoHelper()
	path, err := theRun.Binary(ctx, "oxide-csi-plugin")
	Expect(err).NotTo(HaveOccurred())
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

func (d doctored) state(link string) string {
	GinkgoHelper()
	Expect(d.Chains).To(HaveLen(1))
	for _, l := range d.Chains[0].Links {
		if l.Link == link {
			return l.State
		}
	}
	Fail("there is no link " + link)
	return ""
}

// inspected runs oxide-csi-plugin inspect on the node, and returns the path of the report.
func (n *node) inspected(ctx context.Context, volume *csi.Volume) (path string) {
	GinkgoHelper()
	cmd := driverCommand(ctx, map[string]string{
		"OXIDE_SYSFS_ROOT": filepath.Join(n.Instance.Guest, "sys"),
		"OXIDE_DEV_ROOT":   filepath.Join(n.Instance.Guest, "dev"),
		"OXIDE_STATE_DIR":  filepath.Join(n.Dir, "volumes"),
	}, "inspect", "--volume="+volume.GetVolumeId()+"="+volume.GetVolumeContext()["diskName"])
	report, err := cmd.Output()
	Expect(err).NotTo(HaveOccurred())
	return fileWith("report.json", report)
}

func fileWith(name string, text []byte) (path string) {
	GinkgoHelper()
	path = filepath.Join(GinkgoT().TempDir(), name)
	Expect(os.WriteFile(path, text, 0o600)).To(Succeed())
	return path
}

type object = map[string]any

// kubernetesOf writes the objects that kubectl prints for a cluster in which a pod on a node uses
// the volume, and returns the path of the file.
func kubernetesOf(p *placement) (path string) {
	GinkgoHelper()
	const name, driver = "pv-1", "csi.oxide.computer"
	mode := "Filesystem"
	if p.Capability.GetBlock() != nil {
		mode = "Block"
	}
	meta := object{"name": "data", "namespace": "default", "creationTimestamp": time.Now().UTC()}
	text, err := json.Marshal(object{"kind": "List", "items": []object{
		{"kind": "PersistentVolumeClaim", "metadata": meta, "spec": object{"volumeName": name},
			"status": object{"phase": "Bound"}},
		{"kind": "PersistentVolume", "metadata": object{"name": name},
			"spec": object{"claimRef": meta, "volumeMode": mode, "csi": object{
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
				"persistentVolumeClaim": object{"claimName": "data"}}}},
			"status": object{"phase": "Running"}},
	}})
	Expect(err).NotTo(HaveOccurred())
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

// clusterTree returns the tree that doctor cluster prints, and demands that nothing in it is
// broken. The doctor reads the objects from its standard input.
func (f *nodeFixture) clusterTree(ctx context.Context, objects, report string) string {
	GinkgoHelper()
	cmd := driverCommand(ctx, map[string]string{"OXIDE_HOST": f.rack.URL, "OXIDE_TOKEN": f.rack.Token,
		"OXIDE_PROJECT": f.rack.Project}, "doctor", "cluster", "--objects=-", "--node-report="+report)
	in, err := os.Open(objects)
	Expect(err).NotTo(HaveOccurred())
	defer in.Close()
	var log bytes.Buffer
	cmd.Stdin, cmd.Stderr = in, &log
	out, err := cmd.Output()
	Expect(err).NotTo(HaveOccurred(), "%s%s", out, log.String())
	return string(out)
}

var _ = describeNodes("the doctor", func(f *nodeFixture) {
	It("finds no fault in a volume in use, and only reads from the rack", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		objects, report := kubernetesOf(p), f.a.inspected(ctx, p.Volume)
		before, err := f.rack.Admin.Requests(ctx, 0)
		Expect(err).NotTo(HaveOccurred())
		d := f.diagnosed(ctx, f.rack.Token, objects, report)
		Expect(d.status).To(Equal(0), "%+v", d)
		asked, err := f.rack.Admin.Requests(ctx, len(before))
		Expect(err).NotTo(HaveOccurred())
		Expect(asked).NotTo(BeEmpty())
		for _, r := range asked {
			Expect(r.Method).To(Equal("GET"), "%+v", r)
		}
		By("showing the volume in the tree of the cluster")
		tree := f.clusterTree(ctx, objects, report)
		Expect(tree).To(ContainSubstring("instance " + p.Instance.Name + " ("))
		Expect(tree).To(MatchRegexp(`ok +nvme\d+n1: .* attached → claim default/data → pod app\n`))
		By("reporting the missing observations with a token that the rack refuses")
		d = f.diagnosed(ctx, "oxide-token-wrong", objects, report)
		Expect(d.status).To(Equal(3), "%+v", d)
		Expect(d.state("disk")).To(Equal("unseen"))
		Expect(d.state("mounts")).To(Equal("ok"))
		f.detached(ctx, p)
	})

	It("finds a disk that was detached, and a volume that was unmounted, by hand",
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
