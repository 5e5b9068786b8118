package keepertest

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
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
			s.Intercept(func(r Request) error {
				if r.Applied != c.applied || r.Client != "keeper-1" {
					return nil
				}
				// Another keeper may act in between.
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

func TestAnInterceptorOfReadsDecidesWhatIsNotSeen(t *testing.T) {
	s := serve(t)
	client, _ := clientset(t, s, "keeper-1")
	Put(s, &corev1.Node{ObjectMeta: named("a")})
	for _, refusal := range []error{apierrors.NewForbidden(nodes.GroupResource(), "a", nil), nil} {
		s.InterceptReads(func(Request) error { return refusal })
		_, getErr := client.CoreV1().Nodes().Get(t.Context(), "a", metav1.GetOptions{})
		_, listErr := client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
		watch, watchErr := client.CoreV1().Nodes().Watch(t.Context(), metav1.ListOptions{})
		if watchErr == nil {
			watch.Stop()
		}
		for verb, err := range map[string]error{"get": getErr, "list": listErr, "watch": watchErr} {
			if (err != nil) != (refusal != nil) || apierrors.IsForbidden(err) != (refusal != nil) {
				t.Errorf("with the refusal %v, the error of a %s is %v", refusal, verb, err)
			}
		}
	}
}

func TestACutClientReachesTheServerNoMore(t *testing.T) {
	s := serve(t)
	client, cut := clientset(t, s, "keeper-1")
	successor, _ := clientset(t, s, "keeper-2")
	applied := make(chan struct{})
	watch := must(client.CoreV1().Nodes().Watch(t.Context(), metav1.ListOptions{}))(t)
	s.Intercept(func(r Request) error {
		cut()
		if r.Applied {
			close(applied)
		}
		return nil
	})
	_, err := client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: named("a")},
		metav1.CreateOptions{})
	if err == nil {
		t.Error("the client that was cut while it waited has a response")
	}
	for range watch.ResultChan() {
		// It may have seen the node, and ends.
	}
	_, err = client.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{})
	if err == nil || !strings.Contains(err.Error(), "the client keeper-1 is cut off") {
		t.Errorf("a cut client: %v", err)
	}
	<-applied
	nodes := must(successor.CoreV1().Nodes().List(t.Context(), metav1.ListOptions{}))(t)
	if len(nodes.Items) != 1 {
		t.Errorf("the request that had arrived was not applied: %v", nodes.Items)
	}
	if log := s.Log(); len(log) != 3 || log[2].Client != "keeper-2" {
		t.Errorf("the log is %v", log)
	}
}

// complaints is a test that is allowed to fail.
type complaints struct {
	*testing.T
	texts []string
}

func (c *complaints) Errorf(format string, args ...any) {
	c.texts = append(c.texts, fmt.Sprintf(format, args...))
}

func TestWhatTheServerDoesNotKnowFailsTheTest(t *testing.T) {
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

func TestManyClientsAtOnceLoseNoUpdate(t *testing.T) {
	s := serve(t)
	Put(s, &coordinationv1.Lease{ObjectMeta: inSpace("counter")})
	const clients, updates = 8, 50
	done := make(chan error, clients)
	for i := range clients {
		client, _ := clientset(t, s, fmt.Sprint("keeper-", i))
		go func() { done <- count(t.Context(), client, updates) }()
	}
	for range clients {
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	lease, _ := Get[*coordinationv1.Lease](s, "shop", "counter")
	if got := *lease.Spec.LeaseTransitions; got != clients*updates {
		t.Errorf("counted %d, want %d", got, clients*updates)
	}
	conflicts := 0
	for _, r := range s.Log() {
		if r.Status == http.StatusConflict {
			conflicts++
		}
	}
	t.Logf("%d requests, %d conflicts", len(s.Log()), conflicts)
}

func count(ctx context.Context, client *kubernetes.Clientset, updates int) error {
	leases := client.CoordinationV1().Leases("shop")
	for done := 0; done < updates; {
		lease, err := leases.Get(ctx, "counter", metav1.GetOptions{})
		if err != nil {
			return err
		}
		var next int32 = 1
		if lease.Spec.LeaseTransitions != nil {
			next += *lease.Spec.LeaseTransitions
		}
		lease.Spec.LeaseTransitions = &next
		_, err = leases.Update(ctx, lease, metav1.UpdateOptions{})
		switch {
		case err == nil:
			done++
		case !apierrors.IsConflict(err):
			return err
		}
	}
	return nil
}
