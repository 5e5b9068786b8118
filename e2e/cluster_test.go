//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"
	"sigs.k8s.io/kind/pkg/apis/config/v1alpha4"
	"sigs.k8s.io/kind/pkg/cluster"
	"sigs.k8s.io/kind/pkg/cluster/nodes"
	"sigs.k8s.io/kind/pkg/cluster/nodeutils"
)

const clusterName = "oxide-csi"

// controlPlane and workers are the names of the nodes. Each worker is an instance of the rack with
// the same name.
const controlPlane = clusterName + "-control-plane"

var workers = [2]string{clusterName + "-worker", clusterName + "-worker2"}

// instanceIDs contains the IDs of the workers' instances. deploy/kustomize/simulator contains them,
// too.
var instanceIDs = map[string]string{
	workers[0]: "0a1de000-0000-4000-8000-000000000001",
	workers[1]: "0a1de000-0000-4000-8000-000000000002",
}

// nodeStatusPeriod is how often a kubelet reports which volumes it uses. Kubernetes waits for that
// report before it mounts and before it detaches. With the default of ten seconds, most of every
// spec would be waiting.
const nodeStatusPeriod = time.Second

// nodeGrace is how long a node may be silent before Kubernetes treats it as lost. The default of 50
// s is five times the default period of the kubelets' reports, and here they report more often.
const nodeGrace = 20 * time.Second

// claimPeriod is how often Kubernetes looks at claims and volumes that nobody has changed. When two
// of its controllers change one at the same time, one of them tries again only then; the default is
// 15 s. Each look at a claim that waits writes an event, and Kubernetes soon drops further ones.
const claimPeriod = 5 * time.Second

// kubernetesReady is how long the nodes may take to be ready.
const kubernetesReady = 3 * time.Minute

// newCluster creates the kind cluster. rackDir is the rack's directory on this machine.
func newCluster(provider *cluster.Provider, set settings, rackDir, kubeconfig string) error {
	for _, id := range instanceIDs {
		// The guest's view has to exist before its node, because it is mounted into the node.
		if err := os.MkdirAll(filepath.Join(rackDir, "guests", id), 0o755); err != nil {
			return fmt.Errorf("make the guests' views: %w", err)
		}
	}
	options := []cluster.CreateOption{
		cluster.CreateWithV1Alpha4Config(clusterConfig(set, rackDir)),
		cluster.CreateWithNodeImage(set.nodeImage),
		cluster.CreateWithKubeconfigPath(kubeconfig),
		cluster.CreateWithWaitForReady(kubernetesReady),
		cluster.CreateWithRetain(true),
		cluster.CreateWithDisplayUsage(false),
		cluster.CreateWithDisplaySalutation(false),
	}
	if err := provider.Create(clusterName, options...); err != nil {
		return fmt.Errorf("create the kind cluster: %w", err)
	}
	return nil
}

func clusterConfig(set settings, rackDir string) *v1alpha4.Cluster {
	config := &v1alpha4.Cluster{
		Nodes: []v1alpha4.Node{{
			Role: v1alpha4.ControlPlaneRole,
			ExtraMounts: []v1alpha4.Mount{
				{HostPath: rackDir, ContainerPath: "/rack"},
				// The simulator creates loop devices.
				{HostPath: "/dev", ContainerPath: "/host/dev"},
			},
		}},
		// A spec pulls from a registry without TLS, which a file in this directory allows.
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
			// A cloud controller manager would set this (RFD 493).
			KubeadmConfigPatchesJSON6902: []v1alpha4.PatchJSON6902{
				kubeadmFlag(set, "JoinConfiguration", "/nodeRegistration/kubeletExtraArgs",
					"provider-id", "oxide://"+id, "1"),
			},
		})
	}
	if set.offline {
		// The node image has its own network, and nothing here needs DNS.
		config.Networking.DisableDefaultCNI = true
		config.KubeadmConfigPatches = append(config.KubeadmConfigPatches,
			"kind: InitConfiguration\nskipPhases: [preflight, addon/coredns]\n")
	}
	return config
}

// kubeadmFlag returns a patch that gives a program of the cluster a flag. Up to Kubernetes 1.35
// kind uses kubeadm's v1beta3, in which flags are a map, and later v1beta4, in which they are a
// list. at is the index of the flag in kind's own list.
func kubeadmFlag(set settings, kind, flags, name, value, at string) v1alpha4.PatchJSON6902 {
	patch := v1alpha4.PatchJSON6902{Group: "kubeadm.k8s.io", Version: "v1beta3", Kind: kind}
	var minor int
	if _, err := fmt.Sscanf(set.kubernetes, "v1.%d.", &minor); err == nil && minor < 36 {
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

// node is a machine of the cluster, which is a container.
type node struct{ nodes.Node }

// findNodes returns the cluster's nodes by name.
func findNodes(provider *cluster.Provider) (map[string]node, error) {
	list, err := provider.ListInternalNodes(clusterName)
	if err != nil {
		return nil, fmt.Errorf("list the nodes: %w", err)
	}
	found := map[string]node{}
	for _, n := range list {
		found[n.String()] = node{n}
	}
	for _, name := range append([]string{controlPlane}, workers[:]...) {
		if _, ok := found[name]; !ok {
			return nil, fmt.Errorf("the cluster has no node %s", name)
		}
	}
	return found, nil
}

// run runs a shell script in the node and returns what it printed.
func (n node) run(ctx context.Context, script string) (string, error) {
	var out, complaints bytes.Buffer
	err := n.CommandContext(ctx, "sh", "-c", script).SetStdout(&out).SetStderr(&complaints).Run()
	if err != nil {
		return out.String(), fmt.Errorf("in %s: %w: %s", n, err, complaints.String())
	}
	return out.String(), nil
}

// loopNodes is a script that creates the device nodes of the first loop devices. A container's /dev
// is copied when it starts, and the kubelet takes a loop device for each raw block volume.
const loopNodes = `n=0
while [ $n -lt 256 ]; do
	[ -e /dev/loop$n ] || mknod -m 660 /dev/loop$n b 7 $n
	n=$((n+1))
done`

// prepare creates in a started node what the suite needs.
func (n node) prepare(ctx context.Context) error {
	if _, err := n.run(ctx, loopNodes); err != nil {
		return fmt.Errorf("make the loop devices' nodes: %w", err)
	}
	return nil
}

// loadArchives loads the images that are in no registry into every node.
func loadArchives(ctx context.Context, all map[string]node, archives []string) error {
	group, ctx := errgroup.WithContext(ctx)
	for _, n := range all {
		group.Go(func() error {
			for _, archive := range archives {
				if err := ctx.Err(); err != nil {
					return err
				}
				if err := n.load(archive); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return group.Wait()
}

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
