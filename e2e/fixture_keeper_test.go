//go:build e2e

package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// The names in the node keeper's manifests, and the names of what it writes.
const (
	keeperName   = "oxide-csi-node-keeper"
	ofKeeper     = "app=" + keeperName
	keeperLease  = "oxide-node-keeper"         // also the ConfigMap of its records
	mayStop      = driverName + "/cold-attach" // the label
	cordonMark   = driverName + "/cold-attach" // the annotation
	startupTaint = driverName + "/agent-not-ready"
	instanceKey  = "topology." + driverName + "/instance"
)

// keeping is a kustomization of what the suite installs together with the node keeper. The keeper
// has all of its duties, and waits less than by default. The nodes report their instances, as with
// topologyInstance in the chart. Both nodes' drivers are replaced at once, to save time.
const keeping = `
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [../e2e]
components: [../node-keeper]
patches:
  - target: {kind: Deployment, name: oxide-csi-node-keeper}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --settle=5s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --min-interval=3s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --stateful-set-interval=3s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --interval=2s}
      - {op: add, path: /spec/template/spec/containers/0/args/-,
         value: --leader-election-lease-duration=9s}
      - {op: add, path: /spec/template/spec/containers/0/args/-, value: --fence}
  - target: {kind: Deployment, name: oxide-csi-controller}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/env/-,
         value: {name: OXIDE_TOPOLOGY_INSTANCE, value: "true"}}
      - {op: test, path: /spec/template/spec/containers/1/name, value: csi-provisioner}
      - {op: add, path: /spec/template/spec/containers/1/args/-, value: --strict-topology=true}
      - {op: add, path: /spec/template/spec/containers/1/args/-, value: --immediate-topology=false}
  - target: {kind: ClusterRole, name: oxide-csi-controller}
    patch: |
      - {op: add, path: /rules/-,
         value: {apiGroups: [""], resources: [persistentvolumeclaims], verbs: [update]}}
      - {op: add, path: /rules/-,
         value: {apiGroups: [""], resources: [nodes], verbs: [list, watch]}}
  - target: {kind: DaemonSet, name: oxide-csi-node}
    patch: |
      - {op: add, path: /spec/template/spec/containers/0/env/-,
         value: {name: OXIDE_TOPOLOGY_INSTANCE, value: "true"}}
      - {op: replace, path: /spec/updateStrategy/rollingUpdate/maxUnavailable, value: 100%}
`

// installKeeper installs the node keeper beside what the suite has installed, and allows it to stop
// both workers. At the end it is removed.
func installKeeper(ctx context.Context) {
	objects := must(kustomized("kustomize/keeping", keeping))
	before := installed
	DeferCleanup(func(ctx SpecContext) {
		Expect(removeAll(ctx, slices.DeleteFunc(slices.Clone(objects),
			func(o *unstructured.Unstructured) bool { return among(before, o) }))).To(Succeed())
		removeLeases(ctx, driverNamespace, keeperLease)
		removeRecords(ctx)
		for _, worker := range workers {
			patchNode(ctx, worker, fmt.Sprintf(`{"metadata":{"labels":{%q:null,%q:null}}}`, mayStop,
				instanceKey))
		}
		install(ctx)
	}, NodeTimeout(2*rolloutTimeout))
	installed = objects
	Expect(applyAll(ctx, objects)).To(Succeed())
	Expect(rolledOut(ctx, objects)).To(Succeed())
	for _, worker := range workers {
		Expect(registered(ctx, worker)).To(Succeed())
		patchNode(ctx, worker, fmt.Sprintf(`{"metadata":{"labels":{%q:"allowed"}}}`, mayStop))
	}
}

// removeRecords removes the keepers' records.
func removeRecords(ctx context.Context) {
	Expect(api.CoreV1().ConfigMaps(driverNamespace).Delete(ctx, keeperLease, metav1.DeleteOptions{})).
		To(Or(Succeed(), Satisfy(apierrors.IsNotFound)))
}

// among reports whether one of the objects has the same kind and name.
func among(all []*unstructured.Unstructured, one *unstructured.Unstructured) bool {
	return slices.ContainsFunc(all, func(o *unstructured.Unstructured) bool {
		return o.GetKind() == one.GetKind() && o.GetName() == one.GetName() &&
			o.GetNamespace() == one.GetNamespace()
	})
}

// coldAttached waits until the keeper has nothing to do on the workers, and all of them are ready
// and take pods.
func coldAttached(ctx context.Context) {
	Eventually(func(g Gomega) {
		for _, worker := range workers {
			n, err := api.CoreV1().Nodes().Get(ctx, worker, metav1.GetOptions{})
			g.Expect(err).NotTo(HaveOccurred())
			g.Expect(recorded(ctx, worker)).To(HaveField("Operation.Step", BeEmpty()), worker)
			g.Expect(n.Spec.Unschedulable).To(BeFalse(), worker)
		}
	}).WithContext(ctx).WithTimeout(nodeLostTimeout).Should(Succeed(),
		"the keeper should have nothing to do")
	for _, worker := range workers {
		servesSinceBoot(ctx, worker)
	}
}

// stopsSince counts how often each worker's instance was stopped since an entry of the rack's log.
// A repeated request counts only if the instance was started in between.
func stopsSince(ctx context.Context, since int) map[string]int {
	all := must(theRack.Admin.Requests(ctx, since))
	stops, stopped := map[string]int{}, map[string]bool{}
	for worker, id := range instanceIDs {
		for _, r := range all {
			switch {
			case !strings.Contains(r.Path, id):
			case r.Operation == "instance_start":
				stopped[worker] = false
			case r.Operation == "instance_stop" && !stopped[worker]:
				stops[worker]++
				stopped[worker] = true
			}
		}
	}
	return stops
}

// inStep waits until an operation is in one of these steps, and returns its worker.
func inStep(ctx context.Context, steps ...string) string {
	var found string
	Eventually(func(g Gomega) {
		for _, worker := range workers {
			r, err := recorded(ctx, worker)
			g.Expect(err).NotTo(HaveOccurred())
			if slices.Contains(steps, r.Operation.Step) {
				found = worker
			}
		}
		g.Expect(found).NotTo(BeEmpty())
	}).WithContext(ctx).WithPolling(100*time.Millisecond).Should(Succeed(),
		"an operation should be in one of the steps %v", steps)
	return found
}

// keeperRecord contains the fields of a keeper's record that the suite uses.
type keeperRecord struct {
	Node      string
	Operation struct{ Step string }
	Last      struct{ Problem string }
	Fenced    string
}

// recorded returns the keepers' record of a node, or an empty one.
func recorded(ctx context.Context, name string) (keeperRecord, error) {
	m, err := api.CoreV1().ConfigMaps(driverNamespace).Get(ctx, keeperLease, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return keeperRecord{}, nil
	} else if err != nil {
		return keeperRecord{}, err
	}
	for _, text := range m.Data {
		var r keeperRecord
		if err := json.Unmarshal([]byte(text), &r); err != nil || r.Node == name {
			return r, err
		}
	}
	return keeperRecord{}, nil
}

// lostBeats counts lost writes: the container before the last one reported them as done, but they
// were not on the volume when the last container started.
func (p *pod) lostBeats(ctx context.Context) int {
	before, now := p.logged(ctx, true), p.logged(ctx, false)
	return max(0, before[len(before)-1]-(now[0]-1))
}

// logged returns the numbers in the log of the pod's container, or of the container before it.
func (p *pod) logged(ctx context.Context, previous bool) []int {
	text := must(api.CoreV1().Pods(p.s.ns).GetLogs(p.name, &corev1.PodLogOptions{
		Container: "main", Previous: previous}).DoRaw(ctx))
	var numbers []int
	for line := range strings.Lines(string(text)) {
		var n int
		_, err := fmt.Sscanf(line, "wrote %d\n", &n)
		Expect(err).NotTo(HaveOccurred(), "%s says %q", p.name, line)
		numbers = append(numbers, n)
	}
	Expect(numbers).NotTo(BeEmpty(), "what %s has written", p.name)
	return numbers
}

// keeperTimeout is how long the keeper may take for everything on both nodes, one after the other.
const keeperTimeout = 5 * time.Minute
