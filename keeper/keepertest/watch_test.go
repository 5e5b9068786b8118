package keepertest

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
)

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
