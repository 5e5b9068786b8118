//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	. "github.com/onsi/gomega"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/remotecommand"
	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/cluster/nodes"
	"sigs.k8s.io/kind/pkg/cluster/nodeutils"

	"github.com/oxidecomputer/oxide-csi-plugin/deploy"
)

const clusterName = "oxide-csi"

// controlPlane and workers are names of nodes. The rack has an instance with each worker's name.
const controlPlane = clusterName + "-control-plane"

var workers = [2]string{clusterName + "-worker", clusterName + "-worker2"}

// instanceIDs contains the IDs of the workers' instances, as in deploy/kustomize/simulator.
var instanceIDs = map[string]string{
	workers[0]: "0a1de000-0000-4000-8000-000000000001",
	workers[1]: "0a1de000-0000-4000-8000-000000000002",
}

// nodeStatusPeriod is how often a kubelet reports which volumes it uses. Kubernetes waits for this
// report before each mount and detach. With the default of ten seconds, specs would mostly wait.
const nodeStatusPeriod = time.Second

// nodeGrace is how long a kubelet may send no report before Kubernetes treats its node as lost. The
// default of 50 s is for kubelets that report every 10 s.
const nodeGrace = 20 * time.Second

// claimPeriod is how often Kubernetes checks claims and volumes that nobody has changed. After a
// write conflict of two controllers, one of them waits for this check; the default is 15 s. More
// frequent checks write so many events about waiting claims that Kubernetes drops some.
const claimPeriod = 5 * time.Second

const kubernetesReady = 3 * time.Minute

func newCluster(provider *cluster.Provider, set settings, rackDir, kubeconfig string) {
	for _, id := range instanceIDs {
		// kind mounts the instance's guest view into the node, so the directory has to exist first.
		Expect(os.MkdirAll(filepath.Join(rackDir, "guests", id), 0o755)).To(Succeed())
	}
	Expect(provider.Create(clusterName,
		cluster.CreateWithV1Alpha4Config(clusterConfig(set, rackDir)),
		cluster.CreateWithNodeImage(set.NodeImage),
		cluster.CreateWithKubeconfigPath(kubeconfig),
		cluster.CreateWithWaitForReady(kubernetesReady),
		cluster.CreateWithRetain(true),
		cluster.CreateWithDisplayUsage(false),
		cluster.CreateWithDisplaySalutation(false),
	)).To(Succeed())
}

func clusterConfig(set settings, rackDir string) *v1alpha4.Cluster {
	config := &v1alpha4.Cluster{
		Nodes: []v1alpha4.Node{{
			Role: v1alpha4.ControlPlaneRole,
			ExtraMounts: []v1alpha4.Mount{
				{HostPath: rackDir, ContainerPath: "/rack"},
				// The simulator in the node creates loop devices in this machine's /dev.
				{HostPath: "/dev", ContainerPath: "/host/dev"},
			},
		}},
		// One spec pulls from a registry without TLS, and writes a file to this directory to allow it.
		ContainerdConfigPatches: []string{"[plugins.\"io.containerd.grpc.v1.cri\".registry]\n" +
			"config_path = \"/etc/containerd/certs.d\"\n"},
		KubeadmConfigPatches: []string{fmt.Sprintf(
			"kind: KubeletConfiguration\nfailCgroupV1: false\nnodeStatusUpdateFrequency: %s\n",
			nodeStatusPeriod)},
		KubeadmConfigPatchesJSON6902: []v1alpha4.PatchJSON6902{
			kubeadmFlag(set, "ClusterConfiguration", "/controllerManager/extraArgs",
				"node-monitor-grace-period", nodeGrace.String(), "-"),
			kubeadmFlag(set, "ClusterConfiguration", "/controllerManager/extraArgs",
				"pvclaimbinder-sync-period", claimPeriod.String(), "-"),
		},
	}
	for _, worker := range workers {
		id := instanceIDs[worker]
		config.Nodes = append(config.Nodes, v1alpha4.Node{
			Role: v1alpha4.WorkerRole,
			ExtraMounts: []v1alpha4.Mount{
				{HostPath: filepath.Join(rackDir, "guests", id), ContainerPath: "/oxide"},
			},
			// A kubelet flag sets the provider ID. On a rack, a cloud controller manager does (RFD 493).
			KubeadmConfigPatchesJSON6902: []v1alpha4.PatchJSON6902{
				kubeadmFlag(set, "JoinConfiguration", "/nodeRegistration/kubeletExtraArgs",
					"provider-id", "oxide://"+id, "1"),
			},
		})
	}
	if set.Offline {
		// The offline node image brings its own network plugin, and no pod of the suite needs DNS.
		config.Networking.DisableDefaultCNI = true
		config.KubeadmConfigPatches = append(config.KubeadmConfigPatches,
			"kind: InitConfiguration\nskipPhases: [preflight, addon/coredns]\n")
	}
	return config
}

// kubeadmFlag returns a patch that adds a flag to a program of the cluster. Up to Kubernetes 1.35
// kind uses kubeadm's v1beta3, in which flags are a map. Later it uses v1beta4, in which flags are
// a list: the parameter "at" is the index of the flag to replace, or "-" to append a flag.
func kubeadmFlag(set settings, kind, flags, name, value, at string) v1alpha4.PatchJSON6902 {
	patch := v1alpha4.PatchJSON6902{Group: "kubeadm.k8s.io", Version: "v1beta3", Kind: kind}
	var minor int
	if _, err := fmt.Sscanf(set.Kubernetes, "v1.%d.", &minor); err == nil && minor < 36 {
		patch.Patch = fmt.Sprintf(`[{"op": "add", "path": "%s/%s", "value": %q}]`,
			flags, name, value)
		return patch
	}
	op := "replace"
	if at == "-" {
		op = "add"
	}
	patch.Version = "v1beta4"
	patch.Patch = fmt.Sprintf(
		`[{"op": %q, "path": "%s/%s", "value": {"name": %q, "value": %q}}]`,
		op, flags, at, name, value)
	return patch
}

type node struct{ nodes.Node }

func findNodes(provider *cluster.Provider) map[string]node {
	found := map[string]node{}
	for _, n := range must(provider.ListInternalNodes(clusterName)) {
		found[n.String()] = node{n}
	}
	for _, name := range append([]string{controlPlane}, workers[:]...) {
		Expect(found).To(HaveKey(name))
	}
	return found
}

func (n node) run(ctx context.Context, script string) (string, error) {
	var out, complaints bytes.Buffer
	err := n.CommandContext(ctx, "sh", "-c", script).SetStdout(&out).SetStderr(&complaints).Run()
	if err != nil {
		return out.String(), fmt.Errorf("in %s: %w: %s", n, err, complaints.String())
	}
	return out.String(), nil
}

// loopNodes creates the device nodes of the first 256 loop devices. Kubelet needs a loop device for
// each raw block volume, and a container's /dev lacks devices that were created after its start.
const loopNodes = `n=0
while [ $n -lt 256 ]; do
	[ -e /dev/loop$n ] || mknod -m 660 /dev/loop$n b 7 $n
	n=$((n+1))
done`

// prepare runs loopNodes. It has to be called after each start of the node.
func (n node) prepare(ctx context.Context) { must(n.run(ctx, loopNodes)) }

// load imports an archive of images that no registry has.
func (n node) load(archive string) (err error) {
	file, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("load an image: %w", err)
	}
	defer func() { err = errors.Join(err, file.Close()) }()
	if err := nodeutils.LoadImageArchive(n, file); err != nil {
		return fmt.Errorf("load %s into %s: %w", archive, n, err)
	}
	return nil
}

const (
	driverName      = "csi.oxide.computer"
	driverNamespace = "oxide-csi"
	controllerName  = "oxide-csi-controller"
	nodeName        = "oxide-csi-node"
	simulatorName   = "oxide-simulator"
	// overlay is the directory of package deploy that the suite installs.
	overlay = "kustomize/e2e"
)

// rolloutTimeout is how long pods may take to become ready if their node has the images.
const rolloutTimeout = 3 * time.Minute

// kustomized returns the objects that `kubectl apply -k` applies for a directory of package deploy.
// A text that is not empty replaces the directory's kustomization.yaml.
func kustomized(tree fs.FS, dir, text string) []*unstructured.Unstructured {
	files := map[string]string{}
	if text != "" {
		files[dir+"/kustomization.yaml"] = text
	}
	return must(deploy.Build(tree, dir, files))
}

// crds returns the snapshot CRDs in a directory. They belong to the cluster, not to the driver.
func crds(dir string) (all []*unstructured.Unstructured) {
	for _, file := range must(filepath.Glob(filepath.Join(dir, "*.yaml"))) {
		for _, object := range must(deploy.Parse(must(os.ReadFile(file)))) {
			if object.GetKind() == "CustomResourceDefinition" {
				all = append(all, object)
			}
		}
	}
	Expect(all).NotTo(BeEmpty(), "definitions of kinds in %s", dir)
	return all
}

func applyAll(ctx context.Context, objects []*unstructured.Unstructured) {
	for _, object := range objects {
		api.apply(ctx, object)
	}
}

func removeAll(ctx context.Context, objects []*unstructured.Unstructured) {
	for _, object := range slices.Backward(objects) {
		api.remove(ctx, object)
	}
	for _, object := range slices.Backward(objects) {
		client, err := api.resource(object.GroupVersionKind(), object.GetNamespace())
		if meta.IsNoMatchError(err) {
			continue // the object's kind was deleted, too
		}
		Expect(err).NotTo(HaveOccurred())
		Eventually(func() error {
			_, err := client.Get(ctx, object.GetName(), metav1.GetOptions{})
			return err
		}).WithContext(ctx).WithTimeout(rolloutTimeout).Should(Satisfy(apierrors.IsNotFound),
			"%s %s should be gone", object.GetKind(), object.GetName())
	}
}

func rollOut(ctx context.Context, objects []*unstructured.Unstructured) {
	applyAll(ctx, objects)
	rolledOut(ctx, objects)
}

// rolledOut waits until each Deployment and DaemonSet among the objects has all of its pods, and
// until the kubelets have registered the driver.
func rolledOut(ctx context.Context, objects []*unstructured.Unstructured) {
	for _, o := range objects {
		if kind := o.GetKind(); kind == "Deployment" || kind == "DaemonSet" {
			ready(ctx, kind, o.GetNamespace(), o.GetName())
		}
	}
	registered(ctx)
}

func ready(ctx context.Context, kind, namespace, name string) {
	kubectl(ctx, fmt.Sprintf("rollout status %s/%s --namespace=%s --timeout=%s", kind, name, namespace,
		rolloutTimeout))
}

const kubectlCommand = "kubectl --kubeconfig=/etc/kubernetes/admin.conf "

func kubectl(ctx context.Context, arguments string) {
	must(machines[controlPlane].run(ctx, kubectlCommand+arguments))
}

func registered(ctx context.Context) {
	for _, worker := range workers {
		Eventually(func() (string, error) {
			d, err := driverOn(ctx, worker)
			return d.Name, err
		}).WithContext(ctx).WithTimeout(rolloutTimeout).Should(Equal(driverName),
			"%s should have registered the driver", worker)
	}
}

// poll calls ask() until one call succeeds. After the timeout, poll returns the last failure, too.
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

const fieldManager = "oxide-csi-e2e"

type kube struct {
	kubernetes.Interface
	config  *rest.Config
	dynamic dynamic.Interface
	mapper  *restmapper.DeferredDiscoveryRESTMapper
}

func newKube(kubeconfig string) *kube {
	config := must(clientcmd.BuildConfigFromFlags("", kubeconfig))
	config.QPS = -1 // no limit on requests: the suite is the only user
	config.WarningHandler = rest.NoWarnings{}
	client := must(kubernetes.NewForConfig(config))
	return &kube{Interface: client, config: config, dynamic: must(dynamic.NewForConfig(config)),
		mapper: restmapper.NewDeferredDiscoveryRESTMapper(
			memory.NewMemCacheClient(client.Discovery()))}
}

func (k *kube) resource(gvk schema.GroupVersionKind, namespace string) (
	dynamic.ResourceInterface, error) {
	mapping, err := k.mapper.RESTMapping(gvk.GroupKind(), gvk.Version)
	if meta.IsNoMatchError(err) {
		// Discover the kinds again: the object's kind may be new.
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

func (k *kube) apply(ctx context.Context, object *unstructured.Unstructured) {
	client := must(k.resource(object.GroupVersionKind(), object.GetNamespace()))
	_, err := client.Apply(ctx, object.GetName(), object,
		metav1.ApplyOptions{FieldManager: fieldManager, Force: true})
	Expect(err).NotTo(HaveOccurred(), "apply %s %s", object.GetKind(), object.GetName())
}

func (k *kube) remove(ctx context.Context, object *unstructured.Unstructured) {
	client, err := k.resource(object.GroupVersionKind(), object.GetNamespace())
	if meta.IsNoMatchError(err) {
		return
	}
	Expect(err).NotTo(HaveOccurred())
	foreground := metav1.DeletePropagationForeground
	Expect(client.Delete(ctx, object.GetName(),
		metav1.DeleteOptions{PropagationPolicy: &foreground})).
		To(Or(Succeed(), Satisfy(apierrors.IsNotFound)))
}

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

var errNotYet = errors.New("not yet")
