package deploy_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

const (
	driverLabel    = "app.kubernetes.io/name"
	driverContext  = "oxide-csi-driver"
	controllerName = "oxide-csi-controller"
	nodeName       = "oxide-csi-node"
	pluginName     = "oxide-plugin"
	tokenPath      = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// everything returns the arguments for the chart with all values that add containers, variables and
// volumes.
func everything() []string {
	return with("snapshots.enabled=true", "instanceMetadata.enabled=true", "nodeKeeper.enabled=true",
		"metrics.enabled=true", "ownCA=true", "topology=rack=a")
}

// container returns the container of that name, init containers included.
func container(t *testing.T, pod corev1.PodSpec, name string) corev1.Container {
	t.Helper()
	all := slices.Concat(pod.InitContainers, pod.Containers)
	i := slices.IndexFunc(all, func(c corev1.Container) bool { return c.Name == name })
	if i < 0 {
		t.Fatalf("there is no container %s", name)
	}
	return all[i]
}

func volume(t *testing.T, pod corev1.PodSpec, name string) corev1.Volume {
	t.Helper()
	i := slices.IndexFunc(pod.Volumes, func(v corev1.Volume) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("there is no volume %s", name)
	}
	return pod.Volumes[i]
}

// mountedAt returns the volume that a container mounts at a path.
func mountedAt(c corev1.Container, path string) *corev1.VolumeMount {
	for i := range c.VolumeMounts {
		if strings.TrimSuffix(c.VolumeMounts[i].MountPath, "/") == path {
			return &c.VolumeMounts[i]
		}
	}
	return nil
}

// variable returns the environment variable of a container.
func variable(t *testing.T, c corev1.Container, name string) corev1.EnvVar {
	t.Helper()
	i := slices.IndexFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("%s has no variable %s", c.Name, name)
	}
	return c.Env[i]
}

// locked checks that an unprivileged container has no rights that it does not need.
func locked(t *testing.T, c corev1.Container) {
	t.Helper()
	s := c.SecurityContext
	if s == nil || s.Privileged != nil || s.RunAsUser != nil || s.Capabilities == nil ||
		len(s.Capabilities.Add) > 0 ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) ||
		s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem {
		t.Errorf("the security context of %s is %v", c.Name, s)
	}
}

func TestSidecarsArePinnedToTheRFDsVersionsOrNewerOnes(t *testing.T) { // D-47, D-48, D-49, D-53
	least := map[string][3]int{"csi-provisioner": {5, 0, 2}, "csi-attacher": {4, 6, 1},
		"csi-snapshotter": {8, 0, 0}, "liveness-probe": {2, 13, 1},
		"node-driver-registrar": {2, 9, 0}} // older versions write a file beside the socket
	seen := map[string]bool{}
	for name, pod := range pods(t, objects(t, everything()...)) {
		for _, c := range containers(pod.Spec) {
			seen[c.Name] = true
			if !newer(t, c.Image, least[c.Name]) {
				t.Errorf("%s of %s runs %s; want v%v or newer", c.Name, name, c.Image, least[c.Name])
			}
		}
	}
	for name := range least {
		if !seen[name] {
			t.Errorf("there is no %s", name)
		}
	}
}

func TestOnlyTheNodesDriverIsPrivileged(t *testing.T) { // D-52, B-31
	args := append(everything(), audited()...)
	all := pods(t, objects(t, args...))
	if len(all) != 4 {
		t.Errorf("there are %d kinds of pods, want 4", len(all))
	}
	for name, template := range all {
		pod, s := template.Spec, template.Spec.SecurityContext
		if s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault || pod.HostNetwork ||
			pod.HostIPC || pod.HostPID != (name == nodeName) {
			t.Errorf("%s has the security context %v, hostNetwork %v, hostIPC %v, hostPID %v", name, s,
				pod.HostNetwork, pod.HostIPC, pod.HostPID)
		}
		if name != nodeName && (s.RunAsNonRoot == nil || !*s.RunAsNonRoot || *s.RunAsUser != 65532) {
			t.Errorf("%s may run as root: %v", name, s)
		}
		for _, v := range pod.Volumes {
			if v.HostPath != nil && (name != nodeName ||
				!strings.HasPrefix(v.HostPath.Path, "/var/lib/kubelet") &&
					v.HostPath.Path != "/dev" && v.HostPath.Path != "/run/csi.oxide.computer") {
				t.Errorf("%s has the host's directory %s", name, v.HostPath.Path)
			}
		}
		for _, c := range containers(pod) {
			if name != nodeName || c.Name != pluginName {
				locked(t, c)
			} else if p := c.SecurityContext.Privileged; p == nil || !*p {
				t.Error("the node's driver is not privileged: it could not mount")
			}
		}
	}
	text := render(t)["node.yaml"]
	for _, reason := range []string{
		"# Formatting and mounting need", "# Before it releases a disk, the driver searches the mount",
	} {
		if !strings.Contains(text, reason) {
			t.Errorf("the manifest does not give the reason %q", reason)
		}
	}
}

// No container has both Kubernetes' token and the rack's, except the node keeper.
func TestOnlyContainersThatUseKubernetesHaveItsToken(t *testing.T) { // D-54, D-66
	all := append(everything(), audited()...)
	for _, c := range []struct {
		args []string
		want map[string][]string
	}{
		{all, map[string][]string{
			controllerName: {"csi-provisioner", "csi-attacher", "csi-snapshotter"},
			nodeName:       {"oxide-instance-metadata", "leave"},
			keeperName:     {"oxide-node-keeper"},
			auditName:      {"list"},
		}},
		{nil, map[string][]string{controllerName: {"csi-provisioner", "csi-attacher"}, nodeName: nil}},
	} {
		got := map[string][]string{}
		for name, template := range pods(t, objects(t, c.args...)) {
			pod := template.Spec
			got[name] = nil
			if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
				t.Errorf("every container of %s gets a token", name)
			}
			for _, c := range containers(pod) {
				for _, m := range c.VolumeMounts {
					if volume(t, pod, m.Name).Projected == nil {
						continue
					}
					got[name] = append(got[name], c.Name)
					if m.MountPath != tokenPath {
						t.Errorf("%s has its token at %s", c.Name, m.MountPath)
					}
				}
			}
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("containers with a token (-want +got):\n%s", diff)
		}
	}
}

func TestTheSecretNamesTheRackToEveryProgram(t *testing.T) { // D-45, D-63, E-31
	own := with("secret.existing=mine", "secret.keys.host=oxide-host", "secret.keys.token=oxide-token",
		"secret.keys.project=oxide-project")
	for _, c := range []struct {
		secret, prefix string
		args           []string
	}{{"oxide-secret", "", nil}, {"mine", "oxide-", own}} {
		all := pods(t, objects(t, slices.Concat(everything(), audited(), c.args)...))
		for name, programName := range map[string]string{controllerName: pluginName,
			keeperName: "oxide-node-keeper", auditName: "audit"} {
			pod := all[name].Spec
			program := container(t, pod, programName)
			for variableName, key := range map[string]string{"OXIDE_HOST": c.prefix + "host",
				"OXIDE_TOKEN": c.prefix + "token", "OXIDE_PROJECT": c.prefix + "project",
				"OXIDE_CLUSTER_ID": "cluster-id"} {
				if name == keeperName && key == "cluster-id" {
					continue // the keeper does not need it
				}
				ref := variable(t, program, variableName).ValueFrom.SecretKeyRef
				if ref.Name != c.secret || ref.Key != key || ref.Optional != nil {
					t.Errorf("%s of %s is of %v; want the key %s of %s, not optional", variableName, name,
						ref, key, c.secret)
				}
			}
			secret := volume(t, pod, mountedAt(program, "/etc/oxide").Name).Secret
			want := []corev1.KeyToPath{{Key: c.prefix + "token", Path: "token"},
				{Key: "ca.crt", Path: "ca.crt"}}
			if secret.SecretName != c.secret || !slices.Equal(secret.Items, want) ||
				variable(t, program, "OXIDE_TOKEN_FILE").Value != "/etc/oxide/token" ||
				variable(t, program, "OXIDE_CA_FILE").Value != "/etc/oxide/ca.crt" {
				t.Errorf("the token and the certificates of %s are of %v", name, secret)
			}
		}
	}
}

// A sidecar that finds the driver not ready logs the driver's reason and ends, and is restarted
// less and less often. kubectl describe shows the end of the log only with this policy.
func TestEveryContainerRequestsResourcesAndReportsWhyItFailed(t *testing.T) { // B-34
	for name, pod := range pods(t, objects(t, append(everything(), audited()...)...)) {
		for _, c := range containers(pod.Spec) {
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() ||
				c.ImagePullPolicy != corev1.PullIfNotPresent ||
				c.TerminationMessagePolicy != corev1.TerminationMessageFallbackToLogsOnError {
				t.Errorf("%s of %s asks for %v, with the policies %s and %s", c.Name, name,
					c.Resources.Requests, c.ImagePullPolicy, c.TerminationMessagePolicy)
			}
		}
	}
}
