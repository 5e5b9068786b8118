package deploy_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

// plugins are the driver's containers in controller and node.
func plugins(t *testing.T, all manifests) (controller, node corev1.Container) {
	t.Helper()
	d := find[appsv1.Deployment](t, all, "Deployment", controllerName)
	n := find[appsv1.DaemonSet](t, all, "DaemonSet", nodeName)
	return container(t, d.Spec.Template.Spec, pluginName),
		container(t, n.Spec.Template.Spec, pluginName)
}

func TestControllerAndNodesAreToldOneTopology(t *testing.T) { // D-72, D-74, E-22
	all := objects(t, with(`topology=rack=a\,zone=b`, `topologyAlso=rack=c\,zone=b`)...)
	controller, node := plugins(t, all)
	if got := variable(t, node, "OXIDE_TOPOLOGY").Value; got != "rack=a,zone=b" {
		t.Errorf("the nodes are at %q", got)
	}
	if got := variable(t, controller, "OXIDE_TOPOLOGY").Value; got != "rack=a,zone=b;rack=c,zone=b" {
		t.Errorf("the controller reaches %q", got)
	}
	role := find[rbacv1.ClusterRole](t, all, "ClusterRole", controllerName)
	if !slices.ContainsFunc(role.Rules, func(r rbacv1.PolicyRule) bool {
		return slices.Contains(r.Resources, "nodes") && slices.Equal(r.Verbs, []string{"list", "watch"})
	}) {
		t.Error("the provisioner cannot see where nodes are")
	}
	controller, node = plugins(t, objects(t))
	for _, v := range slices.Concat(controller.Env, node.Env) {
		if strings.HasPrefix(v.Name, "OXIDE_TOPOLOGY") {
			t.Errorf("without a topology there is %s", v.Name)
		}
	}
}

func TestVolumesThatStayNeedNodesThatReportTheirInstance(t *testing.T) { // D-61
	const stays = "storageClass.parameters.placement=instance"
	for _, test := range []struct {
		values    []string
		immediate bool
	}{
		{[]string{"topologyInstance=true", stays}, false},
		{[]string{"topologyInstance=true", "topology=rack=a"}, true},
	} {
		all := objects(t, with(test.values...)...)
		controller, node := plugins(t, all)
		for _, c := range []corev1.Container{controller, node} {
			if got := variable(t, c, "OXIDE_TOPOLOGY_INSTANCE").Value; got != "true" {
				t.Errorf("%q: OXIDE_TOPOLOGY_INSTANCE is %q", test.values, got)
			}
		}
		role := find[rbacv1.ClusterRole](t, all, "ClusterRole", controllerName)
		for resource, verb := range map[string]string{"nodes": "watch",
			"persistentvolumeclaims": "update"} {
			if !slices.ContainsFunc(role.Rules, func(r rbacv1.PolicyRule) bool {
				return slices.Contains(r.Resources, resource) && slices.Contains(r.Verbs, verb)
			}) {
				t.Errorf("%q: the provisioner cannot %s %s", test.values, verb, resource)
			}
		}
		args := provisionerArgs(t, all)
		if !slices.Contains(args, "--strict-topology=true") ||
			slices.Contains(args, "--immediate-topology=false") == test.immediate {
			t.Errorf("%q: the provisioner has %q", test.values, args)
		}
	}
	for _, plain := range []manifests{objects(t), objects(t, with("topology=rack=a")...)} {
		args := provisionerArgs(t, plain)
		if strings.Contains(strings.Join(args, " "), "-topology") {
			t.Errorf("without topologyInstance the provisioner has %q", args)
		}
	}
}

func provisionerArgs(t *testing.T, all manifests) []string {
	t.Helper()
	d := find[appsv1.Deployment](t, all, "Deployment", controllerName)
	return container(t, d.Spec.Template.Spec, "csi-provisioner").Args
}

func TestMetricsAreShownWhenAskedFor(t *testing.T) {
	all := objects(t, with("metrics.enabled=true", "metrics.podMonitor=true")...)
	controller, node := plugins(t, all)
	for at, c := range map[string]corev1.Container{"0.0.0.0:9809": controller, "0.0.0.0:9810": node} {
		got := variable(t, c, "OXIDE_METRICS_ADDRESS").Value
		if got != at || c.Ports[0].Name != "metrics" {
			t.Errorf("metrics are at %s, ports %v; want %s", got, c.Ports, at)
		}
	}
	monitor := all.kinds("PodMonitor")
	if len(monitor) != 1 {
		t.Fatalf("there are %d PodMonitors", len(monitor))
	}
	spec := monitor[0].Object["spec"].(map[string]any)
	port := spec["podMetricsEndpoints"].([]any)[0].(map[string]any)["port"]
	labels := spec["selector"].(map[string]any)["matchLabels"].(map[string]any)
	if port != "metrics" || labels[driverLabel] != driverContext {
		t.Errorf("the PodMonitor looks at %v", spec)
	}
	controller, node = plugins(t, objects(t))
	if len(controller.Ports)+len(node.Ports) > 0 || len(objects(t).kinds("PodMonitor")) > 0 {
		t.Error("metrics are shown without being asked for")
	}
}

func TestTheSecretIsMadeOnlyWhenAskedFor(t *testing.T) { // D-45
	if made := objects(t).kinds("Secret"); len(made) > 0 {
		t.Errorf("by default the chart makes %v", made)
	}
	secret := find[corev1.Secret](t, objects(t, with("secret.create=true", "secret.host=https://rack",
		"secret.token=hush", "secret.project=p", "ownCA=true", "secret.caBundle=PEM",
		"secret.keys.host=oxide-host")...), "Secret", "oxide-secret")
	for key, want := range map[string]string{"oxide-host": "https://rack", "token": "hush",
		"project": "p", "ca.crt": "PEM"} {
		if secret.StringData[key] != want {
			t.Errorf("the Secret's %s is %q", key, secret.StringData[key])
		}
	}
}

func TestAFurtherVariableReachesTheDriver(t *testing.T) {
	controller, node := plugins(t, objects(t, with("controller.extraEnv[0].name=HTTPS_PROXY",
		"controller.extraEnv[0].value=proxy", "node.extraEnv[0].name=GODEBUG",
		"node.extraEnv[0].value=x=1")...))
	if variable(t, controller, "HTTPS_PROXY").Value != "proxy" ||
		variable(t, node, "GODEBUG").Value != "x=1" {
		t.Errorf("the variables are %v and %v", controller.Env, node.Env)
	}
}

// notesOf are the notes that the chart shows in a namespace.
func notesOf(t *testing.T, namespace string, args ...string) string {
	t.Helper()
	// Helm shows the notes of an installation only. A template beside them shows them here.
	dir := filepath.Join(t.TempDir(), "chart")
	if err := os.CopyFS(dir, os.DirFS("chart")); err != nil {
		t.Fatal(err)
	}
	templates := filepath.Join(dir, "templates")
	err := os.Rename(filepath.Join(templates, "NOTES.txt"), filepath.Join(dir, "notes"))
	if err != nil {
		t.Fatal(err)
	}
	show := []byte("notes: |\n{{ tpl (.Files.Get \"notes\") . | indent 2 }}\n")
	if err := os.WriteFile(filepath.Join(templates, "notes.yaml"), show, 0o644); err != nil {
		t.Fatal(err)
	}
	out, complaints, err := run(t, nil, tool(t, "helm"), append([]string{"template", "oxide-csi",
		dir, "--namespace", namespace, "--kube-version", kubernetes, "--show-only",
		"templates/notes.yaml"}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, complaints)
	}
	return out
}

func TestHelmsNotesSayWhatIsLeftToDo(t *testing.T) {
	const secret, cluster = "kubectl create secret generic", "no cluster was asked"
	got := notesOf(t, "there")
	for _, want := range []string{secret + " oxide-secret --namespace there", "--from-literal=host=",
		"--from-literal=cluster-id=my-cluster\n", cluster, "If that is not there yet",
		"it is unknown whether the Secret oxide-secret has one, and which one this release had before",
		"Snapshots are off: the cluster does not have the snapshot CRDs"} {
		if !strings.Contains(got, want) {
			t.Errorf("the notes lack %q:\n%s", want, got)
		}
	}
	got = notesOf(t, "there", with("clusterId=a", "snapshots.enabled=true", "secret.create=true",
		"secret.host=https://a", "secret.token=hush", "secret.project=p")...)
	for _, not := range []string{secret, cluster, "Snapshots are off", "hush"} {
		if strings.Contains(got, not) {
			t.Errorf("the notes have %q:\n%s", not, got)
		}
	}
}

func TestHelmsNotesReadTheSecretThatIsThere(t *testing.T) {
	const create, lacks = "kubectl create secret", "WARNING: the Secret oxide-secret has no key token"
	for _, c := range []struct {
		name         string
		objects      map[string]any
		want, absent []string
	}{
		{"a Secret that is not there", nil, []string{"The Secret is not there yet", create,
			"--from-literal=cluster-id=" + systemUID + "\n"}, []string{lacks, "WARNING"}},
		{"a whole one", map[string]any{secretPath: secretWith("cluster-id")}, []string{
			"The cluster's id is that of the Secret's key cluster-id"}, []string{create, "WARNING"}},
		{"one without a token", map[string]any{secretPath: map[string]any{"apiVersion": "v1",
			"kind": "Secret", "metadata": map[string]any{"name": "oxide-secret"},
			"data": map[string]any{"host": "eA==", "project": "eA=="}}}, []string{lacks},
			[]string{create, "no key host", "no key project"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := notesOf(t, "oxide-csi", answering(t, c.objects)...)
			for _, want := range c.want {
				if !strings.Contains(got, want) {
					t.Errorf("the notes lack %q:\n%s", want, got)
				}
			}
			for _, not := range c.absent {
				if strings.Contains(got, not) {
					t.Errorf("the notes have %q:\n%s", not, got)
				}
			}
		})
	}
}

// The driver reads host, project and certificates once, and a new token without a restart.
func TestAChangedHostOfTheChartsOwnSecretReplacesThePods(t *testing.T) {
	mark := func(set ...string) string {
		t.Helper()
		all := objects(t, with(append([]string{"secret.create=true", "secret.token=a",
			"secret.project=p", "secret.host=https://a"}, set...)...)...)
		marks := pods(t, all)[controllerName].Annotations
		if len(marks) != 1 {
			t.Errorf("the controller's pods have the annotations %v", marks)
		}
		for _, value := range marks {
			return value
		}
		return ""
	}
	first := mark()
	for set, changes := range map[string]bool{"secret.host=https://b": true, "secret.project=q": true,
		"secret.token=b": false, "ownCA=true,secret.caBundle=c": true} {
		if got := mark(set); (got != first) != changes {
			t.Errorf("with %s the pods are replaced: %v, want %v", set, got != first, changes)
		}
	}
	if marks := pods(t, objects(t))[controllerName].Annotations; len(marks) > 0 {
		t.Errorf("with a Secret made elsewhere the pods have the annotations %v", marks)
	}
}
