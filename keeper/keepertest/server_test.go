package keepertest

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var start = time.Date(2026, 6, 12, 18, 1, 2, 0, time.UTC)

func serve(t *testing.T) *Server {
	return Serve(t, func() time.Time { return start })
}

func clientset(t *testing.T, s *Server, name string) (client *kubernetes.Clientset, cut func()) {
	t.Helper()
	config, cut := s.Client(name)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client, cut
}

func must[V any](v V, err error) func(t *testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func named(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Name: name} }

func inSpace(name string) metav1.ObjectMeta {
	return metav1.ObjectMeta{Namespace: "shop", Name: name}
}

func pod(name, node string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: inSpace(name), Spec: corev1.PodSpec{NodeName: node}}
	p.Labels = map[string]string{"app": "shop"}
	p.Status.Phase = corev1.PodRunning
	return p
}

func TestAClientsetCreatesReadsChangesAndDeletesANode(t *testing.T) {
	s := serve(t)
	client, _ := clientset(t, s, "keeper")
	nodes, ctx := client.CoreV1().Nodes(), t.Context()
	created := must(nodes.Create(ctx, &corev1.Node{ObjectMeta: named("a")},
		metav1.CreateOptions{}))(t)
	if created.UID == "" || created.ResourceVersion != "1" ||
		!created.CreationTimestamp.Time.Equal(start) {
		t.Errorf("the created node has the metadata %v", created.ObjectMeta)
	}
	_, err := nodes.Create(ctx, &corev1.Node{ObjectMeta: named("a")}, metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		t.Errorf("a second create: %v, want AlreadyExists", err)
	}

	t.Run("an update leaves the status, and an update of the status the rest", func(t *testing.T) {
		node := created.DeepCopy()
		node.Spec.Unschedulable = true
		node.Status.Phase = corev1.NodeRunning
		node = must(nodes.Update(ctx, node, metav1.UpdateOptions{}))(t)
		node.Spec.Unschedulable = false
		node.Status.Phase = corev1.NodePending
		must(nodes.UpdateStatus(ctx, node, metav1.UpdateOptions{}))(t)
		got := must(nodes.Get(ctx, "a", metav1.GetOptions{}))(t)
		if !got.Spec.Unschedulable || got.Status.Phase != corev1.NodePending {
			t.Errorf("the node is %v, %v", got.Spec, got.Status)
		}
	})
	t.Run("an update of an old version conflicts", func(t *testing.T) {
		_, err := nodes.Update(ctx, created, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("%v, want a conflict", err)
		}
		_, err = nodes.Patch(ctx, "a", types.MergePatchType,
			[]byte(`{"metadata":{"resourceVersion":"1"}}`), metav1.PatchOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("%v, want a conflict of the patch", err)
		}
	})
	t.Run("an update of another node of the name conflicts", func(t *testing.T) {
		node := created.DeepCopy()
		node.ResourceVersion, node.UID = "", "another"
		_, err := nodes.Update(ctx, node, metav1.UpdateOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("%v, want a conflict", err)
		}
	})
	t.Run("an update that changes nothing makes no version", func(t *testing.T) {
		before := must(nodes.Get(ctx, "a", metav1.GetOptions{}))(t)
		after := must(nodes.Update(ctx, before, metav1.UpdateOptions{}))(t)
		if diff := cmp.Diff(before, after); diff != "" {
			t.Error(diff)
		}
	})
	t.Run("patches", func(t *testing.T) {
		for _, patch := range []string{`{"metadata":{"annotations":{"x":"1","y":"2"},
			"finalizers":["a/a"]},"spec":{"unschedulable":null}}`,
			`{"metadata":{"annotations":{"x":null,"z":"3"}}}`} {
			must(nodes.Patch(ctx, "a", types.MergePatchType, []byte(patch), metav1.PatchOptions{}))(t)
		}
		got, _ := Get[*corev1.Node](s, "", "a")
		want := created.ObjectMeta
		want.ResourceVersion = got.ResourceVersion
		want.Annotations = map[string]string{"y": "2", "z": "3"}
		want.Finalizers = []string{"a/a"}
		if diff := cmp.Diff(want, got.ObjectMeta); diff != "" || got.Spec.Unschedulable {
			t.Errorf("unschedulable: %v, metadata: %s", got.Spec.Unschedulable, diff)
		}
		_, err := nodes.Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"taint":[]}}`),
			metav1.PatchOptions{})
		if !apierrors.IsBadRequest(err) {
			t.Errorf("a field that nodes do not have: %v, want BadRequest", err)
		}
	})
	Edit(s, "", "a", func(n *corev1.Node) { n.Finalizers = nil })
	if err := nodes.Delete(ctx, "a", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := nodes.Get(ctx, "a", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("the deleted node: %v, want NotFound", err)
	}
}

func TestAListSelectsByNamespaceFieldAndLabel(t *testing.T) {
	s := serve(t)
	for i := range 6 {
		p := pod(fmt.Sprint("p", i), fmt.Sprint("node", i%2))
		p.Namespace = fmt.Sprint("space", i%3)
		p.Labels["number"] = fmt.Sprint(i)
		Put(s, p)
	}
	client, _ := clientset(t, s, "keeper")
	for _, c := range []struct {
		namespace string
		options   metav1.ListOptions
		want      string
	}{
		{"", metav1.ListOptions{}, "p0 p3 p1 p4 p2 p5"},
		{"space1", metav1.ListOptions{}, "p1 p4"},
		{"", metav1.ListOptions{FieldSelector: "spec.nodeName=node1"}, "p3 p1 p5"},
		{"space1", metav1.ListOptions{FieldSelector: "spec.nodeName!=node1"}, "p4"},
		{"", metav1.ListOptions{FieldSelector: "metadata.name=p2"}, "p2"},
		{"", metav1.ListOptions{LabelSelector: "number in (0, 4)", Limit: 1}, "p0 p4"},
	} {
		list := must(client.CoreV1().Pods(c.namespace).List(t.Context(), c.options))(t)
		var got []string
		for _, p := range list.Items {
			got = append(got, p.Name)
		}
		if strings.Join(got, " ") != c.want || list.ResourceVersion != "6" {
			t.Errorf("list %q %v = %v, version %s, want %s", c.namespace, c.options, got,
				list.ResourceVersion, c.want)
		}
	}
	_, err := client.CoreV1().Pods("").List(t.Context(),
		metav1.ListOptions{FieldSelector: "status.phase=Running"})
	if !apierrors.IsBadRequest(err) {
		t.Errorf("a field that the server does not select by: %v, want BadRequest", err)
	}
}

func TestAnObjectWithFinalizersStaysUntilTheLastIsPatchedAway(t *testing.T) {
	s := serve(t)
	attachment := &storagev1.VolumeAttachment{ObjectMeta: named("va")}
	attachment.Finalizers = []string{"attacher"}
	Put(s, attachment)
	client, _ := clientset(t, s, "attacher")
	attachments, ctx := client.StorageV1().VolumeAttachments(), t.Context()
	if err := attachments.Delete(ctx, "va", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	got := must(attachments.Get(ctx, "va", metav1.GetOptions{}))(t)
	if got.DeletionTimestamp == nil {
		t.Error("it has no deletionTimestamp")
	}
	must(attachments.Patch(ctx, "va", types.MergePatchType,
		[]byte(`{"status":{"detachError":{"message":"no"}}}`), metav1.PatchOptions{}, "status"))(t)
	must(attachments.Patch(ctx, "va", types.MergePatchType,
		[]byte(`{"metadata":{"finalizers":null}}`), metav1.PatchOptions{}))(t)
	if left := List[*storagev1.VolumeAttachment](s, ""); len(left) > 0 {
		t.Errorf("it is still there: %v", left)
	}
}

func TestADeletedPodStaysUntilItsKubeletRemovesIt(t *testing.T) {
	s := serve(t)
	Put(s, pod("scheduled", "a"))
	Put(s, pod("unscheduled", ""))
	client, _ := clientset(t, s, "keeper")
	pods := client.CoreV1().Pods("shop")
	for _, name := range []string{"scheduled", "unscheduled", "scheduled"} {
		if err := pods.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	left := List[*corev1.Pod](s, "shop")
	if len(left) != 1 || !left[0].DeletionTimestamp.Time.Equal(start.Add(30*time.Second)) {
		t.Errorf("there are %v", left)
	}
	uid := types.UID("another")
	err := pods.Delete(t.Context(), "scheduled", metav1.DeleteOptions{
		Preconditions: &metav1.Preconditions{UID: &uid}})
	if !apierrors.IsConflict(err) {
		t.Errorf("a delete of another pod of the name: %v, want a conflict", err)
	}
	if !Remove[*corev1.Pod](s, "shop", "scheduled") || Remove[*corev1.Pod](s, "shop", "scheduled") {
		t.Error("Remove has to find the pod once")
	}
}

func TestAnEvictionIsRefusedByABudgetAndTakesFromIt(t *testing.T) {
	s := serve(t)
	ready := []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
	for _, name := range []string{"first", "second", "pending"} {
		p := pod(name, "a")
		p.Status.Conditions = ready
		Put(s, p)
	}
	Edit(s, "shop", "pending", func(p *corev1.Pod) { p.Status.Phase = corev1.PodPending })
	budget := &policyv1.PodDisruptionBudget{ObjectMeta: inSpace("budget")}
	budget.Spec.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{"app": "shop"}}
	budget.Status = policyv1.PodDisruptionBudgetStatus{DisruptionsAllowed: 1, DesiredHealthy: 1,
		CurrentHealthy: 2}
	Put(s, budget)
	client, _ := clientset(t, s, "keeper")
	evict := func(name string) error {
		return client.PolicyV1().Evictions("shop").Evict(t.Context(),
			&policyv1.Eviction{ObjectMeta: inSpace(name)})
	}
	for _, name := range []string{"first", "pending"} {
		if err := evict(name); err != nil {
			t.Errorf("evict %s: %v", name, err)
		}
	}
	err := evict("second")
	if !apierrors.IsTooManyRequests(err) || !apierrors.HasStatusCause(err,
		policyv1.DisruptionBudgetCause) {
		t.Errorf("evict second: %v, want it refused by the budget", err)
	}
	for _, p := range List[*corev1.Pod](s, "shop") {
		if (p.DeletionTimestamp == nil) != (p.Name == "second") {
			t.Errorf("the pod %s has the deletionTimestamp %v", p.Name, p.DeletionTimestamp)
		}
	}

	Put(s, &policyv1.PodDisruptionBudget{ObjectMeta: inSpace("more"), Spec: budget.Spec})
	if err := evict("second"); err == nil || statusOf(err).Code != 500 {
		t.Errorf("with two budgets: %v, want an error of the server", err)
	}
	Delete[*policyv1.PodDisruptionBudget](s, "shop", "more")
	Edit(s, "shop", "second", func(p *corev1.Pod) { p.Status.Conditions = nil })
	if err := evict("second"); err != nil {
		t.Errorf("evict a pod that is not ready from a healthy set: %v", err)
	}
}

// expect reads the next event of a watch of pods and checks its kind.
func expect(t *testing.T, w watch.Interface, kind watch.EventType, name, version string) {
	t.Helper()
	event, ok := <-w.ResultChan()
	if !ok {
		t.Fatalf("the watch has ended, want %s %s", kind, name)
	}
	got, ok := event.Object.(*corev1.Pod)
	if !ok || event.Type != kind || got.Name != name || got.ResourceVersion != version {
		t.Fatalf("the watch has %s %v, want %s %s at %s", event.Type, event.Object, kind, name, version)
	}
}

func TestAWatchReportsAddedChangedAndDeletedObjects(t *testing.T) {
	s := serve(t)
	client, _ := clientset(t, s, "keeper")
	Put(s, pod("old", "a"))
	Put(s, &corev1.Node{ObjectMeta: named("a")})
	pods := client.CoreV1().Pods("shop")
	list := must(pods.List(t.Context(), metav1.ListOptions{}))(t)
	all := must(pods.Watch(t.Context(), metav1.ListOptions{}))(t)
	later := must(pods.Watch(t.Context(),
		metav1.ListOptions{ResourceVersion: list.ResourceVersion}))(t)
	onA := must(pods.Watch(t.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=a"}))(t)

	Put(s, pod("new", ""))
	Edit(s, "shop", "new", func(p *corev1.Pod) { p.Spec.NodeName = "a" })
	Edit(s, "shop", "old", func(p *corev1.Pod) { p.Spec.NodeName = "b" })
	Remove[*corev1.Pod](s, "shop", "new")

	expect(t, all, watch.Added, "old", "1")
	for _, w := range []watch.Interface{all, later} {
		expect(t, w, watch.Added, "new", "3")
		expect(t, w, watch.Modified, "new", "4")
		expect(t, w, watch.Modified, "old", "5")
		expect(t, w, watch.Deleted, "new", "6")
	}
	expect(t, onA, watch.Added, "old", "1")
	expect(t, onA, watch.Added, "new", "4")
	expect(t, onA, watch.Deleted, "old", "5")
	expect(t, onA, watch.Deleted, "new", "6")
	for _, w := range []watch.Interface{all, later, onA} {
		w.Stop()
	}
}
