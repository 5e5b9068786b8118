//go:build e2e

package e2e

import (
	"context"
	"maps"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"
)

// canary is part of every wrong value that nobody may see, and must not appear anywhere.
const canary = "canary"

// wrongSecret is a Secret with one wrong value, and the errors that it has to cause.
type wrongSecret struct {
	name, key string
	// value replaces the right value; if missing is set, there is no value.
	value   string
	missing bool
	// says lists the parts of one line of the controller's log; if missing is set, of the pod's
	// status.
	says []string
	// event lists the parts of an event of the pod, for a controller that runs but cannot work.
	event []string
}

var wrongSecrets = []wrongSecret{
	{name: "no-token", key: "token", missing: true, says: []string{"token", "oxide-secret"}},
	{name: "no-cluster-id", key: "cluster-id", missing: true,
		says: []string{"cluster-id", "oxide-secret"}},
	{name: "malformed-token", key: "token", value: "a token of the " + canary,
		says: []string{"OXIDE_TOKEN", "holds no valid token"}},
	{name: "wrong-token", key: "token", value: "oxide-token-" + canary,
		says:  []string{"the rack does not accept this controller", "TokenRejected"},
		event: []string{"Readiness probe failed", "TokenRejected"}},
	// Host and project are no secrets, and whoever is paged needs them.
	{name: "wrong-host", key: "host", value: "https://nowhere.invalid",
		says: []string{"the rack at OXIDE_HOST does not answer", "RackUnavailable",
			"connect to nowhere.invalid:443"},
		event: []string{"Readiness probe failed", "the rack at OXIDE_HOST", "RackUnavailable"}},
	{name: "unknown-project", key: "project", value: "no-such-project",
		says:  []string{"the rack does not accept this controller", "OXIDE_PROJECT"},
		event: []string{"Readiness probe failed", "ProjectNotFound"}},
}

var _ = Describe("a Secret", func() {
	It("that lacks a key or has a wrong value causes an error of one line without the value, "+
		"and the controller runs after the Secret is corrected (D-45)", func(ctx SpecContext) {
		right := rightSecret(ctx)
		for _, wrong := range wrongSecrets {
			s.secret(ctx, wrong, right)
			s.controllerOf(ctx, wrong.name)
		}
		for _, wrong := range wrongSecrets {
			s.complains(ctx, wrong)
		}
		for _, wrong := range wrongSecrets {
			s.keepsSecret(ctx, wrong, right)
		}
		for _, wrong := range wrongSecrets {
			s.mend(ctx, wrong, right)
		}
		for _, wrong := range wrongSecrets {
			Expect(poll(ctx, rolloutTimeout, func(ctx context.Context) error {
				return deploymentReady(ctx, s.ns, wrong.name)
			})).To(Succeed(), "the controller of the Secret %s", wrong.name)
		}
	}, NodeTimeout(5*time.Minute))
})

// rightSecret returns the Secret that the suite installed.
func rightSecret(ctx context.Context) map[string][]byte {
	GinkgoHelper()
	secret, err := api.CoreV1().Secrets(driverNamespace).Get(ctx, "oxide-secret",
		metav1.GetOptions{})
	Expect(err).NotTo(HaveOccurred())
	return secret.Data
}

func (w wrongSecret) secretName() string { return "oxide-secret-" + w.name }

// secret creates a wrong Secret from the right one.
func (f *fixture) secret(ctx context.Context, wrong wrongSecret, right map[string][]byte) {
	GinkgoHelper()
	data := maps.Clone(right)
	data[wrong.key] = []byte(wrong.value)
	if wrong.missing {
		delete(data, wrong.key)
	}
	_, err := api.CoreV1().Secrets(f.ns).Create(ctx, &corev1.Secret{
		ObjectMeta: metav1.ObjectMeta{Name: wrong.secretName()}, Data: data},
		metav1.CreateOptions{})
	Expect(err).NotTo(HaveOccurred())
}

// controllerOf runs a second controller beside the installed one. It has another Secret, and lacks
// the sidecars that would change something in the cluster.
func (f *fixture) controllerOf(ctx context.Context, name string) {
	GinkgoHelper()
	d := installedController()
	labels := map[string]string{"secret": name}
	one := int32(1)
	d.ObjectMeta = metav1.ObjectMeta{Name: name}
	d.Spec.Replicas, d.Spec.Selector = &one, &metav1.LabelSelector{MatchLabels: labels}
	template := &d.Spec.Template
	template.Labels = labels
	template.Spec.ServiceAccountName, template.Spec.Affinity = "", nil
	var kept []corev1.Container
	for _, c := range template.Spec.Containers {
		if c.Name == "oxide-plugin" || c.Name == "liveness-probe" {
			kept = append(kept, c)
		}
	}
	template.Spec.Containers = kept
	for _, c := range kept {
		for _, e := range c.Env {
			if e.ValueFrom != nil && e.ValueFrom.SecretKeyRef != nil {
				e.ValueFrom.SecretKeyRef.Name = "oxide-secret-" + name
			}
		}
	}
	for _, v := range template.Spec.Volumes {
		if v.Secret != nil {
			v.Secret.SecretName = "oxide-secret-" + name
		}
	}
	_, err := api.AppsV1().Deployments(f.ns).Create(ctx, d, metav1.CreateOptions{})
	Expect(err).NotTo(HaveOccurred())
}

// installedController returns a copy of the Deployment that the suite installed.
func installedController() *appsv1.Deployment {
	GinkgoHelper()
	d := &appsv1.Deployment{}
	object := findInstalled("Deployment", controllerName)
	Expect(runtime.DefaultUnstructuredConverter.FromUnstructured(object.Object, d)).To(Succeed())
	return d
}

// findInstalled returns a copy of an object that the suite installed, as it was applied.
func findInstalled(kind, name string) *unstructured.Unstructured {
	GinkgoHelper()
	for _, o := range installed {
		if o.GetKind() == kind && o.GetName() == name {
			return o.DeepCopy()
		}
	}
	Fail("the suite installed no " + kind + " " + name)
	return nil
}

// podOfSecret returns the pod of the controller with this Secret, or nil if there is none yet.
func (f *fixture) podOfSecret(ctx context.Context, name string) *corev1.Pod {
	GinkgoHelper()
	list, err := api.CoreV1().Pods(f.ns).List(ctx,
		metav1.ListOptions{LabelSelector: "secret=" + name})
	Expect(err).NotTo(HaveOccurred())
	for _, p := range list.Items {
		if p.DeletionTimestamp == nil {
			return &p
		}
	}
	return nil
}

// complains waits until the pod reports what is wrong.
func (f *fixture) complains(ctx context.Context, wrong wrongSecret) {
	GinkgoHelper()
	Eventually(func() []string {
		p := f.podOfSecret(ctx, wrong.name)
		if p == nil {
			return nil
		}
		if wrong.missing {
			waiting := containerStatus(*p, "oxide-plugin").State.Waiting
			if waiting == nil || waiting.Reason != "CreateContainerConfigError" {
				return nil
			}
			return []string{waiting.Message}
		}
		return f.linesOf(ctx, p)
	}).WithContext(ctx).Should(ContainElement(containsEach(wrong.says)),
		"what the pod of the Secret %s says", wrong.name)
	if wrong.event != nil {
		f.Event(ctx, "Pod", f.podOfSecret(ctx, wrong.name).Name, wrong.event...)
	}
	if status := containerStatus(*f.podOfSecret(ctx, wrong.name), "oxide-plugin"); status.Ready {
		Fail("the controller with the Secret " + wrong.name + " should not be ready")
	}
}

// linesOf returns the log of the driver in a pod, from its last container that has a log.
func (f *fixture) linesOf(ctx context.Context, p *corev1.Pod) []string {
	text, err := api.CoreV1().Pods(f.ns).GetLogs(p.Name,
		&corev1.PodLogOptions{Container: "oxide-plugin"}).DoRaw(ctx)
	if err != nil || len(text) == 0 {
		return nil // Not started yet.
	}
	return strings.Split(strings.TrimSpace(string(text)), "\n")
}

// containsEach matches a text that contains all of these texts.
func containsEach(texts []string) OmegaMatcher {
	each := make([]OmegaMatcher, len(texts))
	for i, text := range texts {
		each[i] = ContainSubstring(text)
	}
	return And(each...)
}

// keepsSecret checks that neither the wrong value nor the right token appears in status, events or
// logs.
func (f *fixture) keepsSecret(ctx context.Context, wrong wrongSecret, right map[string][]byte) {
	GinkgoHelper()
	p := f.podOfSecret(ctx, wrong.name)
	events, err := api.CoreV1().Events(f.ns).List(ctx,
		metav1.ListOptions{FieldSelector: "involvedObject.name=" + p.Name})
	Expect(err).NotTo(HaveOccurred())
	shown, err := yaml.Marshal([]any{p.Status, events.Items})
	Expect(err).NotTo(HaveOccurred())
	log := strings.Join(f.linesOf(ctx, p), "\n")
	for _, secret := range []string{canary, string(right["token"])} {
		Expect(log).NotTo(ContainSubstring(secret), "the log of the pod of %s", wrong.name)
		Expect(string(shown)).NotTo(ContainSubstring(secret), "status and events of %s", wrong.name)
	}
	status := containerStatus(*p, "oxide-plugin")
	if wrong.event != nil {
		Expect(status.RestartCount).To(BeZero(), "no restart mends the Secret %s", wrong.name)
	}
	ended := status.LastTerminationState.Terminated
	if !wrong.missing && ended != nil {
		Expect(strings.Split(log, "\n")).To(HaveLen(1), "a process that ends says why in one line")
	}
}

// mend corrects a Secret. A pod that has already read its variables is started again.
func (f *fixture) mend(ctx context.Context, wrong wrongSecret, right map[string][]byte) {
	GinkgoHelper()
	secrets := api.CoreV1().Secrets(f.ns)
	secret, err := secrets.Get(ctx, wrong.secretName(), metav1.GetOptions{})
	Expect(err).NotTo(HaveOccurred())
	secret.Data = right
	_, err = secrets.Update(ctx, secret, metav1.UpdateOptions{})
	Expect(err).NotTo(HaveOccurred())
	p := f.podOfSecret(ctx, wrong.name)
	if wrong.key != "token" && wrong.event != nil {
		Expect(api.CoreV1().Pods(f.ns).Delete(ctx, p.Name, metav1.DeleteOptions{})).To(Succeed())
		return
	}
	// A change of a pod makes its kubelet update the pod's mounts at once.
	_, err = api.CoreV1().Pods(f.ns).Patch(ctx, p.Name, types.MergePatchType,
		[]byte(`{"metadata":{"annotations":{"secret":"mended"}}}`), metav1.PatchOptions{})
	Expect(err).NotTo(HaveOccurred())
}
