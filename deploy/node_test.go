package deploy_test

import (
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
)

func TestTheNodeIsADaemonSetAsTheRFDHasIt(t *testing.T) { // D-9, D-50
	d := find[appsv1.DaemonSet](t, objects(t), "DaemonSet", nodeName)
	for _, labels := range []map[string]string{
		d.Spec.Selector.MatchLabels, d.Spec.Template.Labels,
	} {
		if labels["app"] != nodeName || labels[driverLabel] != driverContext {
			t.Errorf("the pods' labels are %v; want app and %s", labels, driverLabel)
		}
	}
	pod := d.Spec.Template.Spec
	plugin := container(t, pod, pluginName)
	want := []string{"--endpoint=$(CSI_ENDPOINT)", "--mode=node"}
	if !slices.Equal(plugin.Args, want) ||
		plugin.Image != "oxidecomputer/oxide-csi-plugin-node:v0.1.0" {
		t.Errorf("%s runs with %q, want %q", plugin.Image, plugin.Args, want)
	}
	if len(pod.Tolerations) != 1 || pod.Tolerations[0] != (corev1.Toleration{Operator: "Exists"}) ||
		pod.PriorityClassName != "system-node-critical" {
		t.Errorf("tolerations %v, priority class %q", pod.Tolerations, pod.PriorityClassName)
	}
	if u := d.Spec.UpdateStrategy; u.Type != appsv1.RollingUpdateDaemonSetStrategyType ||
		u.RollingUpdate.MaxUnavailable.IntValue() != 1 {
		t.Errorf("the update strategy is %v", u)
	}
	for _, v := range plugin.Env {
		if slices.Contains([]string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_PROJECT"}, v.Name) {
			t.Errorf("the node has %s, and never speaks to the rack", v.Name)
		}
	}
}

func TestTheNodeSeesKubeletsDirectoriesAndTheDevices(t *testing.T) { // D-51
	for _, c := range []struct {
		dir  string
		args []string
	}{
		{"/var/lib/kubelet", nil},
		{"/opt/kubelet", with("node.kubeletDir=/opt/kubelet")},
	} {
		pod := find[appsv1.DaemonSet](t, objects(t, c.args...), "DaemonSet", nodeName).Spec.Template.Spec
		plugin := container(t, pod, pluginName)
		for name, want := range map[string]struct{ host, at, sort string }{
			"kubelet-dir": {c.dir, c.dir, "Directory"},
			"plugin-dir":  {c.dir + "/plugins/csi.oxide.computer/", "/csi", "DirectoryOrCreate"},
			"device-dir":  {"/dev", "/dev", "Directory"},
			"state-dir":   {"/run/csi.oxide.computer", "/run/csi.oxide.computer", "DirectoryOrCreate"},
		} {
			host := volume(t, pod, name).HostPath
			mount := mountedAt(plugin, want.at)
			if host == nil || host.Path != want.host || string(*host.Type) != want.sort ||
				mount == nil || mount.Name != name {
				t.Errorf("%s is %v at %v, want %v", name, host, mount, want)
			}
		}
		if p := mountedAt(plugin, c.dir).MountPropagation; p == nil ||
			*p != corev1.MountPropagationBidirectional {
			t.Errorf("what is mounted in %s does not reach the host", c.dir)
		}
		if got := variable(t, plugin, "OXIDE_STATE_DIR").Value; got != "/run/csi.oxide.computer" {
			t.Errorf("OXIDE_STATE_DIR is %s", got)
		}
		for _, v := range pod.Volumes {
			if v.HostPath != nil && !strings.HasPrefix(v.HostPath.Path, c.dir) &&
				!slices.Contains([]string{"device-dir", "state-dir"}, v.Name) {
				t.Errorf("the node has %s of the host without a reason", v.HostPath.Path)
			}
		}
	}
}

func TestOnlyTheNodesDriverIsPrivileged(t *testing.T) { // D-52
	text := render(t, everything()...)["node.yaml"]
	pod := find[appsv1.DaemonSet](t, parse(t, text), "DaemonSet", nodeName).Spec.Template.Spec
	for _, c := range slices.Concat(pod.InitContainers, pod.Containers) {
		if c.Name == pluginName {
			if p := c.SecurityContext.Privileged; p == nil || !*p {
				t.Error("the node's driver is not privileged: it could not mount")
			}
			continue
		}
		locked(t, c)
	}
	if !pod.HostPID || pod.HostNetwork || pod.HostIPC {
		t.Errorf("hostPID %v, hostNetwork %v, hostIPC %v; want only the first", pod.HostPID,
			pod.HostNetwork, pod.HostIPC)
	}
	for _, reason := range []string{
		"# Formatting and mounting need", "# Before it releases a disk, the driver searches the mount",
	} {
		if !strings.Contains(text, reason) {
			t.Errorf("the manifest does not say why: %q is missing", reason)
		}
	}
}

func TestNothingLiesBesideTheSocket(t *testing.T) { // D-53, B-19
	pod := find[appsv1.DaemonSet](t, objects(t), "DaemonSet", nodeName).Spec.Template.Spec
	registrar := container(t, pod, "node-driver-registrar")
	const dir = "/var/lib/kubelet/plugins/csi.oxide.computer"
	if !slices.Contains(registrar.Args, "--kubelet-registration-path="+dir+"/csi.sock") {
		t.Errorf("the registrar tells kubelet another path: %q", registrar.Args)
	}
	// Registrars older than v2.9 write a file into the directory of that path.
	if !newer(t, registrar.Image, [3]int{2, 9, 0}) {
		t.Errorf("%s writes a file beside the socket; use v2.9.0 or newer", registrar.Image)
	}
	if mount := mountedAt(registrar, "/csi"); mount == nil || mount.Name != "plugin-dir" {
		t.Error("the registrar cannot reach the driver")
	}
	registration := mountedAt(registrar, "/registration")
	if registration == nil || volume(t, pod, registration.Name).HostPath.Path !=
		"/var/lib/kubelet/plugins_registry/" {
		t.Error("the registrar's socket is not where kubelet looks")
	}
	plugin := container(t, pod, pluginName)
	for _, c := range pod.Containers {
		for _, m := range c.VolumeMounts {
			if m.Name == "plugin-dir" && m.MountPath != "/csi" {
				t.Errorf("%s has the socket's directory at %s", c.Name, m.MountPath)
			}
		}
	}
	for _, v := range plugin.Env {
		if v.Name != "CSI_ENDPOINT" && strings.Contains(v.Value, "/csi/") {
			t.Errorf("%s=%s is beside the socket", v.Name, v.Value)
		}
	}
}

func TestTheInstanceIdComesByFileOrByVariable(t *testing.T) { // D-66, D-67
	for via, check := range map[string]func(corev1.Container) bool{
		"file": func(c corev1.Container) bool {
			return variable(t, c, "OXIDE_INSTANCE_METADATA_FILE").Value == "/data/config.env" &&
				mountedAt(c, "/data").Name == "oxide-instance-metadata"
		},
		"env": func(c corev1.Container) bool {
			ref := variable(t, c, "OXIDE_INSTANCE_ID").ValueFrom.FileKeyRef
			return ref != nil && ref.Path == "config.env" && ref.Key == "OXIDE_INSTANCE_ID" &&
				ref.VolumeName == "oxide-instance-metadata" && mountedAt(c, "/data") == nil
		},
	} {
		pod := find[appsv1.DaemonSet](t, objects(t, with("instanceMetadata.enabled=true",
			"instanceMetadata.via="+via)...), "DaemonSet", nodeName).Spec.Template.Spec
		init := container(t, pod, "oxide-instance-metadata")
		ref := variable(t, init, "K8S_NODE_NAME").ValueFrom.FieldRef
		if ref.FieldPath != "spec.nodeName" ||
			mountedAt(init, "/data").Name != "oxide-instance-metadata" ||
			init.Image != "oxidecomputer/oxide-k8s-instance-metadata:v0.1.0" {
			t.Errorf("the init container is %v", init)
		}
		if !check(container(t, pod, pluginName)) {
			t.Errorf("via %s, the driver does not get the id: %v", via, container(t, pod, pluginName).Env)
		}
	}
	if n := len(find[appsv1.DaemonSet](t, objects(t), "DaemonSet",
		nodeName).Spec.Template.Spec.InitContainers); n != 0 {
		t.Errorf("by default there are %d init containers; a rack's guest knows its instance", n)
	}
}
