//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/types"
)

var _ = Describe("every right of the node keeper", Label("long"), func() {
	It("is necessary: without it the node keeper fails (D-54)", func(ctx SpecContext) {
		spreadControllers(ctx)
		guestsFollow(ctx)
		installKeeper(ctx)
		proof{
			restart: restartKeepers,
			life: func(ctx context.Context, name string) error {
				return errors.Join((&flow{ns: s.ns, name: name}).coldAttach(ctx),
					(&flow{ns: s.ns, name: name + "-leaves"}).leave(ctx))
			},
			settle: keeperSettles,
		}.run(ctx, allRights(rolesOfKeeper()))
	}, NodeTimeout(90*time.Minute))
})

// rolesOfKeeper returns the roles of the node keeper's pods, and of its container beside a node's
// driver.
func rolesOfKeeper() []*unstructured.Unstructured {
	var roles []*unstructured.Unstructured
	for _, o := range installed {
		if name := o.GetName(); name == keeperName || strings.HasSuffix(name, "-leave") {
			roles = append(roles, o)
		}
	}
	return roles
}

// restartKeepers deletes the keepers' pods, their lease and their records, without a grace period.
func restartKeepers(ctx context.Context) {
	now := int64(0)
	Expect(api.CoreV1().Pods(driverNamespace).DeleteCollection(ctx,
		metav1.DeleteOptions{GracePeriodSeconds: &now},
		metav1.ListOptions{LabelSelector: ofKeeper})).To(Succeed())
	removeLeases(ctx, driverNamespace, keeperLease)
	removeRecords(ctx)
}

// keeperSettles waits until the keeper, which has all of its rights again, has ended what it has
// begun.
func keeperSettles(ctx context.Context) {
	Expect(theRack.Admin.Switch(ctx, map[string]any{"hotplug": "full"})).To(Succeed())
	coldAttached(ctx)
	for _, worker := range workers {
		Eventually(func() (bool, error) { return tainted(ctx, worker) }).WithContext(ctx).
			Should(BeFalse(), "the startup taint of %s should be gone", worker)
	}
	spreadControllers(ctx)
}

// coldAttach creates a pod for a node that has just joined, on a rack without hot-plug.
func (f *flow) coldAttach(ctx context.Context) error {
	defer f.clean(ctx)
	worker := workers[1]
	err := theRack.Admin.Switch(ctx, map[string]any{"hotplug": "none"})
	defer func() {
		_ = theRack.Admin.Switch(context.WithoutCancel(ctx), map[string]any{"hotplug": "full"})
	}()
	if err == nil {
		_, err = api.CoreV1().Nodes().Patch(ctx, worker, types.MergePatchType,
			fmt.Appendf(nil, `{"spec":{"taints":[{"key":%q,"effect":"NoSchedule"}]}}`, startupTaint),
			metav1.PatchOptions{})
	}
	if err == nil {
		err = f.make(ctx, fmt.Sprintf(flowClaim, f.name))
	}
	if err == nil {
		err = f.pod(ctx, f.name, worker, f.name)
	}
	if err != nil {
		return err
	}
	return poll(ctx, flowTimeout, func(ctx context.Context) error {
		n, err := api.CoreV1().Nodes().Get(ctx, worker, metav1.GetOptions{})
		if err == nil && (n.Spec.Unschedulable || n.Annotations[cordonMark] != "") {
			err = fmt.Errorf("%w: %s is cordoned, for %s", errNotYet, worker, n.Annotations[cordonMark])
		}
		return err
	})
}

// leave makes a pod with a volume and the driver of its node end at the same moment.
func (f *flow) leave(ctx context.Context) error {
	defer f.clean(ctx)
	worker := workers[0]
	err := f.make(ctx, fmt.Sprintf(flowClaim, f.name))
	if err == nil {
		stubborn := strings.Replace(flowPod, "terminationGracePeriodSeconds: 1",
			"terminationGracePeriodSeconds: 5", 1)
		err = f.make(ctx, strings.Replace(fmt.Sprintf(stubborn, f.name, worker, f.name), idle,
			"trap : TERM; while :; do sleep 1; done", 1))
	}
	if err == nil {
		err = f.running(ctx, f.name)
	}
	if err != nil {
		return err
	}
	defer func() {
		_, _ = api.CoreV1().Nodes().Patch(context.WithoutCancel(ctx), worker, types.MergePatchType,
			[]byte(`{"spec":{"unschedulable":false}}`), metav1.PatchOptions{})
	}()
	_, err = api.CoreV1().Nodes().Patch(ctx, worker, types.MergePatchType,
		[]byte(`{"spec":{"unschedulable":true}}`), metav1.PatchOptions{})
	if err != nil {
		return err
	}
	return f.endsLast(ctx, worker)
}

// endsLast deletes the pod and the node's driver, and fails if the driver ends before the volume is
// detached, or much later.
func (f *flow) endsLast(ctx context.Context, worker string) error {
	list, err := api.CoreV1().Pods(driverNamespace).List(ctx, metav1.ListOptions{
		LabelSelector: ofNode, FieldSelector: "spec.nodeName=" + worker})
	if err != nil || len(list.Items) != 1 {
		return errors.Join(err, fmt.Errorf("%s has %d drivers", worker, len(list.Items)))
	}
	driver := list.Items[0]
	err = errors.Join(
		api.CoreV1().Pods(driverNamespace).Delete(ctx, driver.Name, metav1.DeleteOptions{}),
		api.CoreV1().Pods(f.ns).Delete(ctx, f.name, metav1.DeleteOptions{}))
	if err != nil {
		return err
	}
	err = poll(ctx, time.Minute, func(ctx context.Context) error {
		now, err := api.CoreV1().Pods(driverNamespace).Get(ctx, driver.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) || err == nil && now.UID != driver.UID {
			return nil
		}
		return errors.Join(err, fmt.Errorf("%w: the driver is there", errNotYet))
	})
	if err != nil {
		return err
	}
	attachments, err := api.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	for _, a := range attachments.Items {
		if a.Spec.NodeName == worker && a.Spec.Attacher == driverName {
			err = errors.Join(err, fmt.Errorf("%s is left on %s, and its driver is gone", a.Name, worker))
		}
	}
	return err
}
