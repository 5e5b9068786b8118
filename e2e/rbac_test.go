//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// right is a verb on a resource that a role of the installation allows. "list" and "watch" are one
// right: which of them an informer needs first depends on the version of Kubernetes.
type right struct {
	kind, role      string
	group, resource string
	verbs           []string
}

func (r right) String() string {
	return fmt.Sprintf("%s %s: %s %s.%s", r.kind, r.role, strings.Join(r.verbs, " and "),
		r.resource, r.group)
}

func (r right) refusal() *regexp.Regexp {
	return regexp.MustCompile(fmt.Sprintf("cannot (%s) resource %q in API group %q",
		strings.Join(r.verbs, "|"), r.resource, r.group))
}

// flowTimeout is the time in which newly started controllers have to complete proof.life.
const flowTimeout = 3 * time.Minute

var _ = Describe("every right of the driver's roles", Label("long"), func() {
	It("is needed: without it a program fails (D-54)", func(ctx SpecContext) {
		DeferCleanup(func(ctx SpecContext) {
			Expect(theRack.Admin.ClearFaults(ctx)).To(Succeed())
			install(ctx)
			restartControllers(ctx)
			serving(ctx)
		}, NodeTimeout(2*rolloutTimeout))
		proof{restart: restartControllers, life: lifeOfVolume, settle: func(ctx context.Context) {
			Expect(theRack.Admin.ClearFaults(ctx)).To(Succeed())
		}}.run(ctx, allRights(installed))
	}, NodeTimeout(90*time.Minute))
})

// proof checks that every right is needed: some request has to fail without it.
type proof struct {
	// restart restarts all programs that use the roles.
	restart func(context.Context)
	// life performs operations that need all the rights, in the fixture's namespace.
	life func(context.Context, *fixture)
	// settle cleans up after an interrupted life().
	settle func(context.Context)
}

// live calls life() once, and returns the first failure. It does not wait until the fixture's
// namespace is deleted.
func (p proof) live(ctx context.Context) error {
	return InterceptGomegaFailure(func() {
		f := newFixture(ctx)
		defer f.close(context.WithoutCancel(ctx))
		p.life(ctx, f)
	})
}

// lifeOfVolume creates, moves, snapshots and restores a volume. The rack first breaks two
// connections, so that the provisioner writes events. It then reports no capacity, so that the
// provisioner asks the scheduler again.
func lifeOfVolume(ctx context.Context, f *fixture) {
	must(theRack.Admin.AddFault(ctx, adminapi.Fault{Operation: "disk_create", Times: 2, Cut: true}))
	must(theRack.Admin.AddFault(ctx, adminapi.Fault{Operation: "disk_create", Skip: 2, Times: 1,
		Response: &adminapi.Response{Status: http.StatusInsufficientStorage,
			ErrorCode: "InsufficientCapacity", Message: "Insufficient capacity"}}))
	claim := f.Claim(ctx, Claim{})
	f.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[0]}).Running(ctx).Delete(ctx)
	moved := f.Pod(ctx, Pod{Claims: []string{claim}, Node: workers[1]}).Running(ctx)
	taken := f.Snapshot(ctx, claim).Ready(ctx)
	restored := f.Claim(ctx, Claim{Restore: taken.name})
	reader := f.Pod(ctx, Pod{Claims: []string{restored}, Node: workers[0]}).Running(ctx)
	volumes := []string{f.Bound(ctx, claim).Name, f.Bound(ctx, restored).Name}
	deletePods(ctx, moved, reader)
	f.DeleteClaim(ctx, claim)
	f.DeleteClaim(ctx, restored)
	taken.Delete(ctx)
	for _, volume := range volumes {
		volumeGone(ctx, volume)
	}
}

func (p proof) run(ctx context.Context, all []right) {
	SetDefaultEventuallyTimeout(flowTimeout)
	DeferCleanup(SetDefaultEventuallyTimeout, eventuallyTimeout)
	Expect(all).NotTo(BeEmpty())
	By("doing everything with every right", func() {
		p.restart(ctx)
		limited, cancel := context.WithTimeout(ctx, flowTimeout)
		defer cancel()
		Expect(p.live(limited)).To(Succeed())
	})
	var needless []string
	for i, r := range all {
		p.settle(ctx)
		start := time.Now()
		seen := p.without(ctx, r)
		GinkgoWriter.Printf("%3d/%d %s: %s (%.0f s)\n", i+1, len(all), r, seen,
			time.Since(start).Seconds())
		if seen == "" {
			needless = append(needless, r.String())
		}
	}
	p.settle(ctx)
	fmt.Printf("FIGURE rbac rules=%d needed=%d\n", len(all), len(all)-len(needless))
	Expect(needless).To(BeEmpty(), "rights without which nothing fails")
}

// allRights returns every right in the roles of the driver and the node keeper. It omits the roles
// of the snapshot controller, which is not a part of the driver.
func allRights(objects []*unstructured.Unstructured) []right {
	var all []right
	for _, o := range objects {
		if o.GetKind() != "ClusterRole" && o.GetKind() != "Role" ||
			!strings.HasPrefix(o.GetName(), "oxide-csi") {
			continue
		}
		// A test of package deploy checks that each rule has one group and one resource.
		for _, rule := range roleOf(o).Rules {
			for _, verbs := range apart(rule.Verbs) {
				all = append(all, right{kind: o.GetKind(), role: o.GetName(),
					group: rule.APIGroups[0], resource: rule.Resources[0], verbs: verbs})
			}
		}
	}
	return all
}

// apart returns a slice for each verb, but one slice for "list" and "watch" together.
func apart(verbs []string) [][]string {
	read := []string{"list", "watch"}
	var all [][]string
	for _, verb := range verbs {
		if !slices.Contains(read, verb) {
			all = append(all, []string{verb})
		}
	}
	if slices.ContainsFunc(verbs, func(v string) bool { return slices.Contains(read, v) }) {
		all = append(all, read)
	}
	return all
}

func findInstalled(kind, name string) *unstructured.Unstructured {
	i := slices.IndexFunc(installed, func(o *unstructured.Unstructured) bool {
		return o.GetKind() == kind && o.GetName() == name
	})
	Expect(i).NotTo(Equal(-1), "the suite installed no %s %s", kind, name)
	return installed[i].DeepCopy()
}

// roleOf converts a Role or a ClusterRole. Both have the same field for rules.
func roleOf(o *unstructured.Unstructured) *rbacv1.ClusterRole {
	role := &rbacv1.ClusterRole{}
	Expect(runtime.DefaultUnstructuredConverter.FromUnstructured(o.Object, role)).To(Succeed())
	return role
}

func (r right) reduced() *unstructured.Unstructured {
	o := findInstalled(r.kind, r.role)
	role := roleOf(o)
	for i, rule := range role.Rules {
		if rule.Resources[0] == r.resource && rule.APIGroups[0] == r.group {
			role.Rules[i].Verbs = slices.DeleteFunc(rule.Verbs, func(v string) bool {
				return slices.Contains(r.verbs, v)
			})
		}
	}
	role.Rules = slices.DeleteFunc(role.Rules, func(rule rbacv1.PolicyRule) bool {
		return len(rule.Verbs) == 0
	})
	o.Object["rules"] = must(runtime.DefaultUnstructuredConverter.ToUnstructured(role))["rules"]
	return o
}

// without removes the right from its role, restarts the programs and calls life(). It returns what
// failed, or "" if nothing did.
func (p proof) without(ctx context.Context, r right) (seen string) {
	api.apply(ctx, r.reduced())
	p.restart(ctx)
	limited, cancel := context.WithTimeout(ctx, flowTimeout)
	defer cancel()
	done := make(chan error, 1)
	living, ended := context.WithCancel(limited)
	go func() {
		done <- p.live(limited)
		ended()
	}()
	_ = poll(living, flowTimeout, func(ctx context.Context) error { return refused(ctx, r) })
	if refused(ctx, r) == nil {
		seen = "the API server refuses it"
	}
	cancel()
	if failed := <-done; seen == "" && failed != nil {
		seen = "it ended with: " + failed.Error()
	}
	api.apply(ctx, findInstalled(r.kind, r.role))
	return seen
}

// refused returns nil if a container's log shows that a request was refused for lack of the right.
func refused(ctx context.Context, r right) error {
	for _, namespace := range []string{driverNamespace, metav1.NamespaceSystem} {
		list, err := api.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
			LabelSelector: "app.kubernetes.io/name in (oxide-csi-driver,snapshot-controller)"})
		if err != nil {
			return err
		}
		for _, p := range list.Items {
			for _, c := range p.Spec.Containers {
				text, err := api.CoreV1().Pods(namespace).GetLogs(p.Name,
					&corev1.PodLogOptions{Container: c.Name}).DoRaw(ctx)
				if err != nil {
					continue // the container has not started
				}
				// Logs contain the errors with quotes that are escaped once or twice.
				if r.refusal().MatchString(strings.ReplaceAll(string(text), `\`, "")) {
					return nil
				}
			}
		}
	}
	return fmt.Errorf("%w: no request was refused for the right %s", errNotYet, r)
}

func restartControllers(ctx context.Context) {
	now := int64(0)
	options := metav1.DeleteOptions{GracePeriodSeconds: &now}
	for namespace, who := range map[string]struct{ selector, lease string }{
		driverNamespace:        {ofController, "csi-oxide"},
		metav1.NamespaceSystem: {"app.kubernetes.io/name=snapshot-controller", "snapshot-controller"},
	} {
		Expect(api.CoreV1().Pods(namespace).DeleteCollection(ctx, options,
			metav1.ListOptions{LabelSelector: who.selector})).To(Succeed())
		removeLeases(ctx, namespace, who.lease)
	}
}

var _ = Describe("every right of the node keeper", Label("long"), func() {
	It("is needed: without it the node keeper fails (D-54)", func(ctx SpecContext) {
		spreadControllers(ctx)
		guestsFollow(ctx)
		installKeeper(ctx)
		proof{restart: restartKeepers, settle: keeperSettles,
			life: func(ctx context.Context, f *fixture) {
				coldAttach(ctx, f)
				leave(ctx, f)
			}}.run(ctx, allRights(rolesOfKeeper()))
	}, NodeTimeout(90*time.Minute))
})

func rolesOfKeeper() []*unstructured.Unstructured {
	var roles []*unstructured.Unstructured
	for _, o := range installed {
		if name := o.GetName(); name == keeperName || strings.HasSuffix(name, "-leave") {
			roles = append(roles, o)
		}
	}
	return roles
}

func restartKeepers(ctx context.Context) {
	now := int64(0)
	Expect(api.CoreV1().Pods(driverNamespace).DeleteCollection(ctx,
		metav1.DeleteOptions{GracePeriodSeconds: &now},
		metav1.ListOptions{LabelSelector: ofKeeper})).To(Succeed())
	removeLeases(ctx, driverNamespace, keeperLease)
	removeRecords(ctx)
}

// keeperSettles waits until the keeper has completed all operations on the workers. It is called
// when the keeper has all its rights again.
func keeperSettles(ctx context.Context) {
	Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
	coldAttached(ctx)
	for _, worker := range workers {
		freed(ctx, worker)
	}
	spreadControllers(ctx)
}

// coldAttach creates a pod with a volume on a newly joined node, on a rack without hot-plug.
func coldAttach(ctx context.Context, f *fixture) {
	worker := workers[1]
	hotplug := func(ctx context.Context, mode string) {
		Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": mode})).To(Succeed())
	}
	hotplug(ctx, "none")
	defer hotplug(context.WithoutCancel(ctx), "full")
	taintStartup(ctx, worker)
	f.Pod(ctx, Pod{Claims: []string{f.Claim(ctx, Claim{})}, Node: worker}).Running(ctx)
	Eventually(func(g Gomega) {
		n := read(ctx, g, api.CoreV1().Nodes(), worker)
		g.Expect(n.Spec.Unschedulable).To(BeFalse())
		g.Expect(n.Annotations).NotTo(HaveKey(cordonMark))
	}).WithContext(ctx).Should(Succeed(), "%s should take pods again", worker)
}

// leave deletes a pod with a volume and, at the same moment, the driver's pod on that node. It
// fails if the driver's pod ends before the volume is detached, or does not end within a minute.
func leave(ctx context.Context, f *fixture) {
	worker := workers[0]
	p := f.Pod(ctx, Pod{Claims: []string{f.Claim(ctx, Claim{})}, Node: worker,
		Script: "trap : TERM; while :; do sleep 1; done"}).Running(ctx)
	defer cordon(context.WithoutCancel(ctx), worker, false)
	cordon(ctx, worker, true)
	driver := installedPod(ctx, ofNode, worker)
	drivers := api.CoreV1().Pods(driverNamespace)
	Expect(errors.Join(drivers.Delete(ctx, driver.Name, metav1.DeleteOptions{}),
		api.CoreV1().Pods(f.ns).Delete(ctx, p.name, metav1.DeleteOptions{}))).To(Succeed())
	Eventually(func() bool {
		now, err := drivers.Get(ctx, driver.Name, metav1.GetOptions{})
		return apierrors.IsNotFound(err) || err == nil && now.UID != driver.UID
	}).WithContext(ctx).WithTimeout(time.Minute).Should(BeTrue(), "the driver should end")
	for _, a := range must(api.StorageV1().VolumeAttachments().List(ctx,
		metav1.ListOptions{})).Items {
		Expect(a.Spec.NodeName == worker && a.Spec.Attacher == driverName).To(BeFalse(),
			"%s is left on %s, and its driver is gone", a.Name, worker)
	}
}
