//go:build e2e

package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	diskClass     = "oxide-disk" // as in the manifests
	snapshotClass = "oxide-snapshot"
)

// workload is the image of pods that only run a shell.
const workload = "busybox:1.37"

// fixture represents the namespace of one spec, which is deleted when the spec ends.
type fixture struct{ ns string }

func newFixture(ctx context.Context) *fixture {
	// An interrupted run may have left namespaces, so the name has to be a new one.
	namespace := must(api.CoreV1().Namespaces().Create(ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}},
		metav1.CreateOptions{}))
	return &fixture{ns: namespace.Name}
}

// close deletes the spec's namespace. It also deletes the claims and pods itself, which is seconds
// faster than the namespace's controller. It does not wait: sameInventory() waits until the volumes
// are gone, and the namespace may disappear later.
func (f *fixture) close(ctx context.Context) {
	now, all := metav1.DeleteOptions{}, metav1.ListOptions{}
	err := api.CoreV1().Namespaces().Delete(ctx, f.ns, now)
	if apierrors.IsNotFound(err) {
		return
	}
	Expect(errors.Join(err, api.CoreV1().Pods(f.ns).DeleteCollection(ctx, now, all),
		api.CoreV1().PersistentVolumeClaims(f.ns).DeleteCollection(ctx, now, all))).To(Succeed())
}

// serial is the last number that is used in the name of a claim, pod, class or snapshot.
var serial atomic.Int64

// Claim describes a claim. The zero value means 1 GiB of the class oxide-disk, ReadWriteOnce, with
// a filesystem.
type Claim struct {
	Name    string // default: claim-N
	Class   string
	GiB     int
	Block   bool
	Access  corev1.PersistentVolumeAccessMode
	Restore string // the VolumeSnapshot to restore, in the same namespace
	Clone   string // the claim to clone, in the same namespace
}

func (f *fixture) Claim(ctx context.Context, c Claim) string {
	must(api.CoreV1().PersistentVolumeClaims(f.ns).Create(ctx, c.object(),
		metav1.CreateOptions{}))
	return c.Name
}

// object sets the defaults in c and returns the PersistentVolumeClaim that c describes.
func (c *Claim) object() *corev1.PersistentVolumeClaim {
	if c.Name == "" {
		c.Name = fmt.Sprintf("claim-%d", serial.Add(1))
	}
	if c.GiB == 0 {
		c.GiB = 1
	}
	if c.Access == "" {
		c.Access = corev1.ReadWriteOnce
	}
	class := cmp.Or(c.Class, diskClass)
	claim := &corev1.PersistentVolumeClaim{
		ObjectMeta: metav1.ObjectMeta{Name: c.Name},
		Spec: corev1.PersistentVolumeClaimSpec{
			AccessModes:      []corev1.PersistentVolumeAccessMode{c.Access},
			StorageClassName: &class,
			Resources: corev1.VolumeResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceStorage: gib(c.GiB),
			}},
		},
	}
	if c.Block {
		mode := corev1.PersistentVolumeBlock
		claim.Spec.VolumeMode = &mode
	}
	if c.Restore != "" {
		group := "snapshot.storage.k8s.io"
		claim.Spec.DataSource = &corev1.TypedLocalObjectReference{
			APIGroup: &group, Kind: "VolumeSnapshot", Name: c.Restore}
	}
	if c.Clone != "" {
		claim.Spec.DataSource = &corev1.TypedLocalObjectReference{
			Kind: "PersistentVolumeClaim", Name: c.Clone}
	}
	return claim
}

func gib(n int) resource.Quantity { return *resource.NewQuantity(int64(n)<<30, resource.BinarySI) }

func (f *fixture) Bound(ctx context.Context, claim string) *corev1.PersistentVolume {
	var volume string
	Eventually(func(g Gomega) {
		c := read(ctx, g, api.CoreV1().PersistentVolumeClaims(f.ns), claim)
		g.Expect(c.Status.Phase).To(Equal(corev1.ClaimBound))
		volume = c.Spec.VolumeName
	}).WithContext(ctx).Should(Succeed(), "the claim %s should be bound", claim)
	return must(api.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{}))
}

func (f *fixture) Unbound(ctx context.Context, claim string) {
	c := must(api.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, claim, metav1.GetOptions{}))
	Expect(c.Status.Phase).To(Equal(corev1.ClaimPending))
}

func (f *fixture) DeleteClaim(ctx context.Context, claim string) {
	all := api.CoreV1().PersistentVolumeClaims(f.ns)
	Expect(all.Delete(ctx, claim, metav1.DeleteOptions{})).To(Succeed())
	gone(ctx, "the claim "+claim, func() error {
		_, err := all.Get(ctx, claim, metav1.GetOptions{})
		return err
	})
}

func gone(ctx context.Context, what string, get func() error) {
	Eventually(get).WithContext(ctx).Should(Satisfy(apierrors.IsNotFound), "%s should be gone", what)
}

// Event waits for an event about an object in the spec's namespace, whose message contains all
// texts, and returns this message.
func (f *fixture) Event(ctx context.Context, kind, name string, texts ...string) string {
	var message string
	Eventually(func() []string {
		list := must(api.CoreV1().Events(f.ns).List(ctx, metav1.ListOptions{}))
		var seen []string
		for _, e := range list.Items {
			if e.InvolvedObject.Kind != kind || e.InvolvedObject.Name != name {
				continue
			}
			lacks := func(text string) bool { return !strings.Contains(e.Message, text) }
			if !slices.ContainsFunc(texts, lacks) {
				message = e.Message
				return nil
			}
			seen = append(seen, e.Reason+": "+e.Message)
		}
		return append(seen, fmt.Sprintf("(%d events about %s %s, none with %q)",
			len(seen), kind, name, texts))
	}).WithContext(ctx).Should(BeEmpty())
	return message
}

// stopGrace is the grace period of pods in seconds. It is short, because their shells end at once.
const stopGrace = int64(5)

const idle = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"

// Pod describes a pod. The claim with index I is mounted at /data/I, or as a device at /dev/data-I
// if it is a raw block volume.
type Pod struct {
	Name   string // default: pod-N
	Claims []string
	Node   string // the node for the pod; "" means any node
	// FSGroup and User are set in the pod's security context. Nil means the image's default.
	FSGroup, User *int64
	ReadOnly      bool
	// Script runs before the pod idles. If it fails, the pod fails.
	Script string
	Edit   func(*corev1.Pod)
}

type pod struct {
	s    *fixture
	name string
}

// Pod creates a pod, and does not wait until it runs.
func (f *fixture) Pod(ctx context.Context, p Pod) *pod {
	must(api.CoreV1().Pods(f.ns).Create(ctx, f.podObject(ctx, &p), metav1.CreateOptions{}))
	return &pod{s: f, name: p.Name}
}

func (f *fixture) podObject(ctx context.Context, p *Pod) *corev1.Pod {
	if p.Name == "" {
		p.Name = fmt.Sprintf("pod-%d", serial.Add(1))
	}
	grace := stopGrace
	object := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name},
		Spec: corev1.PodSpec{
			TerminationGracePeriodSeconds: &grace,
			SecurityContext: &corev1.PodSecurityContext{FSGroup: p.FSGroup,
				RunAsUser: p.User},
			Containers: []corev1.Container{{
				Name: "main", Image: workload,
				Command: []string{"sh", "-ec", p.Script + "\n" + idle},
			}},
		},
	}
	if p.Node != "" {
		object.Spec.NodeSelector = map[string]string{corev1.LabelHostname: p.Node}
	}
	for i, claim := range p.Claims {
		f.addVolume(ctx, &object.Spec, i, claim, p.ReadOnly)
	}
	if p.Edit != nil {
		p.Edit(object)
	}
	return object
}

func (f *fixture) addVolume(ctx context.Context, spec *corev1.PodSpec, i int, claim string,
	readOnly bool) {
	name, main := fmt.Sprintf("data-%d", i), &spec.Containers[0]
	c := must(api.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, claim, metav1.GetOptions{}))
	spec.Volumes = append(spec.Volumes, corev1.Volume{Name: name,
		VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{
				ClaimName: claim, ReadOnly: readOnly},
		}})
	if c.Spec.VolumeMode != nil && *c.Spec.VolumeMode == corev1.PersistentVolumeBlock {
		main.VolumeDevices = append(main.VolumeDevices,
			corev1.VolumeDevice{Name: name, DevicePath: "/dev/" + name})
		return
	}
	main.VolumeMounts = append(main.VolumeMounts,
		corev1.VolumeMount{Name: name, MountPath: fmt.Sprintf("/data/%d", i)})
}

func (p *pod) Running(ctx context.Context) *pod {
	Eventually(func(g Gomega) {
		got := p.get(ctx)
		g.Expect(got.Status.Phase).To(Equal(corev1.PodRunning), "pod %s: %s", p.name,
			got.Status.Message)
		for _, c := range got.Status.ContainerStatuses {
			g.Expect(c.State.Running).NotTo(BeNil(), "pod %s: %+v", p.name, c.State)
		}
	}).WithContext(ctx).Should(Succeed(), "pod %s should run", p.name)
	return p
}

func (p *pod) Pending(ctx context.Context, texts ...string) string {
	message := p.s.Event(ctx, "Pod", p.name, texts...)
	Expect(p.get(ctx).Status.Phase).To(Equal(corev1.PodPending))
	return message
}

func (p *pod) get(ctx context.Context) *corev1.Pod {
	return must(api.CoreV1().Pods(p.s.ns).Get(ctx, p.name, metav1.GetOptions{}))
}

func (p *pod) Node(ctx context.Context) string {
	return p.get(ctx).Spec.NodeName
}

func (p *pod) Sh(ctx context.Context, script string) string {
	return must(p.Try(ctx, script))
}

func (p *pod) Try(ctx context.Context, script string) (string, error) {
	out, err := api.exec(ctx, p.s.ns, p.name, "main", "sh", "-ec", script)
	return strings.TrimSpace(out), err
}

func (p *pod) Delete(ctx context.Context) {
	deletePods(ctx, p)
}

func deletePods(ctx context.Context, all ...*pod) {
	for _, p := range all {
		Expect(api.CoreV1().Pods(p.s.ns).Delete(ctx, p.name, metav1.DeleteOptions{})).To(Succeed())
	}
	for _, p := range all {
		p.gone(ctx)
	}
}

func (p *pod) gone(ctx context.Context) {
	gone(ctx, "pod "+p.name, func() error {
		_, err := api.CoreV1().Pods(p.s.ns).Get(ctx, p.name, metav1.GetOptions{})
		return err
	})
}

// restartTimeout is how long a killed component may take until it serves again.
const restartTimeout = time.Minute

// Class describes the differences between a spec's StorageClass and oxide-disk.
type Class struct {
	Parameters   map[string]string
	MountOptions []string
	Immediate    bool // a volume is created before a pod uses the claim
	Retain       bool // a volume outlives its claim
}

const fsTypeKey = "csi.storage.k8s.io/fstype"

func (f *fixture) Class(ctx context.Context, c Class) string {
	class := &storagev1.StorageClass{
		ObjectMeta:   metav1.ObjectMeta{Name: fmt.Sprintf("%s-%d", f.ns, serial.Add(1))},
		Provisioner:  driverName,
		Parameters:   c.Parameters,
		MountOptions: c.MountOptions,
	}
	binding, reclaim := storagev1.VolumeBindingWaitForFirstConsumer,
		corev1.PersistentVolumeReclaimDelete
	if c.Immediate {
		binding = storagev1.VolumeBindingImmediate
	}
	if c.Retain {
		reclaim = corev1.PersistentVolumeReclaimRetain
	}
	class.VolumeBindingMode, class.ReclaimPolicy = &binding, &reclaim
	must(api.StorageV1().StorageClasses().Create(ctx, class, metav1.CreateOptions{}))
	f.atEnd(func(ctx context.Context) {
		Expect(api.StorageV1().StorageClasses().Delete(ctx, class.Name, metav1.DeleteOptions{})).
			To(Succeed())
	})
	return class.Name
}

// atEnd closes the fixture after the spec, even after a failed one, and then calls do().
func (f *fixture) atEnd(do func(context.Context)) {
	DeferCleanup(func(ctx SpecContext) {
		f.close(ctx)
		do(ctx)
	}, NodeTimeout(settleTimeout+time.Minute))
}

// DeleteVolume deletes a PersistentVolume, if it exists, and keeps its disk: it first sets the
// reclaim policy to Retain.
func (f *fixture) DeleteVolume(ctx context.Context, name string) {
	all := api.CoreV1().PersistentVolumes()
	_, err := all.Patch(ctx, name, types.MergePatchType,
		[]byte(`{"spec":{"persistentVolumeReclaimPolicy":"Retain"}}`), metav1.PatchOptions{})
	unlessGone := Or(Succeed(), Satisfy(apierrors.IsNotFound))
	Expect(err).To(unlessGone)
	Expect(all.Delete(ctx, name, metav1.DeleteOptions{})).To(unlessGone)
	volumeGone(ctx, name)
}

func volumeGone(ctx context.Context, name string) {
	gone(ctx, "the PersistentVolume "+name, func() error {
		_, err := api.CoreV1().PersistentVolumes().Get(ctx, name, metav1.GetOptions{})
		return err
	})
}

var snapshotKind = schema.GroupVersionKind{
	Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshot"}

var snapshotContentKind = schema.GroupVersionKind{
	Group: "snapshot.storage.k8s.io", Version: "v1", Kind: "VolumeSnapshotContent"}

type snapshot struct {
	name   string
	object *unstructured.Unstructured
	// content is the name of the VolumeSnapshotContent, and handle the snapshot's UUID on the rack.
	content, handle string
}

// Snapshot creates a VolumeSnapshot. The method Ready waits until the snapshot is ready to use.
func (f *fixture) Snapshot(ctx context.Context, claim string) *snapshot {
	made := &snapshot{name: fmt.Sprintf("snapshot-%d", serial.Add(1))}
	made.object = &unstructured.Unstructured{Object: map[string]any{
		"metadata": map[string]any{"name": made.name, "namespace": f.ns},
		"spec": map[string]any{
			"volumeSnapshotClassName": snapshotClass,
			"source":                  map[string]any{"persistentVolumeClaimName": claim},
		},
	}}
	made.object.SetGroupVersionKind(snapshotKind)
	api.apply(ctx, made.object)
	return made
}

func (n *snapshot) Ready(ctx context.Context) *snapshot {
	all := must(api.resource(snapshotKind, n.object.GetNamespace()))
	Eventually(func(g Gomega) {
		got, err := all.Get(ctx, n.name, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		ready, _, _ := unstructured.NestedBool(got.Object, "status", "readyToUse")
		g.Expect(ready).To(BeTrue(), "its status is %v", got.Object["status"])
		n.content, _, _ = unstructured.NestedString(got.Object, "status",
			"boundVolumeSnapshotContentName")
	}).WithContext(ctx).Should(Succeed(), "the snapshot %s should be ready", n.name)
	content := must(must(api.resource(snapshotContentKind, "")).Get(ctx, n.content,
		metav1.GetOptions{}))
	n.handle, _, _ = unstructured.NestedString(content.Object, "status", "snapshotHandle")
	Expect(n.handle).NotTo(BeEmpty())
	return n
}

// Delete deletes a ready snapshot, and waits until the cluster has none of its objects.
func (n *snapshot) Delete(ctx context.Context) {
	removeAll(ctx, []*unstructured.Unstructured{n.object})
	contents := must(api.resource(snapshotContentKind, ""))
	gone(ctx, "the content of "+n.name, func() error {
		_, err := contents.Get(ctx, n.content, metav1.GetOptions{})
		return err
	})
}

func (f *fixture) applyExample(ctx context.Context, name string,
	edit func(*unstructured.Unstructured)) {
	for _, object := range must(deploy.Parse(must(deploy.Files.ReadFile("examples/" + name)))) {
		object.SetNamespace(f.ns)
		if edit != nil {
			edit(object)
		}
		api.apply(ctx, object)
	}
}

func (p *pod) Filesystem(ctx context.Context, path string) (kind string, sizeBytes int64) {
	out := p.Sh(ctx, fmt.Sprintf(
		`awk '$2 == "%[1]s" {print $3}' /proc/mounts; stat -f -c '%%b %%S' %[1]s`, path))
	var blocks, blockBytes int64
	_, err := fmt.Sscan(out, &kind, &blocks, &blockBytes)
	Expect(err).NotTo(HaveOccurred(), "in %q", out)
	return kind, blocks * blockBytes
}

// beMostOf matches 85 to 100 percent of a disk's size: a filesystem's metadata takes the remainder.
func beMostOf(giB int) OmegaMatcher {
	disk := int64(giB) << 30
	return SatisfyAll(BeNumerically(">", disk/100*85), BeNumerically("<=", disk))
}

// The simulated rack of deploy/kustomize/simulator has these ports and names.
const (
	rackAPIPort   = 12225
	rackAdminPort = 12226
	rackProject   = "default"
	rackToken     = "oxide-token-e2e"
)

type rackClients struct {
	harness.Administrator
	Admin adminapi.Client
}

// newRackClients connects to the rack at the address of n, the control plane's node. The rack's pod
// runs there with hostNetwork.
func newRackClients(n node) *rackClients {
	address, _, err := n.IP()
	Expect(err).NotTo(HaveOccurred())
	client := must(oxide.NewClient(
		oxide.WithHost(fmt.Sprintf("http://%s:%d", address, rackAPIPort)),
		oxide.WithToken(rackToken),
		oxide.WithHTTPClient(&http.Client{
			Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute,
		})))
	admin := adminapi.Client{URL: fmt.Sprintf("http://%s:%d", address, rackAdminPort)}
	return &rackClients{harness.Administrator{Client: client}, admin}
}

// attachedTo returns the worker to whose instance the disk is attached, or "" for a detached disk.
func (r *rackClients) attachedTo(ctx context.Context, diskID string) (string, error) {
	state, err := r.Admin.State(ctx)
	if err != nil {
		return "", err
	}
	for _, a := range state.Attachments {
		if a.DiskID != diskID {
			continue
		}
		for worker, id := range instanceIDs {
			if id == a.InstanceID {
				return worker, nil
			}
		}
		return a.InstanceID, nil
	}
	return "", nil
}

func (f *fixture) diskByHand(ctx context.Context, name string, giB int) string {
	disk := must(theRack.CreateDisk(ctx, rackProject, name, int64(giB)<<30))
	f.diskRemovedLater(disk.Id)
	return disk.Id
}

func (f *fixture) diskRemovedLater(id string) {
	f.atEnd(func(ctx context.Context) {
		worker := must(theRack.attachedTo(ctx, id))
		if worker != "" {
			detachByHand(ctx, id, worker)
		}
		if theRack.hasDisk(ctx, id) {
			Expect(theRack.DeleteDisk(ctx, id)).To(Succeed())
		}
	})
}

func (r *rackClients) hasDisk(ctx context.Context, id string) bool {
	return slices.Contains(r.diskIDs(ctx), id)
}

func (r *rackClients) diskIDs(ctx context.Context) []string {
	state := must(r.Admin.State(ctx))
	ids := []string{}
	for _, d := range state.Disks {
		ids = append(ids, d.ID)
	}
	return ids
}

func (r *rackClients) disk(ctx context.Context, id string) *oxide.Disk {
	return must(r.Client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(id)}))
}

func attachByHand(ctx context.Context, disk, worker string) {
	Expect(theRack.AttachDisk(ctx, disk, instanceIDs[worker])).To(Succeed())
}

func detachByHand(ctx context.Context, disk, worker string) {
	Expect(theRack.DetachDisk(ctx, disk, instanceIDs[worker])).To(Succeed())
}

func switchRack(ctx context.Context, name string, to, back any) {
	DeferCleanup(func(ctx SpecContext) {
		Expect(theRack.Admin.Switch(ctx, map[string]any{name: back})).To(Succeed())
	}, NodeTimeout(2*restartTimeout))
	Expect(theRack.Admin.Switch(ctx, map[string]any{name: to})).To(Succeed())
}

func fault(ctx context.Context, rule adminapi.Fault) (id string) {
	DeferCleanup(func(ctx SpecContext) {
		if slices.ContainsFunc(must(theRack.Admin.Faults(ctx)),
			func(f adminapi.ActiveFault) bool { return f.ID == id }) {
			Expect(theRack.Admin.RemoveFault(ctx, id)).To(Succeed())
		}
	}, NodeTimeout(restartTimeout))
	id = must(theRack.Admin.AddFault(ctx, rule))
	return id
}

func withoutHotplug(ctx context.Context) { switchRack(ctx, "hotplug", "none", "full") }

// requestsOf returns the requests of one operation in the rack's log after a given entry.
func requestsOf(ctx context.Context, operation string, since int) []adminapi.Request {
	all := must(theRack.Admin.Requests(ctx, since))
	return slices.DeleteFunc(all, func(r adminapi.Request) bool { return r.Operation != operation })
}

func lastRequest(ctx context.Context) int {
	all := must(theRack.Admin.Requests(ctx, 0))
	if len(all) == 0 {
		return 0
	}
	return all[len(all)-1].Seq
}

func newDisks(ctx context.Context, before adminapi.State) []string {
	return slices.DeleteFunc(theRack.diskIDs(ctx), func(id string) bool {
		return slices.ContainsFunc(before.Disks, func(d adminapi.Disk) bool { return d.ID == id })
	})
}

func (f *fixture) OneDiskEach(ctx context.Context, before adminapi.State, claims ...string) {
	handles := make([]string, len(claims))
	for i, claim := range claims {
		handles[i] = f.Bound(ctx, claim).Spec.CSI.VolumeHandle
	}
	Expect(newDisks(ctx, before)).To(ConsistOf(handles), "one disk for each of %v", claims)
}
