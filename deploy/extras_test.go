package deploy_test

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// extras contains the values that add something to every pod and container.
const extras = `
commonLabels: {team: storage}
commonAnnotations: {team: storage, contact: us}
controller: &pod
  annotations: {team: pods}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
    {matchExpressions: [{key: pool, operator: In, values: [system]}]}]}}}
  podLabels: {team: pods, tier: csi}
  serviceAccountAnnotations: {role: it}
  extraVolumes: [{name: extra, emptyDir: {}}]
  extraContainers: [{name: beside, image: beside:v1}]
  extraInitContainers: [{name: before, image: before:v1}]
  extraArgs: &args [--extra=true]
  extraEnv: &env [{name: EXTRA, value: "true"}]
  extraVolumeMounts: &mounts [{name: extra, mountPath: /extra}]
node: *pod
provisioner: &sidecar
  extraArgs: *args
  extraEnv: *env
  extraVolumeMounts: *mounts
attacher: *sidecar
snapshotter: *sidecar
registrar: *sidecar
livenessProbe: *sidecar
instanceMetadata: *sidecar
nodeKeeper:
  annotations: {team: pods}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
    {matchExpressions: [{key: pool, operator: In, values: [system]}]}]}}}
  podLabels: {team: pods, tier: csi}
  serviceAccountAnnotations: {role: it}
  extraVolumes: [{name: extra, emptyDir: {}}]
  extraArgs: *args
  extraEnv: *env
  extraVolumeMounts: *mounts
`

// pods returns the pod templates of controller and node, and those of node keeper and audit if they
// exist.
func pods(t *testing.T, all manifests) map[string]corev1.PodTemplateSpec {
	t.Helper()
	found := map[string]corev1.PodTemplateSpec{
		nodeName: find[appsv1.DaemonSet](t, all, "DaemonSet", nodeName).Spec.Template,
	}
	for _, d := range all.kinds("Deployment") {
		found[d.GetName()] = find[appsv1.Deployment](t, all, "Deployment", d.GetName()).Spec.Template
	}
	for _, j := range all.kinds("CronJob") {
		found[j.GetName()] = find[batchv1.CronJob](t, all, "CronJob",
			j.GetName()).Spec.JobTemplate.Spec.Template
	}
	return found
}

// containers returns all containers of a pod, including its init containers.
func containers(pod corev1.PodSpec) []corev1.Container {
	return slices.Concat(pod.InitContainers, pod.Containers)
}

func TestArgumentsVariablesAndMountsCanBeAddedToEveryContainer(t *testing.T) {
	all := objects(t, append(everything(), values(t, extras)...)...)
	ours := 0
	for name, pod := range pods(t, all) {
		var names []string
		for _, c := range containers(pod.Spec) {
			names = append(names, c.Name)
			if c.Name == "beside" || c.Name == "before" || c.Name == "leave" {
				continue // the container leave has no such values
			}
			ours++
			mount := mountedAt(c, "/extra")
			if !slices.Contains(c.Args, "--extra=true") || variable(t, c, "EXTRA").Value != "true" ||
				mount == nil || mount.Name != "extra" {
				t.Errorf("%s of %s lacks an argument, a variable or a mount: %v", c.Name, name, c)
			}
		}
		if name == keeperName {
			names = append(names, "beside", "before") // nothing can be added to these
		}
		if !slices.Contains(names, "beside") || !slices.Contains(names, "before") {
			t.Errorf("%s has the containers %q", name, names)
		}
		if volume(t, pod.Spec, "extra").EmptyDir == nil || pod.Spec.Affinity.NodeAffinity == nil {
			t.Errorf("%s lacks the volume or the affinity: %v", name, pod.Spec)
		}
		account := find[corev1.ServiceAccount](t, all, "ServiceAccount", name)
		if account.Annotations["role"] != "it" {
			t.Errorf("the service account %s has the annotations %v", name, account.Annotations)
		}
	}
	if ours != 10 {
		t.Errorf("there are %d containers of the chart's own, want 10", ours)
	}
	anti := pods(t, all)[controllerName].Spec.Affinity.PodAntiAffinity
	if anti == nil || len(anti.PreferredDuringSchedulingIgnoredDuringExecution) != 1 {
		t.Errorf("beside a node affinity the controller's anti-affinity is %v", anti)
	}
}

func TestCommonLabelsAndAnnotationsAreOnEveryObjectAndInNoSelector(t *testing.T) {
	all := objects(t, append(everything(), values(t, extras)...)...)
	plain := objects(t, everything()...).byKey(t)
	for _, o := range all {
		if o.GetLabels()["team"] != "storage" || o.GetLabels()[driverLabel] != driverContext {
			t.Errorf("%s has the labels %v", key(o), o.GetLabels())
		}
		team := "storage"
		if o.GetKind() == "Deployment" || o.GetKind() == "DaemonSet" {
			team = "pods" // their own annotations win
		}
		if a := o.GetAnnotations(); a["team"] != team || a["contact"] != "us" {
			t.Errorf("%s has the annotations %v", key(o), a)
		}
		if diff := cmp.Diff(selectors(plain[key(o)]), selectors(o.Object)); diff != "" {
			t.Errorf("the selector of %s changed:\n%s", key(o), diff)
		}
	}
	for name, pod := range pods(t, all) {
		if pod.Labels["team"] != "pods" || pod.Labels["tier"] != "csi" || pod.Labels["app"] != name {
			t.Errorf("the pods of %s have the labels %v", name, pod.Labels)
		}
	}
}

// selectors returns the labels by which an object selects pods.
func selectors(object map[string]any) any {
	spec, _ := object["spec"].(map[string]any)
	return spec["selector"]
}

func TestTheNamesOfTheObjectsCanBeChanged(t *testing.T) {
	all := objects(t, append(everything(), with("fullnameOverride=blue-csi", "nameOverride=blue",
		"metrics.podMonitor=true")...)...)
	d := find[appsv1.Deployment](t, all, "Deployment", "blue-csi-controller")
	n := find[appsv1.DaemonSet](t, all, "DaemonSet", "blue-csi-node")
	for _, labels := range []map[string]string{d.Spec.Selector.MatchLabels, d.Spec.Template.Labels,
		n.Spec.Selector.MatchLabels, n.Spec.Template.Labels} {
		if labels[driverLabel] != "blue" {
			t.Errorf("pods have, or are selected by, the labels %v", labels)
		}
	}
	k := find[appsv1.Deployment](t, all, "Deployment", "blue-csi-node-keeper")
	accounts := []string{d.Spec.Template.Spec.ServiceAccountName,
		n.Spec.Template.Spec.ServiceAccountName, k.Spec.Template.Spec.ServiceAccountName}
	for _, account := range accounts {
		find[corev1.ServiceAccount](t, all, "ServiceAccount", account)
	}
	roles := 0
	for _, kind := range []string{"ClusterRoleBinding", "RoleBinding"} {
		for _, o := range all.kinds(kind) {
			roles++
			b := find[rbacv1.ClusterRoleBinding](t, manifests{o}, kind, o.GetName())
			find[rbacv1.ClusterRole](t, all, b.RoleRef.Kind, b.RoleRef.Name)
			if !slices.Contains(accounts, b.Subjects[0].Name) {
				t.Errorf("%s is for %s, and the pods run as %q", o.GetName(), b.Subjects[0].Name, accounts)
			}
		}
	}
	if roles != 7 {
		t.Errorf("there are %d bindings, want 7", roles)
	}
	known := []string{"csi.oxide.computer", "oxide-disk", "oxide-snapshot"}
	for _, o := range all {
		if !strings.HasPrefix(o.GetName(), "blue-csi-") && !slices.Contains(known, o.GetName()) {
			t.Errorf("%s keeps its name", key(o))
		}
	}
}

func TestEveryContainersResourcesCanBeSetOrLeftOut(t *testing.T) {
	names := map[string]string{"controller": controllerName, "node": nodeName,
		"provisioner": "csi-provisioner", "attacher": "csi-attacher", "snapshotter": "csi-snapshotter",
		"registrar": "node-driver-registrar", "livenessProbe": "liveness-probe",
		"instanceMetadata": "oxide-instance-metadata", "nodeKeeper": "oxide-node-keeper",
		"leave": "leave"}
	schemas := allSchemas(t)
	for _, c := range []struct {
		value string
		want  func(corev1.ResourceRequirements) bool
	}{
		{"null", func(r corev1.ResourceRequirements) bool { return r.Requests == nil }},
		{"{requests: null}", func(r corev1.ResourceRequirements) bool { return r.Requests == nil }},
		{"{requests: {memory: null}}", func(r corev1.ResourceRequirements) bool {
			return r.Requests.Memory().IsZero() && !r.Requests.Cpu().IsZero()
		}},
		{"{requests: {cpu: 1}, limits: {memory: 1Gi}}", func(r corev1.ResourceRequirements) bool {
			return r.Requests.Cpu().Value() == 1 && r.Limits.Memory().Value() == 1<<30
		}},
	} {
		var text strings.Builder
		for name := range names {
			fmt.Fprintf(&text, "  %s: %s\n", name, c.value)
		}
		all := objects(t, append(everything(), values(t, "resources:\n"+text.String())...)...)
		for name, pod := range pods(t, all) {
			for _, container := range containers(pod.Spec) {
				if !c.want(container.Resources) {
					t.Errorf("with %s, %s of %s has %v", c.value, container.Name, name, container.Resources)
				}
			}
		}
		if out, ok := conforms(t, schemas, all); !ok {
			t.Errorf("with %s: %s", c.value, out)
		}
	}
}

func TestTheSidecarsCanServeTheirMetricsToo(t *testing.T) {
	all := objects(t, append(everything(), with("metrics.podMonitor=true", "metrics.attacherPort=9999",
		"metrics.podMonitorLabels.release=prometheus")...)...)
	want := map[string]int32{"metrics": 9809, "provisioner": 9812, "attacher": 9999,
		"snapshotter": 9814}
	got := map[string]int32{}
	for _, c := range pods(t, all)[controllerName].Spec.Containers {
		for _, p := range c.Ports {
			got[p.Name] = p.ContainerPort
			if flag := fmt.Sprintf("--http-endpoint=:%d", p.ContainerPort); c.Name != pluginName &&
				!slices.Contains(c.Args, flag) {
				t.Errorf("%s has the port %d and not %s: %q", c.Name, p.ContainerPort, flag, c.Args)
			}
		}
	}
	if !maps.Equal(got, want) {
		t.Errorf("the controller's ports are %v, want %v", got, want)
	}
	monitor := all.kinds("PodMonitor")[0]
	var scraped []string
	spec := monitor.Object["spec"].(map[string]any)
	for _, endpoint := range spec["podMetricsEndpoints"].([]any) {
		scraped = append(scraped, endpoint.(map[string]any)["port"].(string))
	}
	slices.Sort(scraped)
	if !slices.Equal(scraped, slices.Sorted(maps.Keys(want))) {
		t.Errorf("the PodMonitor reads the ports %q, want those of %v", scraped, want)
	}
	if labels := monitor.GetLabels(); labels["release"] != "prometheus" ||
		labels[driverLabel] != driverContext {
		t.Errorf("the PodMonitor has the labels %v", labels)
	}
}

// The ports that kubelet probes need no rule, because a policy never blocks the pod's own node.
func TestEveryPortOfMetricsIsInThePolicy(t *testing.T) {
	all := objects(t, append(everything(), policed()...)...)
	for name, pod := range pods(t, all) {
		ingress := find[networkingv1.NetworkPolicy](t, all, "NetworkPolicy", name).Spec.Ingress
		var open []int32
		for _, port := range ingress[0].Ports {
			open = append(open, port.Port.IntVal)
		}
		for _, c := range pod.Spec.Containers {
			for _, p := range c.Ports {
				if !slices.Contains(open, p.ContainerPort) || p.Protocol != corev1.Protocol("") {
					t.Errorf("%s of %s has the port %v, open are %v", c.Name, name, p, open)
				}
			}
		}
	}
}
