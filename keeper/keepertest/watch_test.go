package keepertest

import (
	"context"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"
)

// expect reads the next event of a watch of pods.
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

func TestAWatchSeesWhatIsAddedChangedAndDeleted(t *testing.T) {
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

func TestAnInformerFollowsTheServer(t *testing.T) {
	s := serve(t)
	client, _ := clientset(t, s, "keeper")
	Put(s, &corev1.Node{ObjectMeta: named("a")})
	ctx, cancel := context.WithCancel(t.Context())
	factory := informers.NewSharedInformerFactory(client, 0)
	nodes := factory.Core().V1().Nodes()
	nodes.Informer()
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	defer cancel()
	factory.WaitForCacheSync(ctx.Done())
	if _, err := nodes.Lister().Get("a"); err != nil {
		t.Error(err)
	}
	for _, r := range s.Log() {
		if r.Verb != "watch" {
			t.Errorf("the informer did not get its list by a watch: %s", r)
		}
	}
}

func TestASecondCandidateTakesOverFromALeaderThatIsCutOff(t *testing.T) {
	s := serve(t)
	leads := make(chan string, 2)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan struct{}, 2)
	candidate := func(name string) (cut func()) {
		client, cut := clientset(t, s, name)
		elector := must(leaderelection.NewLeaderElector(leaderelection.LeaderElectionConfig{
			Lock: &resourcelock.LeaseLock{LeaseMeta: inSpace("keeper"),
				Client:     client.CoordinationV1(),
				LockConfig: resourcelock.ResourceLockConfig{Identity: name}},
			LeaseDuration: time.Second, RenewDeadline: 500 * time.Millisecond,
			RetryPeriod: 100 * time.Millisecond, ReleaseOnCancel: true,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) { leads <- name },
				OnStoppedLeading: func() {},
			},
		}))(t)
		go func() {
			elector.Run(ctx)
			ended <- struct{}{}
		}()
		return cut
	}
	cut := candidate("first")
	if leader := <-leads; leader != "first" {
		t.Fatalf("%s leads", leader)
	}
	candidate("second")
	cut()
	if leader := <-leads; leader != "second" {
		t.Errorf("%s leads after the first was cut off", leader)
	}
	cancel()
	<-ended
	<-ended
}
