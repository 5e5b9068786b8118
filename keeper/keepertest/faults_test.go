package keepertest

import (
	"errors"
	"fmt"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func TestAnInterceptorDecidesBeforeAndAfterAChange(t *testing.T) {
	for _, c := range []struct {
		name    string
		applied bool // which of the calls returns the error
		err     error
		status  int // that the log has
		there   bool
	}{
		{"refused", false, apierrors.NewForbidden(nodes.GroupResource(), "a", nil), 403, false},
		{"lost", false, ErrBreak, 0, false},
		{"the response is lost", true, ErrBreak, 0, true},
		{"the response is another", true, apierrors.NewTimeoutError("slow", 0), 504, true},
		{"through", true, nil, 201, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := serve(t)
			client, _ := clientset(t, s, "keeper-1")
			other, _ := clientset(t, s, "keeper-2")
			s.Intercept(func(r KubeRequest) error {
				if r.Applied != c.applied || r.Client != "keeper-1" {
					return nil
				}
				// Another keeper may act between the two calls.
				must(other.CoreV1().Nodes().Create(t.Context(),
					&corev1.Node{ObjectMeta: named("b")}, metav1.CreateOptions{}))(t)
				return c.err
			})
			_, err := client.CoreV1().Nodes().Create(t.Context(),
				&corev1.Node{ObjectMeta: named("a")}, metav1.CreateOptions{})
			if (err != nil) != (c.err != nil) {
				t.Errorf("the client has the error %v", err)
			}
			_, there := Get[*corev1.Node](s, "", "a")
			if _, others := Get[*corev1.Node](s, "", "b"); there != c.there || !others {
				t.Errorf("a is there: %v, want %v; b is there: %v", there, c.there, others)
			}
			log := s.Log()
			if len(log) != 2 || log[0].String() != "keeper-1: create nodes a" ||
				log[0].Status != c.status || log[1].Status != 201 {
				t.Errorf("the log is %v", log)
			}
		})
	}
}

// complaints is a T that records failures instead of failing.
type complaints struct {
	*testing.T
	texts []string
}

func (c *complaints) Errorf(format string, args ...any) {
	c.texts = append(c.texts, fmt.Sprintf(format, args...))
}

func TestARequestThatTheServerDoesNotKnowFailsTheTest(t *testing.T) {
	heard := &complaints{T: t}
	s := Serve(heard, time.Now)
	client, _ := clientset(t, s, "keeper")
	ctx, core := t.Context(), client.CoreV1()
	Put(s, pod("p", "a"))
	orphan := metav1.DeletePropagationOrphan
	calls := []func() error{
		func() error { return secondOf(core.Secrets("shop").Get(ctx, "x", metav1.GetOptions{})) },
		func() error { return secondOf(client.Discovery().ServerVersion()) },
		func() error {
			return core.Nodes().DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{})
		},
		func() error {
			return core.Pods("shop").Delete(ctx, "p", metav1.DeleteOptions{PropagationPolicy: &orphan})
		},
		func() error {
			return secondOf(core.Pods("shop").Patch(ctx, "p", types.JSONPatchType, []byte(`[]`),
				metav1.PatchOptions{}))
		},
		func() error {
			return secondOf(core.Nodes().Create(ctx, &corev1.Node{ObjectMeta: named("a")},
				metav1.CreateOptions{DryRun: []string{"All"}}))
		},
		func() error {
			return secondOf(client.CoordinationV1().Leases("shop").Patch(ctx, "x", types.MergePatchType,
				[]byte(`{}`), metav1.PatchOptions{}, "status"))
		},
	}
	for i, call := range calls {
		var status apierrors.APIStatus
		if err := call(); !errors.As(err, &status) || status.Status().Code != 501 {
			t.Errorf("call %d: %v, want the status 501", i, err)
		}
	}
	if len(heard.texts) != len(calls) {
		t.Errorf("the test heard %q", heard.texts)
	}
}

func secondOf[V any](_ V, err error) error { return err }
