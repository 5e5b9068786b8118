//go:build e2e

package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// The names of the classes in the manifests.
const (
	diskClass     = "oxide-disk"
	snapshotClass = "oxide-snapshot"
)

// workload is the image of pods that only run a shell.
const workload = "busybox:1.37"

// fixture is the namespace of one spec. It is deleted with everything that the spec creates in it.
type fixture struct{ ns string }

func newFixture(ctx context.Context) *fixture {
	// A run that was ended early may have left other namespaces.
	namespace := must(api.CoreV1().Namespaces().Create(ctx,
		&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{GenerateName: "e2e-"}},
		metav1.CreateOptions{}))
	return &fixture{ns: namespace.Name}
}

// close deletes the namespace. It also deletes the pods and claims, because the namespace's
// controller takes some seconds to begin. The ledger waits until the volumes are gone; nothing
// waits for the namespace.
func (f *fixture) close(ctx context.Context) {
	now, all := metav1.DeleteOptions{}, metav1.ListOptions{}
	err := api.CoreV1().Namespaces().Delete(ctx, f.ns, now)
	if apierrors.IsNotFound(err) {
		return
	}
	Expect(errors.Join(err, api.CoreV1().Pods(f.ns).DeleteCollection(ctx, now, all),
		api.CoreV1().PersistentVolumeClaims(f.ns).DeleteCollection(ctx, now, all))).To(Succeed())
}

// Claim describes a claim. The zero value is 1 GiB of the class oxide-disk, ReadWriteOnce, with a
// filesystem.
type Claim struct {
	Name    string // default: claim-N
	Class   string
	GiB     int
	Block   bool
	Access  corev1.PersistentVolumeAccessMode
	Restore string // from a VolumeSnapshot in the same namespace
}

var claims atomic.Int64

// Claim creates a PersistentVolumeClaim and returns its name.
func (f *fixture) Claim(ctx context.Context, c Claim) string {
	must(api.CoreV1().PersistentVolumeClaims(f.ns).Create(ctx, c.object(),
		metav1.CreateOptions{}))
	return c.Name
}

// object sets the defaults of c and returns the claim.
func (c *Claim) object() *corev1.PersistentVolumeClaim {
	if c.Name == "" {
		c.Name = fmt.Sprintf("claim-%d", claims.Add(1))
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
	return claim
}

func gib(n int) resource.Quantity { return *resource.NewQuantity(int64(n)<<30, resource.BinarySI) }

// Bound waits until a claim is bound and returns its volume.
func (f *fixture) Bound(ctx context.Context, claim string) *corev1.PersistentVolume {
	var volume string
	Eventually(func(g Gomega) {
		c, err := api.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, claim, metav1.GetOptions{})
		g.Expect(err).NotTo(HaveOccurred())
		g.Expect(c.Status.Phase).To(Equal(corev1.ClaimBound))
		volume = c.Spec.VolumeName
	}).WithContext(ctx).Should(Succeed(), "the claim %s should be bound", claim)
	return must(api.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{}))
}

// Unbound reports whether a claim is not bound now.
func (f *fixture) Unbound(ctx context.Context, claim string) {
	c := must(api.CoreV1().PersistentVolumeClaims(f.ns).Get(ctx, claim, metav1.GetOptions{}))
	Expect(c.Status.Phase).To(Equal(corev1.ClaimPending))
}

// DeleteClaim deletes a claim and waits until it is gone.
func (f *fixture) DeleteClaim(ctx context.Context, claim string) {
	all := api.CoreV1().PersistentVolumeClaims(f.ns)
	Expect(all.Delete(ctx, claim, metav1.DeleteOptions{})).To(Succeed())
	gone(ctx, "the claim "+claim, func() error {
		_, err := all.Get(ctx, claim, metav1.GetOptions{})
		return err
	})
}

// gone waits until get fails because there is no such object.
func gone(ctx context.Context, what string, get func() error) {
	Eventually(get).WithContext(ctx).Should(Satisfy(apierrors.IsNotFound), "%s should be gone", what)
}

// Event waits for an event about an object of the spec whose message contains all of the texts, and
// returns the message. kind is, for example, "Pod", "PersistentVolumeClaim" or "VolumeSnapshot".
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

// stopGrace is how long a pod may take to end; the shell of a workload ends at once.
const stopGrace = int64(5)

// idle is a script that keeps a shell running until it gets a signal.
const idle = "trap 'exit 0' TERM; while :; do sleep 3600 & wait $!; done"

// Pod describes a pod. Claim number I is mounted at /data/I; a raw block volume is a device at
// /dev/data-I.
type Pod struct {
	Name   string // default: pod-N
	Claims []string
	Node   string // where it has to run; "" means anywhere
	// FSGroup and User are set in the pod's security context; nil leaves the image's.
	FSGroup, User *int64
	ReadOnly      bool
	// Script runs before the pod idles. If it fails, the pod fails.
	Script string
	// Edit changes the pod before it is created.
	Edit func(*corev1.Pod)
}

// pod is a pod that was created.
type pod struct {
	s    *fixture
	name string
}

var pods atomic.Int64

// Pod creates a pod with the claims and does not wait for it.
func (f *fixture) Pod(ctx context.Context, p Pod) *pod {
	must(api.CoreV1().Pods(f.ns).Create(ctx, f.podObject(ctx, &p), metav1.CreateOptions{}))
	return &pod{s: f, name: p.Name}
}

func (f *fixture) podObject(ctx context.Context, p *Pod) *corev1.Pod {
	if p.Name == "" {
		p.Name = fmt.Sprintf("pod-%d", pods.Add(1))
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

// Running waits until the pod's container runs.
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

// Pending waits for an event about the pod with the texts, and checks that the pod does not run.
func (p *pod) Pending(ctx context.Context, texts ...string) string {
	message := p.s.Event(ctx, "Pod", p.name, texts...)
	Expect(p.get(ctx).Status.Phase).To(Equal(corev1.PodPending))
	return message
}

func (p *pod) get(ctx context.Context) *corev1.Pod {
	return must(api.CoreV1().Pods(p.s.ns).Get(ctx, p.name, metav1.GetOptions{}))
}

// Node returns the name of the node that the pod runs on.
func (p *pod) Node(ctx context.Context) string {
	return p.get(ctx).Spec.NodeName
}

// Sh runs a script in the pod and returns its output, without white space around it.
func (p *pod) Sh(ctx context.Context, script string) string {
	return must(p.Try(ctx, script))
}

// Try runs a script in the pod and returns its error.
func (p *pod) Try(ctx context.Context, script string) (string, error) {
	out, err := api.exec(ctx, p.s.ns, p.name, "main", "sh", "-ec", script)
	return strings.TrimSpace(out), err
}

// Delete deletes the pod and waits until it is gone.
func (p *pod) Delete(ctx context.Context) {
	deletePods(ctx, p)
}

// deletePods deletes pods at the same time and waits until all are gone.
func deletePods(ctx context.Context, all ...*pod) {
	for _, p := range all {
		Expect(api.CoreV1().Pods(p.s.ns).Delete(ctx, p.name, metav1.DeleteOptions{})).To(Succeed())
	}
	for _, p := range all {
		p.gone(ctx)
	}
}

// gone waits until there is no pod of this name.
func (p *pod) gone(ctx context.Context) {
	gone(ctx, "pod "+p.name, func() error {
		_, err := api.CoreV1().Pods(p.s.ns).Get(ctx, p.name, metav1.GetOptions{})
		return err
	})
}

// restartTimeout is how long a component that was killed may take to serve again.
const restartTimeout = time.Minute
