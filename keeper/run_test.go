package keeper

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// replica runs a process that takes part in the election until the test ends. It runs on the node
// of its name.
func (w *fixture) replica(node string) {
	w.t.Helper()
	k := &Keeper{Config: w.Config, Rack: w.Rack, Log: w.Log, Now: w.Now, Metrics: NewMetrics(),
		Namespace: "oxide"}
	k.Config.NodeName, k.Config.Interval = node, 50*time.Millisecond
	k.Kubernetes, _ = w.client(node)
	p := &process{Keeper: k, name: node,
		settings: Settings{LeaseNamespace: "oxide", LeaseDuration: time.Second}}
	ctx, cancel := context.WithCancel(w.t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		for ctx.Err() == nil {
			if err := p.candidacy(ctx); err != nil {
				w.t.Error(err)
				return
			}
		}
	})
	w.t.Cleanup(func() {
		cancel()
		running.Wait()
	})
}

func (w *fixture) leader() string {
	lease, ok := keepertest.Get[*coordinationv1.Lease](w.api, "oxide", component)
	if !ok || lease.Spec.HolderIdentity == nil {
		return ""
	}
	return *lease.Spec.HolderIdentity
}

func (w *fixture) await(what string, met func() bool) {
	w.t.Helper()
	csitest.Await(w.t, what, met)
}

func TestAReplicaStepsAsideSoThatAnotherMayStopItsNode(t *testing.T) { // D-61
	w := newFixture(t, "a")
	w.wait("a", "data")
	w.pass(time.Minute)
	w.replica("a")
	w.await("the replica on the node gives up the lead", func() bool {
		_, led := keepertest.Get[*coordinationv1.Lease](w.api, "oxide", component)
		return led && w.leader() == ""
	})
	if w.step("a") != "" || w.plan("a") != runsHere {
		t.Errorf("the step is %s, the plan %q", w.step("a"), w.plan("a"))
	}
	w.replica("second")
	w.await("the instance is stopped", func() bool {
		w.retry()
		return w.step("a") == string(attaching)
	})
	if w.rack.state("a") != "stopped" {
		t.Errorf("the instance is %s", w.rack.state("a"))
	}
}

func TestAKeeperCannotRecordWhatItDecidedBeforeAnotherKeeperActed(t *testing.T) { // D-61
	w := newFixture(t, "a")
	for i, refused := range []func(error) bool{apierrors.IsAlreadyExists, apierrors.IsConflict} {
		v := try(w.observe(t.Context()))(t)
		w.setRecord("a", record{Fenced: instanceOf("a") + strings.Repeat("x", i)}) // by another keeper
		if err := w.save(t.Context(), v, v.Nodes[0]); !refused(err) {
			t.Errorf("the error is %v", err)
		}
	}
}

func TestAChangeOfAnAttachmentStartsARoundAtOnce(t *testing.T) {
	w := newFixture(t)
	w.Config.Interval = time.Hour
	p := &process{Keeper: w.Keeper, settings: Settings{LeaseDuration: time.Minute}}
	ctx, cancel := context.WithCancel(t.Context())
	led := make(chan bool)
	go func() { led <- p.lead(ctx) }()
	w.await("it watches", func() bool {
		for _, r := range w.api.Log() {
			if r.Verb == "watch" {
				return true
			}
		}
		return false
	})
	rounds := w.metric("rounds_total", "ok")
	keepertest.Put(w.api, va(attachFailed(mustStop, 0)).VolumeAttachment)
	w.await("another round", func() bool { return w.metric("rounds_total", "ok") > rounds })
	cancel()
	if <-led {
		t.Error("it steps aside")
	}
}

func TestARoundStartsAtOnceIfAnAttachmentBeginsOrStopsWaiting(t *testing.T) {
	waits := attachFailed(mustStop, 0)
	others := func(a *storagev1.VolumeAttachment) { a.Spec.Attacher = "other.example.com" }
	goes := va(attached, deleted, detaching(mustStop)).VolumeAttachment
	waited := map[string]bool{}
	for _, c := range []struct {
		name string
		kind watch.EventType
		a    runtime.Object
		want bool
	}{
		{"asked for", watch.Added, va().VolumeAttachment, false},
		{"fails otherwise", watch.Modified, va(attachFailed("full", 0)).VolumeAttachment, false},
		{"waits", watch.Modified, va(waits).VolumeAttachment, true},
		{"tried again", watch.Modified, va(attachFailed(mustStop, 9)).VolumeAttachment, false},
		{"attached", watch.Modified, va(attached).VolumeAttachment, true},
		{"used", watch.Modified, va(attached).VolumeAttachment, false},
		{"waits to be detached", watch.Modified, goes, true},
		{"gone", watch.Deleted, goes, true},
		{"waits when the watch begins", watch.Added, va(waits).VolumeAttachment, true},
		{"gone while it waits", watch.Deleted, va(waits).VolumeAttachment, true},
		{"another driver's", watch.Added, va(waits, others).VolumeAttachment, false},
		{"the end of the watch", watch.Error, &metav1.Status{}, false},
	} {
		if got := matters(watch.Event{Type: c.kind, Object: c.a}, waited); got != c.want {
			t.Errorf("%s: it matters: %v", c.name, got)
		}
	}
	if len(waited) > 0 {
		t.Errorf("deleted attachments are still listed: %v", waited)
	}
}

func TestMetricsAndHealthAreServed(t *testing.T) {
	w := newFixture(t)
	w.round()
	w.Metrics.round(nil)
	w.Metrics.round(errBroken)
	p := &process{Keeper: w.Keeper, settings: Settings{HTTPEndpoint: "127.0.0.1:0"}}
	server := httptest.NewServer(p.handler())
	t.Cleanup(server.Close)
	for path, want := range map[string]string{"/healthz": "ok",
		"/metrics": `oxide_node_keeper_rounds_total{result="error"} 1`} {
		response, err := http.Get(server.URL + path)
		csitest.Must(t, err)
		text := string(try(io.ReadAll(response.Body))(t))
		_ = response.Body.Close()
		if response.StatusCode != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s has the status %d and no %q:\n%s", path, response.StatusCode, want, text)
		}
	}
	stop := try(p.serve())(t)
	stop()
	p.settings.HTTPEndpoint = "nowhere"
	if _, err := p.serve(); err == nil || !strings.Contains(err.Error(), "--http-endpoint") {
		t.Errorf("the error is %v", err)
	}
}
