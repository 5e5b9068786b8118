//go:build linux

package vm_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
)

// TestKeeperBootsAMachineForAColdAttach gives a volume to a machine of a rack without hot-plug. The
// test acts as the attacher and as the kubelet of the node; the keeper stops and starts it.
func TestKeeperBootsAMachineForAColdAttach(t *testing.T) {
	if testing.Short() {
		t.Skip("SHORT= make vm runs it")
	}
	p := proof.New(t, "vm-cold-attach")
	l, ctx := newLab(t, p), t.Context()
	must := func(err error) {
		t.Helper()
		must(t, err)
	}
	must(l.rack.Admin.Switch(ctx, map[string]any{"hotplug": "none"}))
	n := l.nodes[0]
	var failed error // of a step of the life
	defer func() { must(failed) }()
	defer harness.Catch(&failed)
	v := l.newLife(ctx, plan{kind: "ext4"}, "")
	const bootID = "cat /proc/sys/kernel/random/boot_id"
	before, err := n.run(ctx, nil, bootID)
	must(err)

	api := keepertest.Serve(t, time.Now)
	kube, _ := api.Client("keeper")
	client, err := keeper.Connect(kube, "keeper")
	must(err)
	racks, closeIdle, err := rack.New(rack.Options{Host: l.rack.URL, Project: l.rack.Project},
		&rack.Transport{Tokens: &rack.TokenSource{Fixed: l.rack.Token}})
	must(err)
	defer closeIdle()
	k := &keeper.Keeper{Config: keeper.Defaults(), Kubernetes: client, Rack: racks,
		Namespace: "oxide", Log: slog.New(slog.DiscardHandler), Metrics: keeper.NewMetrics()}
	k.Config.ColdAttach, k.Config.Settle, k.Config.NodeName = true, 0, "z"
	// Machines without KVM may take long to boot.
	k.Config.StartTimeout, k.Config.ReturnTimeout = bootTime, bootTime

	made := keepertest.Put(api, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n.Name,
		Labels: map[string]string{keeper.ColdAttachLabel: keeper.Allowed}}})
	keepertest.Put(api, &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n.Name,
		OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: n.Name,
			UID: made.UID}}}, Spec: storagev1.CSINodeSpec{Drivers: []storagev1.CSINodeDriver{
		{Name: keeper.DriverName, NodeID: n.ID}}}})
	data, name := "data", metav1.ObjectMeta{Namespace: "shop", Name: "data"}
	claim := keepertest.Put(api, &corev1.PersistentVolumeClaim{ObjectMeta: name,
		Spec: corev1.PersistentVolumeClaimSpec{VolumeName: data}})
	keepertest.Put(api, &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: data},
		Spec: corev1.PersistentVolumeSpec{PersistentVolumeSource: corev1.PersistentVolumeSource{
			CSI: &corev1.CSIPersistentVolumeSource{Driver: keeper.DriverName,
				VolumeHandle: v.volume.GetVolumeId()}}, ClaimRef: &corev1.ObjectReference{APIVersion: "v1",
			Kind: "PersistentVolumeClaim", Namespace: "shop", Name: data, UID: claim.UID}}})
	keepertest.Put(api, &corev1.Pod{ObjectMeta: name, Spec: corev1.PodSpec{NodeName: n.Name,
		Volumes: []corev1.Volume{{Name: data, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: data}}}}}})
	keepertest.Put(api, &storagev1.VolumeAttachment{ObjectMeta: metav1.ObjectMeta{Name: data},
		Spec: storagev1.VolumeAttachmentSpec{Attacher: keeper.DriverName, NodeName: n.Name,
			Source: storagev1.VolumeAttachmentSource{PersistentVolumeName: &data}}})

	attached, stops, up := false, 0, true
	must(harness.Await(ctx, 2*bootTime, func() error {
		instance, err := l.rack.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(n.ID)})
		must(err)
		runs := instance.RunState == oxide.InstanceStateRunning
		if up && !runs {
			stops++
			n.sever()
		}
		if !up && runs {
			must(n.connect(ctx)) // kubelet reports when the guest has booted
		}
		up = runs
		keepertest.Edit(api, "", n.Name, func(o *corev1.Node) {
			ready := corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionUnknown}
			if up {
				ready.Status, ready.LastHeartbeatTime = corev1.ConditionTrue, metav1.Now()
			}
			o.Status.Conditions = []corev1.NodeCondition{ready}
		})
		if !attached {
			once, cancel := context.WithTimeout(ctx, callTimeout)
			err := v.call("attach", n)(once)
			cancel()
			attached = err == nil
			keepertest.Edit(api, "", data, func(a *storagev1.VolumeAttachment) {
				a.Status = storagev1.VolumeAttachmentStatus{Attached: attached}
				if err != nil {
					a.Status.AttachError = &storagev1.VolumeError{Time: metav1.Now(), Message: err.Error()}
				}
			})
		}
		if _, err := k.Round(ctx); err != nil {
			return err
		}
		if node, _ := keepertest.Get[*corev1.Node](api, "", n.Name); !attached || !up || stops == 0 ||
			node.Spec.Unschedulable {
			return errors.New("the volume is not attached to a node that takes pods")
		}
		return nil
	}))
	v.makeDirs(ctx, n)
	for _, what := range []string{"stage", "publish", "write"} {
		must(v.call(what, n)(ctx))
	}
	v.verify(ctx, n)
	after, err := n.run(ctx, nil, bootID)
	must(err)
	if stops != 1 || string(after) == string(before) {
		t.Errorf("the machine was stopped %d times, its boots are %s and %s", stops, before, after)
	}
	must(v.at.Remove(ctx, n.node()))
	p.Figure("stops", stops, "blocks_compared", v.compared, "bytes_lost", v.lost)
}
