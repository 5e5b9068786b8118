//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
)

// fieldManager is the suite's name for the API server.
const fieldManager = "oxide-csi-e2e"

// kube is a client of the cluster's API.
type kube struct {
	kubernetes.Interface
	config  *rest.Config
	dynamic dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

func newKube(kubeconfig string) (*kube, error) {
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the kubeconfig: %w", err)
	}
	config.QPS = -1 // no limit: the suite is the only user
	// Do not log the API server's warnings about deprecated versions.
	config.WarningHandler = rest.NoWarnings{}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("speak to the cluster: %w", err)
	}
	dyn, err := dynamic.NewForConfig(config)
	if err != nil {
		return nil, fmt.Errorf("speak to the cluster: %w", err)
	}
	mapper := restmapper.NewDeferredDiscoveryRESTMapper(
		memory.NewMemCacheClient(client.Discovery()))
	return &kube{Interface: client, config: config, dynamic: dyn, mapper: mapper}, nil
}

// resource returns a client for the objects of a kind.
func (k *kube) resource(gvk schema.GroupVersionKind, namespace string) (
	dynamic.ResourceInterface, error) {
	mapping, err := k.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		// The kind may have been defined a moment ago.
		k.mapper.Reset()
		mapping, err = k.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	}
	if err != nil {
		return nil, err
	}
	if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
		return k.dynamic.Resource(mapping.Resource).Namespace(namespace), nil
	}
	return k.dynamic.Resource(mapping.Resource), nil
}

// apply creates or changes an object, as kubectl apply --server-side does.
func (k *kube) apply(ctx context.Context, object *unstructured.Unstructured) error {
	client, err := k.resource(object.GroupVersionKind(), object.GetNamespace())
	if err == nil {
		_, err = client.Apply(ctx, object.GetName(), object,
			metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	}
	if err != nil {
		return fmt.Errorf("apply %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}

// remove deletes an object. It is no error if the object or its kind is gone.
func (k *kube) remove(ctx context.Context, object *unstructured.Unstructured) error {
	client, err := k.resource(object.GroupVersionKind(), object.GetNamespace())
	if meta.IsNoMatchError(err) {
		return nil
	}
	if err == nil {
		foreground := metav1.DeletePropagationForeground
		err = client.Delete(ctx, object.GetName(),
			metav1.DeleteOptions{PropagationPolicy: &foreground})
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("delete %s %s: %w", object.GetKind(), object.GetName(), err)
	}
	return nil
}

// exec runs a command in a container and returns its output.
func (k *kube) exec(ctx context.Context, namespace, pod, container string, command ...string) (
	string, error) {
	url := k.CoreV1().RESTClient().Post().Resource("pods").Namespace(namespace).Name(pod).
		SubResource("exec").VersionedParams(&corev1.PodExecOptions{
		Container: container, Command: command, Stdout: true, Stderr: true,
	}, scheme.ParameterCodec).URL()
	executor, err := remotecommand.NewWebSocketExecutor(k.config, "GET", url.String())
	if err != nil {
		return "", fmt.Errorf("exec in %s/%s: %w", namespace, pod, err)
	}
	var out, complaints bytes.Buffer
	err = executor.StreamWithContext(ctx,
		remotecommand.StreamOptions{Stdout: &out, Stderr: &complaints})
	if err != nil {
		return out.String(), fmt.Errorf("exec %q in %s/%s: %w: %s", command, namespace, pod, err,
			complaints.String())
	}
	return out.String(), nil
}

// list lists objects of a kind in all namespaces. If the cluster does not know the kind, the list
// is empty.
func (k *kube) list(ctx context.Context, gvk schema.GroupVersionKind) (
	[]unstructured.Unstructured, error) {
	client, err := k.resource(gvk, metav1.NamespaceAll)
	if meta.IsNoMatchError(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	list, err := client.List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", gvk.Kind, err)
	}
	return list.Items, nil
}

// errNotYet reports that something has not happened yet.
var errNotYet = errors.New("not yet")
