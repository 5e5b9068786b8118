//go:build e2e

package e2e

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

const (
	driverName = "csi.oxide.computer"
	// driverNamespace is the namespace in the overlay.
	driverNamespace = "oxide-csi"
	controllerName  = "oxide-csi-controller"
	nodeName        = "oxide-csi-node"
	simulatorName   = "oxide-simulator"
	// overlay is the directory that the suite installs: the plain manifests, with a simulated rack.
	overlay = "kustomize/e2e"
)

// rolloutTimeout is how long pods may take to start and to be ready when their images are already
// there.
const rolloutTimeout = 3 * time.Minute

// kustomized builds a directory of package deploy, as kubectl apply -k does. If there is a text, it
// is the directory's kustomization.
func kustomized(dir, text string) ([]*unstructured.Unstructured, error) {
	memory, err := manifests(deploy.Files)
	if err == nil && text != "" {
		err = memory.WriteFile("/"+dir+"/kustomization.yaml", []byte(text))
	}
	if err != nil {
		return nil, fmt.Errorf("read the manifests: %w", err)
	}
	return kustomizedIn(memory, dir)
}

// manifests returns a tree of package deploy as a file system that a spec may add files to.
func manifests(tree fs.FS) (filesys.FileSystem, error) {
	memory := filesys.MakeFsInMemory()
	return memory, fs.WalkDir(tree, ".",
		func(path string, entry fs.DirEntry, err error) error {
			if err != nil || entry.IsDir() {
				return err
			}
			content, err := fs.ReadFile(tree, path)
			if err != nil {
				return err
			}
			return memory.WriteFile("/"+path, content)
		})
}

func kustomizedIn(memory filesys.FileSystem, dir string) ([]*unstructured.Unstructured, error) {
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(memory, "/"+dir)
	if err != nil {
		return nil, fmt.Errorf("kustomize build %s: %w", dir, err)
	}
	text, err := built.AsYaml()
	if err != nil {
		return nil, fmt.Errorf("kustomize build %s: %w", dir, err)
	}
	return parseObjects(text)
}

// crds returns the definitions of the kinds for snapshots. A cluster provides them, not the driver.
func crds(dir string) ([]*unstructured.Unstructured, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.yaml"))
	if err != nil {
		return nil, err
	}
	var all []*unstructured.Unstructured
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		objects, err := parseObjects(text)
		if err != nil {
			return nil, fmt.Errorf("read %s: %w", file, err)
		}
		for _, object := range objects {
			if object.GetKind() == "CustomResourceDefinition" {
				all = append(all, object)
			}
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there are no definitions of kinds in %s", dir)
	}
	return all, nil
}

// applyAll applies objects in the order in which kustomize has put them.
func applyAll(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		if err := api.apply(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

// removeAll deletes objects from the last to the first and waits until they are gone.
func removeAll(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, object := range slices.Backward(objects) {
		if err := api.remove(ctx, object); err != nil {
			return err
		}
	}
	for _, object := range slices.Backward(objects) {
		if err := api.gone(ctx, object); err != nil {
			return err
		}
	}
	return nil
}

// gone waits until an object no longer exists.
func (k *kube) gone(ctx context.Context, object *unstructured.Unstructured) error {
	client, err := k.resource(object.GroupVersionKind(), object.GetNamespace())
	if meta.IsNoMatchError(err) {
		return nil // The kind is gone as well.
	}
	if err != nil {
		return err
	}
	err = poll(ctx, rolloutTimeout, func(ctx context.Context) error {
		left, err := client.Get(ctx, object.GetName(), metav1.GetOptions{})
		switch {
		case apierrors.IsNotFound(err):
			return nil
		case err != nil:
			return err
		}
		return fmt.Errorf("%w: it is still there, with the finalizers %v", errNotYet,
			left.GetFinalizers())
	})
	if err != nil {
		return fmt.Errorf("wait until %s %s is gone: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}

// rolledOut waits until the driver serves everywhere: each Deployment and DaemonSet of the objects
// has all of its pods, and the kubelets have published what the driver reported.
func rolledOut(ctx context.Context, objects []*unstructured.Unstructured) error {
	for _, object := range objects {
		var ready func(context.Context) error
		name, namespace := object.GetName(), object.GetNamespace()
		switch object.GetKind() {
		case "Deployment":
			ready = func(ctx context.Context) error { return deploymentReady(ctx, namespace, name) }
		case "DaemonSet":
			ready = func(ctx context.Context) error { return daemonSetReady(ctx, namespace, name) }
		default:
			continue
		}
		if err := poll(ctx, rolloutTimeout, ready); err != nil {
			return fmt.Errorf("wait until %s %s is rolled out: %w", object.GetKind(), name, err)
		}
	}
	return nil
}

func deploymentReady(ctx context.Context, namespace, name string) error {
	d, err := api.AppsV1().Deployments(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := d.Status
	return allAvailable(s.ObservedGeneration < d.Generation || s.Replicas != s.UpdatedReplicas,
		ptr.Deref(d.Spec.Replicas, 1), s.UpdatedReplicas, s.AvailableReplicas)
}

func daemonSetReady(ctx context.Context, namespace, name string) error {
	d, err := api.AppsV1().DaemonSets(namespace).Get(ctx, name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	s := d.Status
	return allAvailable(s.ObservedGeneration < d.Generation || s.DesiredNumberScheduled == 0,
		s.DesiredNumberScheduled, s.UpdatedNumberScheduled, s.NumberAvailable)
}

func allAvailable(changing bool, want, updated, available int32) error {
	if changing || updated < want || available < want {
		return fmt.Errorf("%w: %d of %d pods are available, %d are of the last version", errNotYet,
			available, want, updated)
	}
	return nil
}

// registered waits until the driver is registered at a worker's kubelet.
func registered(ctx context.Context, worker string) error {
	err := poll(ctx, rolloutTimeout, func(ctx context.Context) error {
		csiNode, err := api.StorageV1().CSINodes().Get(ctx, worker, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for _, d := range csiNode.Spec.Drivers {
			if d.Name == driverName {
				return nil
			}
		}
		return fmt.Errorf("%w: its drivers are %v", errNotYet, csiNode.Spec.Drivers)
	})
	if err != nil {
		return fmt.Errorf("wait until %s has registered the driver: %w", worker, err)
	}
	return nil
}

// poll calls ask until it returns no error or the time is over; then it returns the last error.
func poll(ctx context.Context, timeout time.Duration, ask func(context.Context) error) error {
	var last error
	err := wait.PollUntilContextTimeout(ctx, 200*time.Millisecond, timeout, true,
		func(ctx context.Context) (bool, error) {
			err := ask(ctx)
			if err != nil && ctx.Err() == nil {
				last = err
			}
			return err == nil, nil
		})
	if err != nil && last != nil {
		return errors.Join(err, last)
	}
	return err
}

// parseObjects reads a stream of YAML documents.
func parseObjects(text []byte) ([]*unstructured.Unstructured, error) {
	var objects []*unstructured.Unstructured
	documents := yaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text)))
	for {
		document, err := documents.Read()
		if errors.Is(err, io.EOF) {
			return objects, nil
		}
		object := &unstructured.Unstructured{}
		if err == nil {
			err = yaml.Unmarshal(document, &object.Object)
		}
		if err != nil {
			return nil, err
		}
		if len(object.Object) > 0 {
			objects = append(objects, object)
		}
	}
}
