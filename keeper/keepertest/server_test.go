package keepertest

import (
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// nodesOf returns a client of the nodes.
func nodesOf(t *testing.T, s *Server, name string) typed.NodeInterface {
	t.Helper()
	config, _ := s.Client(name)
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return client.CoreV1().Nodes()
}

func node(name string) *corev1.Node {
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}}
}

// TestAWriteOfAnOldVersionConflicts shows what the promises about several keepers depend on. What
// else the server does is shown by the tests of the keeper, which need it.
func TestAWriteOfAnOldVersionConflicts(t *testing.T) {
	s := Serve(t, time.Now)
	nodes, ctx := nodesOf(t, s, "keeper"), t.Context()
	old, err := nodes.Create(ctx, node("a"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = nodes.Create(ctx, node("a"), metav1.CreateOptions{})
	if !apierrors.IsAlreadyExists(err) {
		t.Errorf("a second create: %v", err)
	}
	same, err := nodes.Update(ctx, old.DeepCopy(), metav1.UpdateOptions{})
	if err != nil || same.ResourceVersion != old.ResourceVersion {
		t.Errorf("a write that changes nothing: %v, %v", same, err)
	}
	Edit(s, "", "a", func(n *corev1.Node) { n.Spec.Unschedulable = true })
	if _, err := nodes.Update(ctx, old, metav1.UpdateOptions{}); !apierrors.IsConflict(err) {
		t.Errorf("an update: %v", err)
	}
	for _, was := range []string{`"resourceVersion":"1"`, `"uid":"another"`} {
		_, err := nodes.Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{`+was+`}}`),
			metav1.PatchOptions{})
		if !apierrors.IsConflict(err) {
			t.Errorf("a patch of %s: %v", was, err)
		}
	}
}

func TestAnInterceptorDecidesBeforeAndAfterAChange(t *testing.T) {
	for _, c := range []struct {
		name    string
		applied bool // which of the calls returns the error
		err     error
		status  int // that the log has
		there   bool
	}{
		{"refused", false, apierrors.NewForbidden(schema.GroupResource{}, "a", nil), 403, false},
		{"lost", false, ErrBreak, 0, false},
		{"the response is lost", true, ErrBreak, 0, true},
		{"the response is another", true, apierrors.NewTimeoutError("slow", 0), 504, true},
		{"through", true, nil, 201, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := Serve(t, time.Now)
			nodes, others := nodesOf(t, s, "keeper-1"), nodesOf(t, s, "keeper-2")
			s.Intercept(func(r KubeRequest) error {
				if r.Applied != c.applied || r.Client != "keeper-1" {
					return nil
				}
				// Another keeper may act between the two calls.
				if _, err := others.Create(t.Context(), node("b"), metav1.CreateOptions{}); err != nil {
					t.Error(err)
				}
				return c.err
			})
			_, err := nodes.Create(t.Context(), node("a"), metav1.CreateOptions{})
			_, there := Get[*corev1.Node](s, "", "a")
			if (err != nil) != (c.err != nil) || there != c.there {
				t.Errorf("a is there: %v, want %v; the client has the error %v", there, c.there, err)
			}
			log := s.Log()
			if len(log) != 2 || log[0].String() != "keeper-1: create nodes a" ||
				log[0].Status != c.status || log[1].Status != 201 {
				t.Errorf("the log is %v", log)
			}
		})
	}
}
