//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// flow makes a volume and a snapshot go through their whole life. It returns errors instead of
// failing the spec, because the caller needs to know whether it works.
type flow struct {
	ns, name string
	made     []*unstructured.Unstructured
}

// clean deletes what was created. The ledger finds what that leaves behind.
func (f *flow) clean(ctx context.Context) {
	ctx = context.WithoutCancel(ctx)
	for _, object := range slices.Backward(f.made) {
		_ = api.remove(ctx, object)
	}
}

const flowClaim = `
kind: PersistentVolumeClaim
apiVersion: v1
metadata: {name: %[1]s}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: ` + diskClass + `
  resources: {requests: {storage: 1Gi}}
`

const flowPod = `
kind: Pod
apiVersion: v1
metadata: {name: %[1]s}
spec:
  terminationGracePeriodSeconds: 1
  nodeSelector: {kubernetes.io/hostname: %[2]s}
  containers:
    - name: main
      image: ` + workload + `
      command: [sh, -c, "` + idle + `"]
      volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %[3]s}}]
`

const flowSnapshot = `
kind: VolumeSnapshot
apiVersion: snapshot.storage.k8s.io/v1
metadata: {name: %[1]s}
spec:
  volumeSnapshotClassName: ` + snapshotClass + `
  source: {persistentVolumeClaimName: %[1]s}
`

const flowRestore = `
kind: PersistentVolumeClaim
apiVersion: v1
metadata: {name: %[1]s-restored}
spec:
  accessModes: [ReadWriteOnce]
  storageClassName: ` + diskClass + `
  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: %[1]s}
  resources: {requests: {storage: 1Gi}}
`

// run goes through everything until ctx ends. Then it deletes what is left without waiting.
func (f *flow) run(ctx context.Context) error {
	defer f.clean(ctx)
	for _, step := range []func(context.Context) error{
		f.claim, f.move, f.snapshot, f.restore, f.end,
	} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	return nil
}

// claim creates a volume for a pod. At first the rack is unreachable, which two events report; then
// it has no capacity, and the scheduler is asked again.
func (f *flow) claim(ctx context.Context) error {
	for _, fault := range []adminapi.Fault{
		{Operation: "disk_create", Times: 2, Cut: true},
		{Operation: "disk_create", Skip: 2, Times: 1,
			Response: &adminapi.Response{Status: http.StatusInsufficientStorage,
				ErrorCode: "InsufficientCapacity", Message: "Insufficient capacity"}},
	} {
		if _, err := theRack.Admin.AddFault(ctx, fault); err != nil {
			return err
		}
	}
	err := f.make(ctx, fmt.Sprintf(flowClaim, f.name))
	if err == nil {
		err = f.pod(ctx, f.name+"-first", workers[0], f.name)
	}
	return err
}

func (f *flow) move(ctx context.Context) error {
	err := f.remove(ctx, schema.GroupVersionKind{Version: "v1", Kind: "Pod"}, f.name+"-first")
	if err == nil {
		err = f.pod(ctx, f.name+"-moved", workers[1], f.name)
	}
	return err
}

func (f *flow) snapshot(ctx context.Context) error {
	if err := f.make(ctx, fmt.Sprintf(flowSnapshot, f.name)); err != nil {
		return err
	}
	all, err := api.resource(snapshotKind, f.ns)
	if err != nil {
		return err
	}
	return poll(ctx, flowTimeout, func(ctx context.Context) error {
		now, err := all.Get(ctx, f.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if ready, _, _ := unstructured.NestedBool(now.Object, "status", "readyToUse"); !ready {
			return fmt.Errorf("%w: the snapshot's status is %v", errNotYet, now.Object["status"])
		}
		return nil
	})
}

func (f *flow) restore(ctx context.Context) error {
	err := f.make(ctx, fmt.Sprintf(flowRestore, f.name))
	if err == nil {
		err = f.pod(ctx, f.name+"-restored", workers[0], f.name+"-restored")
	}
	return err
}

// end deletes everything and waits until nothing is left in the cluster.
func (f *flow) end(ctx context.Context) error {
	var volumes []string
	list, err := api.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	for _, pv := range list.Items {
		if r := pv.Spec.ClaimRef; r != nil && r.Namespace == f.ns && strings.HasPrefix(r.Name, f.name) {
			volumes = append(volumes, pv.Name)
		}
	}
	if err := removeAll(ctx, f.made); err != nil {
		return err
	}
	return poll(ctx, flowTimeout, func(ctx context.Context) error {
		for _, volume := range volumes {
			pv, err := api.CoreV1().PersistentVolumes().Get(ctx, volume, metav1.GetOptions{})
			if err == nil {
				return fmt.Errorf("%w: the volume %s is %s", errNotYet, volume, pv.Status.Phase)
			}
		}
		contents, err := api.list(ctx, snapshotContentKind)
		for _, c := range contents {
			ref, _, _ := unstructured.NestedString(c.Object, "spec", "volumeSnapshotRef", "name")
			if ref == f.name {
				err = errors.Join(err, fmt.Errorf("%w: %s is left", errNotYet, c.GetName()))
			}
		}
		return err
	})
}

func (f *flow) pod(ctx context.Context, name, node, claim string) error {
	if err := f.make(ctx, fmt.Sprintf(flowPod, name, node, claim)); err != nil {
		return err
	}
	return f.running(ctx, name)
}

func (f *flow) running(ctx context.Context, name string) error {
	return poll(ctx, flowTimeout, func(ctx context.Context) error {
		p, err := api.CoreV1().Pods(f.ns).Get(ctx, name, metav1.GetOptions{})
		if err == nil && p.Status.Phase != corev1.PodRunning {
			err = fmt.Errorf("%w: pod %s is %s", errNotYet, name, p.Status.Phase)
		}
		return err
	})
}

// make applies documents.
func (f *flow) make(ctx context.Context, documents ...string) error {
	for _, document := range documents {
		objects, err := parseObjects([]byte(document))
		if err != nil {
			return err
		}
		for _, o := range objects {
			o.SetNamespace(f.ns)
			if err := api.apply(ctx, o); err != nil {
				return err
			}
			f.made = append(f.made, o)
		}
	}
	return nil
}

func (f *flow) remove(ctx context.Context, kind schema.GroupVersionKind, name string) error {
	o := &unstructured.Unstructured{}
	o.SetGroupVersionKind(kind)
	o.SetNamespace(f.ns)
	o.SetName(name)
	return removeAll(ctx, []*unstructured.Unstructured{o})
}
