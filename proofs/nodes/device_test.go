//go:build linux

package nodes

import (
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/keeper/keepertest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// A rack that records an attach first may leave a volume attached without a device. To Kubernetes
// the volume is attached, so the keeper stops no node for it, until somebody deletes the pod: then
// the detach needs a stop, and the next pod has its device (D-61, docs/hot-plug.md).
func TestTheStopForADetachHealsAVolumeWithoutADevice(t *testing.T) { // D-61
	rack, _ := startRack(t)
	w := newTestCluster(t.Context(), t, rack)
	defer func() { harness.Must(w.clear()) }()
	w.hotAttach = w.clock
	harness.Must(rack.Admin.Switch(w.ctx, map[string]any{
		"hotplug": adminapi.HotplugAttachOnly.With(adminapi.RecordFirst)}))
	harness.Got(rack.Admin.AddFault(w.ctx, adminapi.Fault{Operation: "instance_disk_attach", Times: 1,
		Device: &adminapi.DeviceFault{Fails: true}}))
	devices := func() int {
		return len(harness.Got(rack.Instance("a").Devices()))
	}

	w.addPod("a", 0)
	w.pass(time.Minute)
	for range 10 { // the attacher's second call finds the disk attached, like the driver
		w.turn()
		w.pass(time.Minute)
	}
	if why := w.unrest(); why != "" || w.stops > 0 || devices() > 0 {
		t.Fatalf("there are %d stops and %d devices, want none, and a cluster at rest: %s", w.stops,
			devices(), why)
	}

	pod := keepertest.List[*corev1.Pod](w.api, "default")[0]
	volume := pod.Spec.Volumes[0].PersistentVolumeClaim.ClaimName
	keepertest.Delete[*corev1.Pod](w.api, "default", pod.Name)
	for range 200 {
		if w.controllers(); len(keepertest.List[*storagev1.VolumeAttachment](w.api, "")) == 0 {
			break
		}
		w.turn()
		w.pass(20 * time.Second)
	}
	if w.stops != 1 {
		t.Fatalf("the keeper made %d stops for the detach, want 1:\n%v", w.stops, w.lines)
	}
	pod.UID, pod.DeletionTimestamp, pod.ResourceVersion = "", nil, ""
	pod.Name += "-again"
	keepertest.Put(w.api, pod)
	harness.Must(w.rest())
	if w.stops != 1 || devices() != 1 {
		t.Errorf("%s has %d devices after %d stops, want 1 of each:\n%v", volume, devices(), w.stops,
			w.lines)
	}
	for _, broken := range w.broken {
		t.Error(broken)
	}
}
