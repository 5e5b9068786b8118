package deploy_test

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
)

const (
	driverLabel    = "app.kubernetes.io/name"
	driverContext  = "oxide-csi-driver"
	controllerName = "oxide-csi-controller"
	nodeName       = "oxide-csi-node"
	pluginName     = "oxide-plugin"
	tokenPath      = "/var/run/secrets/kubernetes.io/serviceaccount"
)

// everything is the chart with all that adds containers, variables and volumes.
func everything() []string {
	return with("snapshots.enabled=true", "instanceMetadata.enabled=true", "nodeKeeper.enabled=true",
		"metrics.enabled=true", "ownCA=true", "topology=rack=a")
}

// container is the container of that name, of either sort.
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

// mountedAt is the volume that a container has mounted there.
func mountedAt(c corev1.Container, path string) *corev1.VolumeMount {
	for i := range c.VolumeMounts {
		if strings.TrimSuffix(c.VolumeMounts[i].MountPath, "/") == path {
			return &c.VolumeMounts[i]
		}
	}
	return nil
}

// variable is what the container has in its environment under that name.
func variable(t *testing.T, c corev1.Container, name string) corev1.EnvVar {
	t.Helper()
	i := slices.IndexFunc(c.Env, func(v corev1.EnvVar) bool { return v.Name == name })
	if i < 0 {
		t.Fatalf("%s has no variable %s", c.Name, name)
	}
	return c.Env[i]
}

func TestTheControllerIsADeploymentAsTheRFDHasIt(t *testing.T) { // D-8, D-43, D-44
	d := find[appsv1.Deployment](t, objects(t), "Deployment", controllerName)
	if *d.Spec.Replicas != 2 || d.Labels[driverLabel] != driverContext {
		t.Errorf("replicas %d, labels %v; want 2 and %s", *d.Spec.Replicas, d.Labels, driverContext)
	}
	for _, labels := range []map[string]string{
		d.Spec.Selector.MatchLabels, d.Spec.Template.Labels, // E-15
	} {
		if labels["app"] != controllerName || labels[driverLabel] != driverContext {
			t.Errorf("the pods' labels are %v; want app and %s", labels, driverLabel)
		}
	}
	plugin := container(t, d.Spec.Template.Spec, pluginName)
	if plugin.Image != "oxidecomputer/oxide-csi-plugin:v0.1.0" {
		t.Errorf("the image is %s", plugin.Image)
	}
	if want := []string{"--endpoint=$(CSI_ENDPOINT)", "--mode=controller"}; !slices.Equal(plugin.Args,
		want) {
		t.Errorf("the arguments are %q, want %q", plugin.Args, want)
	}
	if got := variable(t, plugin, "CSI_ENDPOINT").Value; got != "unix:///csi/csi.sock" {
		t.Errorf("CSI_ENDPOINT is %s", got)
	}
}

func TestTheRackIsNamedByTheSecret(t *testing.T) { // D-45, D-63, E-31
	for _, c := range []struct {
		name, secret string
		keys         map[string]string
		args         []string
	}{
		{"the RFD's names", "oxide-secret", map[string]string{
			"OXIDE_HOST": "host", "OXIDE_TOKEN": "token", "OXIDE_PROJECT": "project"}, nil},
		{"names of one's own", "mine", map[string]string{
			"OXIDE_HOST": "oxide-host", "OXIDE_TOKEN": "oxide-token", "OXIDE_PROJECT": "oxide-project"},
			with("secret.existing=mine", "secret.keys.host=oxide-host",
				"secret.keys.token=oxide-token", "secret.keys.project=oxide-project")},
	} {
		t.Run(c.name, func(t *testing.T) {
			pod := find[appsv1.Deployment](t, objects(t, c.args...), "Deployment",
				controllerName).Spec.Template.Spec
			plugin := container(t, pod, pluginName)
			for name, key := range c.keys {
				ref := variable(t, plugin, name).ValueFrom.SecretKeyRef
				if ref.Name != c.secret || ref.Key != key || ref.Optional != nil {
					t.Errorf("%s is of %v; want the key %s of %s, not optional", name, ref, key, c.secret)
				}
			}
			id := variable(t, plugin, "OXIDE_CLUSTER_ID").ValueFrom.SecretKeyRef
			if id.Key != "cluster-id" || id.Name != c.secret {
				t.Errorf("OXIDE_CLUSTER_ID is of %v; want the key cluster-id", id)
			}
			file := variable(t, plugin, "OXIDE_TOKEN_FILE").Value
			secret := volume(t, pod, mountedAt(plugin, "/etc/oxide").Name).Secret
			if file != "/etc/oxide/token" || secret.SecretName != c.secret ||
				secret.Items[0].Key != c.keys["OXIDE_TOKEN"] || secret.Items[0].Path != "token" {
				t.Errorf("OXIDE_TOKEN_FILE is %s of %v; want the token's key", file, secret)
			}
		})
	}
}

func TestTheControllersSidecarsShareItsSocket(t *testing.T) { // D-10, D-46, D-47, D-48, D-49, B-46
	pod := find[appsv1.Deployment](t, objects(t, everything()...), "Deployment",
		controllerName).Spec.Template.Spec
	if volume(t, pod, "socket-dir").EmptyDir == nil {
		t.Error("socket-dir is no emptyDir")
	}
	elected := []string{"--leader-election=true", "--timeout=120s", "--kube-api-qps=20"}
	for name, want := range map[string]struct {
		atLeast [3]int
		args    []string
	}{
		"csi-provisioner": {[3]int{5, 0, 2}, append(elected, "--extra-create-metadata=true",
			"--default-fstype=ext4")},
		"csi-attacher":    {[3]int{4, 6, 1}, elected},
		"csi-snapshotter": {[3]int{8, 0, 0}, elected},
		pluginName:        {[3]int{0, 1, 0}, nil},
	} {
		c := container(t, pod, name)
		if mount := mountedAt(c, "/csi"); mount == nil || mount.Name != "socket-dir" {
			t.Errorf("%s has not socket-dir at /csi", name)
		}
		for _, arg := range append(want.args, "--csi-address=/csi/csi.sock") {
			if name != pluginName && !slices.Contains(c.Args, arg) {
				t.Errorf("%s has not %s: %q", name, arg, c.Args)
			}
		}
		if !newer(t, c.Image, want.atLeast) {
			t.Errorf("%s runs %s; want v%v or newer, pinned", name, c.Image, want.atLeast)
		}
		for _, gone := range []string{"HonorPVReclaimPolicy", "Topology="} {
			if strings.Contains(strings.Join(c.Args, " "), gone) {
				t.Errorf("%s has the gate %s, which its version does not know", name, gone)
			}
		}
	}
}

func TestTheControllerHasNoPowerOverItsMachine(t *testing.T) { // D-52, B-31
	pod := find[appsv1.Deployment](t, objects(t, everything()...), "Deployment",
		controllerName).Spec.Template.Spec
	s := pod.SecurityContext
	if s.RunAsNonRoot == nil || !*s.RunAsNonRoot || *s.RunAsUser != 65532 ||
		s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("the pod's security context is %v", s)
	}
	if pod.HostNetwork || pod.HostPID || pod.HostIPC {
		t.Error("the pod shares a namespace with its host")
	}
	for _, v := range pod.Volumes {
		if v.HostPath != nil {
			t.Errorf("the volume %s is a directory of the host", v.Name)
		}
	}
	for _, c := range pod.Containers {
		locked(t, c)
	}
}

// locked says what an unprivileged container may do that it need not.
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

func TestOnlyWhoSpeaksToKubernetesHasAToken(t *testing.T) { // D-54, D-66
	all := objects(t, everything()...)
	for _, pod := range []struct {
		spec corev1.PodSpec
		want []string
	}{
		{find[appsv1.Deployment](t, all, "Deployment", controllerName).Spec.Template.Spec,
			[]string{"csi-provisioner", "csi-attacher", "csi-snapshotter"}},
		{find[appsv1.DaemonSet](t, all, "DaemonSet", nodeName).Spec.Template.Spec,
			[]string{"oxide-instance-metadata", "leave"}},
		{pods(t, all)[keeperName].Spec, []string{"oxide-node-keeper"}},
		{find[appsv1.DaemonSet](t, objects(t), "DaemonSet", nodeName).Spec.Template.Spec, nil},
	} {
		if pod.spec.AutomountServiceAccountToken == nil || *pod.spec.AutomountServiceAccountToken {
			t.Errorf("every container of %s gets a token", pod.spec.ServiceAccountName)
		}
		var tokens, got []string
		for _, v := range pod.spec.Volumes {
			if v.Projected != nil {
				tokens = append(tokens, v.Name)
			}
		}
		for _, c := range slices.Concat(pod.spec.InitContainers, pod.spec.Containers) {
			for _, m := range c.VolumeMounts {
				if slices.Contains(tokens, m.Name) {
					got = append(got, c.Name)
					if m.MountPath != tokenPath {
						t.Errorf("%s has its token at %s", c.Name, m.MountPath)
					}
				}
			}
		}
		if !slices.Equal(got, pod.want) {
			t.Errorf("a token of %s have %q, want %q", pod.spec.ServiceAccountName, got, pod.want)
		}
	}
}

func TestTheControllersReplicasAreNotLostTogether(t *testing.T) { // D-8, D-41
	all := objects(t)
	budget := find[policyv1.PodDisruptionBudget](t, all, "PodDisruptionBudget", controllerName)
	d := find[appsv1.Deployment](t, all, "Deployment", controllerName)
	if budget.Spec.MaxUnavailable.IntValue() != 1 ||
		*budget.Spec.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow ||
		fmt.Sprint(budget.Spec.Selector.MatchLabels) != fmt.Sprint(d.Spec.Selector.MatchLabels) {
		t.Errorf("the budget is %v", budget.Spec)
	}
	if u := d.Spec.Strategy.RollingUpdate; u.MaxSurge.IntValue() != 0 ||
		u.MaxUnavailable.IntValue() != 1 {
		t.Errorf("a replica is replaced by %v", u)
	}
	if d.Spec.Template.Spec.PriorityClassName != "system-cluster-critical" {
		t.Errorf("the priority class is %q", d.Spec.Template.Spec.PriorityClassName)
	}
	for value, want := range map[string][2]int{"preferred": {1, 0}, "required": {0, 1}, "none": {}} {
		d := find[appsv1.Deployment](t, objects(t, with("controller.antiAffinity="+value)...),
			"Deployment", controllerName)
		var got [2]int
		if a := d.Spec.Template.Spec.Affinity; a != nil {
			got[0] = len(a.PodAntiAffinity.PreferredDuringSchedulingIgnoredDuringExecution)
			got[1] = len(a.PodAntiAffinity.RequiredDuringSchedulingIgnoredDuringExecution)
		}
		if got != want {
			t.Errorf("with %s there are %v preferred and required terms, want %v", value, got, want)
		}
	}
}

func TestKubeletLearnsThatADriverIsStuckAndThatItCannotWork(t *testing.T) { // D-11, D-49
	all := objects(t)
	for name, pod := range map[string]corev1.PodSpec{
		controllerName: find[appsv1.Deployment](t, all, "Deployment", controllerName).Spec.Template.Spec,
		nodeName:       find[appsv1.DaemonSet](t, all, "DaemonSet", nodeName).Spec.Template.Spec,
	} {
		plugin, probe := container(t, pod, pluginName), container(t, pod, "liveness-probe")
		for what, p := range map[string]*corev1.Probe{
			"startup": plugin.StartupProbe, "liveness": plugin.LivenessProbe} {
			if p == nil || p.HTTPGet == nil || p.HTTPGet.Path != "/healthz" ||
				!slices.Contains(probe.Args, "--http-endpoint=:"+p.HTTPGet.Port.String()) {
				t.Errorf("the %s probe of %s does not ask the liveness-probe container", what, name)
			}
		}
		if !newer(t, probe.Image, [3]int{2, 13, 1}) {
			t.Errorf("the liveness probe of %s is %s", name, probe.Image)
		}
		// CSI's Probe fails for what no restart mends, so the liveness probe asks at another socket.
		at := variable(t, plugin, "OXIDE_LIVENESS_ENDPOINT").Value
		if !slices.Contains(probe.Args, "--csi-address="+strings.TrimPrefix(at, "unix://")) {
			t.Errorf("the liveness probe of %s is asked at %q, and serves %s", name, probe.Args, at)
		}
		for _, c := range []corev1.Container{plugin, probe} {
			mount := mountedAt(c, filepath.Dir(strings.TrimPrefix(at, "unix://")))
			if mount == nil || mount.ReadOnly || volume(t, pod, mount.Name).EmptyDir == nil {
				t.Errorf("%s of %s does not share the socket %s", c.Name, name, at)
			}
		}
		ready := plugin.ReadinessProbe
		if ready == nil || ready.Exec == nil || !slices.Equal(ready.Exec.Command,
			[]string{"/oxide-csi-plugin", "ready"}) || ready.TimeoutSeconds < 5 {
			t.Errorf("the readiness probe of %s is %v: it does not say why the driver cannot work", name,
				ready)
		}
	}
}

func TestEveryContainerAsksForWhatItNeeds(t *testing.T) { // B-34
	all := objects(t, everything()...)
	for _, pod := range pods(t, all) {
		for _, c := range containers(pod.Spec) {
			if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() {
				t.Errorf("%s asks for %v", c.Name, c.Resources.Requests)
			}
			if c.ImagePullPolicy != corev1.PullIfNotPresent {
				t.Errorf("%s has the pull policy %s", c.Name, c.ImagePullPolicy)
			}
		}
	}
}
