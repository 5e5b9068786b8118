package deploy_test

import (
	"fmt"
	"maps"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
)

const (
	keeperName  = "oxide-csi-node-keeper"
	keeperImage = "oxidecomputer/oxide-node-keeper:v0.1.0"
	leaveRole   = "oxide-csi-node-leave"
)

// kept is the chart with its node keeper.
func kept(values ...string) []string { return with(append(values, "nodeKeeper.enabled=true")...) }

// keeper is the keeper's pod and its only container.
func keeper(t *testing.T, all manifests) (corev1.PodSpec, corev1.Container) {
	t.Helper()
	pod := find[appsv1.Deployment](t, all, "Deployment", keeperName).Spec.Template.Spec
	if len(pod.Containers) != 1 {
		t.Fatalf("the keeper's pod has %d containers", len(pod.Containers))
	}
	return pod, pod.Containers[0]
}

func TestThereIsNoNodeKeeperUnasked(t *testing.T) {
	for name, text := range render(t) {
		if strings.Contains(text, "keeper") && !strings.HasPrefix(text, "# The nodes' service account") {
			t.Errorf("%s has a keeper:\n%s", name, text)
		}
	}
}

func TestNoTwoKeepersShareANode(t *testing.T) {
	all := objects(t, kept()...)
	d := find[appsv1.Deployment](t, all, "Deployment", keeperName)
	labels := d.Spec.Template.Labels
	if *d.Spec.Replicas != 2 || labels["app"] != keeperName || labels[driverLabel] != driverContext ||
		d.Spec.Selector.MatchLabels["app"] != keeperName ||
		d.Spec.Strategy.RollingUpdate.MaxSurge.IntValue() != 0 {
		t.Errorf("the deployment is %v", d.Spec)
	}
	anti := d.Spec.Template.Spec.Affinity.PodAntiAffinity
	if terms := anti.RequiredDuringSchedulingIgnoredDuringExecution; len(terms) != 1 ||
		terms[0].TopologyKey != "kubernetes.io/hostname" ||
		terms[0].LabelSelector.MatchLabels["app"] != keeperName {
		t.Errorf("the anti-affinity is %v", anti)
	}
	budget := find[policyv1.PodDisruptionBudget](t, all, "PodDisruptionBudget", keeperName).Spec
	if budget.MaxUnavailable.IntValue() != 1 ||
		*budget.UnhealthyPodEvictionPolicy != policyv1.AlwaysAllow ||
		budget.Selector.MatchLabels["app"] != keeperName {
		t.Errorf("the budget is %v", budget)
	}
	without := objects(t, kept("nodeKeeper.podDisruptionBudget=false")...)
	if found := without.kinds("PodDisruptionBudget"); len(found) != 1 {
		t.Errorf("without the keeper's budget there are %v", found)
	}
}

func TestTheKeeperReachesTheRackAsTheControllerDoes(t *testing.T) {
	all := objects(t, kept("ownCA=true", "secret.existing=mine", "secret.keys.host=oxide-host")...)
	pod, c := keeper(t, all)
	controller, _ := plugins(t, all)
	for _, name := range []string{"OXIDE_HOST", "OXIDE_TOKEN", "OXIDE_TOKEN_FILE", "OXIDE_CA_FILE"} {
		if got, want := variable(t, c, name), variable(t, controller, name); got.String() !=
			want.String() {
			t.Errorf("%s is %v, the controller's is %v", name, got, want)
		}
	}
	if secret := volume(t, pod, mountedAt(c, "/etc/oxide").Name).Secret; secret.SecretName != "mine" ||
		len(secret.Items) != 2 {
		t.Errorf("the token and the certificates are of %v", secret)
	}
	for name, field := range map[string]string{"K8S_NODE_NAME": "spec.nodeName",
		"K8S_NAMESPACE": "metadata.namespace"} {
		if got := variable(t, c, name).ValueFrom.FieldRef.FieldPath; got != field {
			t.Errorf("%s is %s", name, got)
		}
	}
}

func TestTheKeeperHasNoPowerOverItsMachine(t *testing.T) {
	pod, c := keeper(t, objects(t, kept()...))
	locked(t, c)
	if s := pod.SecurityContext; !*s.RunAsNonRoot || *s.RunAsUser != 65532 || pod.HostNetwork ||
		pod.HostPID || pod.PriorityClassName != "system-cluster-critical" || c.Image != keeperImage {
		t.Errorf("the pod is %v", pod)
	}
	probe := c.LivenessProbe.HTTPGet
	if probe.Path != "/healthz" || !slices.Contains(c.Args, "--http-endpoint=:"+probe.Port.String()) {
		t.Errorf("the probe asks at %v, and the keeper has %q", probe, c.Args)
	}
}

func TestTheKeeperKnowsItsArguments(t *testing.T) {
	_, c := keeper(t, objects(t, append(kept("nodeKeeper.coldAttach.dryRun=true",
		"nodeKeeper.leavingNodes.fence=true"), "--set-string",
		"nodeKeeper.coldAttach.window=CRON_TZ=Europe/Zurich 0 2 * * 6")...))
	want := []string{"--cold-attach", "--dry-run", "--settle=30s", "--min-interval=10m",
		"--stateful-set-interval=30m", "--max-stops-per-volume=4", "--max-stops-per-node=12",
		"--window=CRON_TZ=Europe/Zurich 0 2 * * 6", "--window-length=1h",
		"--drain-timeout=5m", "--startup-taint", "--leaving-nodes", "--fence", "--http-endpoint=:9815",
		"--log-level=info", "--log-format=text"}
	if diff := cmp.Diff(want, c.Args); diff != "" {
		t.Errorf("the arguments (-want +got):\n%s", diff)
	}
	// The variables are those of a pod and of a rack where nobody is asked.
	program := filepath.Join(t.TempDir(), "oxide-node-keeper")
	if out, complaints, err := run(t, nil, "go", "build", "-o", program,
		"../cmd/oxide-node-keeper"); err != nil {
		t.Fatalf("%v\n%s%s", err, out, complaints)
	}
	for _, args := range [][]string{append(slices.Clone(c.Args), "--version"),
		{"leave", "--timeout=240s", "--help"}} {
		cmd := exec.CommandContext(t.Context(), program, args...)
		if out, complaints, err := finish(t, cmd, nil); err != nil || strings.TrimSpace(out) == "" {
			t.Errorf("the program refuses the arguments %q (%v): %s%s", args, err, out, complaints)
		}
	}
}

// The program's own tests have such windows, too.
func TestAWindowThatTheKeeperWouldRefuseIsRefused(t *testing.T) {
	rendered := func(window string) error {
		_, complaints, err := helm(t, append(kept(), values(t, fmt.Sprintf(
			"nodeKeeper: {coldAttach: {window: %q}}", window))...)...)
		if err != nil && !strings.Contains(complaints, "nodeKeeper.coldAttach.window is ") {
			t.Fatalf("%v: %s", err, complaints)
		}
		return err
	}
	for _, window := range []string{"bogus", "0 2 * *", "0 2 * * 6 2030", "60 2 * * 6", "0 24 * * *",
		"0 2 0 * *", "0 2 * 13 *", "0 2 * * 7", "@daily", "0 2 * * sat-", "0 2 * * 6;"} {
		if rendered(window) == nil {
			t.Errorf("the window %q is rendered", window)
		}
	}
	for _, window := range []string{"0 2 * * 6", "CRON_TZ=Europe/Zurich 0 2 * * 6",
		"TZ=UTC */5 0-6/2,22 1,15 jan-MAR mon-fri", "0  2 ? * SAT"} {
		if err := rendered(window); err != nil {
			t.Errorf("the window %q is refused", window)
		}
	}
}

// rights are the rules of a role, as resource: verbs.
func rights(t *testing.T, all manifests, kind, name string) map[string]string {
	t.Helper()
	found := map[string]string{}
	for _, r := range find[rbacv1.ClusterRole](t, all, kind, name).Rules {
		what := strings.Join(append(r.Resources, r.ResourceNames...), " ")
		if found[what] != "" {
			t.Errorf("%s %s has two rules of %s", kind, name, what)
		}
		found[what] = strings.Join(r.Verbs, " ")
	}
	return found
}

// Package keeper has what these rights are for: cluster.go, fence.go, taint.go, events.go, run.go.
func TestTheKeeperHasTheRightsOfItsDutiesAlone(t *testing.T) {
	const cold, taint, leaving = "nodeKeeper.coldAttach.enabled=false",
		"nodeKeeper.startupTaint.enabled=false", "nodeKeeper.leavingNodes.enabled=false"
	always := map[string]string{"nodes": "list update", "csinodes": "list",
		"volumeattachments": "list watch"}
	planned := map[string]string{"nodes": "list update patch", "pods": "list",
		"persistentvolumes": "list", "poddisruptionbudgets": "list", "events": "create"}
	done := map[string]string{"volumeattachments": "list watch patch", "pods/eviction": "create"}
	for _, c := range []struct {
		name string
		args []string
		want []map[string]string
	}{
		{"every duty", nil, []map[string]string{always, planned, done}},
		{"cold attach alone", []string{taint, leaving}, []map[string]string{always, planned, done}},
		{"a dry run", []string{taint, leaving, "nodeKeeper.coldAttach.dryRun=true"},
			[]map[string]string{always, planned}},
		{"the startup taint alone", []string{cold, leaving}, []map[string]string{always}},
		{"leaving nodes alone", []string{cold, taint}, []map[string]string{always,
			{"events": "create"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			want := map[string]string{}
			for _, m := range c.want {
				maps.Copy(want, m)
			}
			all := objects(t, kept(c.args...)...)
			if diff := cmp.Diff(want, rights(t, all, "ClusterRole", keeperName)); diff != "" {
				t.Errorf("in the cluster (-want +got):\n%s", diff)
			}
			lease := map[string]string{"leases": "create", "leases oxide-node-keeper": "get update"}
			if diff := cmp.Diff(lease, rights(t, all, "Role", keeperName)); diff != "" {
				t.Errorf("in its namespace (-want +got):\n%s", diff)
			}
		})
	}
	// Each rule says what needs it.
	lines := strings.Split(render(t, kept()...)["rbac-node-keeper.yaml"], "\n")
	for i, line := range lines {
		if strings.Contains(line, "  - apiGroups:") && strings.Contains(lines[i+1], "pods]") &&
			!strings.HasPrefix(lines[i-1], "  # ") {
			t.Errorf("%s has no reason above it", lines[i+1])
		}
	}
}

func TestANodeThatGoesKeepsItsDriver(t *testing.T) {
	all := objects(t, kept("nodeKeeper.leavingNodes.gracePeriodSeconds=300")...)
	pod := pods(t, all)[nodeName].Spec
	driver, leave := container(t, pod, pluginName), container(t, pod, "leave")
	socket := variable(t, driver, "OXIDE_LEAVE_SOCKET").Value
	dir := filepath.Dir(socket)
	if a, b := mountedAt(driver, dir), mountedAt(leave, dir); a == nil || b == nil ||
		a.Name != b.Name || volume(t, pod, a.Name).EmptyDir == nil {
		t.Errorf("%s is in %v of the driver and in %v of leave", socket, a, b)
	}
	// kubelet forgets the driver when the registrar ends, and unmounts nothing from then on.
	registrar := container(t, corev1.PodSpec{Containers: pod.InitContainers}, "node-driver-registrar")
	if p := registrar.RestartPolicy; p == nil || *p != corev1.ContainerRestartPolicyAlways {
		t.Errorf("the registrar does not outlive the driver: %v", p)
	}
	locked(t, leave)
	if leave.Image != keeperImage ||
		variable(t, leave, "K8S_NODE_NAME").ValueFrom.FieldRef.FieldPath != "spec.nodeName" {
		t.Errorf("leave is %v", leave)
	}
	// The program beside the driver ends first, then the hook, and then there is a minute left.
	if hook := driver.Lifecycle.PreStop.Exec.Command; !slices.Equal(hook, []string{
		"/oxide-csi-plugin", "prestop", "--timeout=245s"}) ||
		!slices.Equal(leave.Args, []string{"leave", "--timeout=240s"}) ||
		*pod.TerminationGracePeriodSeconds != 300 {
		t.Errorf("of %d s the hook is %q, and leave has %q", *pod.TerminationGracePeriodSeconds, hook,
			leave.Args)
	}
	want := map[string]string{"nodes": "get", "volumeattachments": "list"}
	if diff := cmp.Diff(want, rights(t, all, "ClusterRole", leaveRole)); diff != "" {
		t.Errorf("the rights of leave (-want +got):\n%s", diff)
	}
	without := objects(t, kept("nodeKeeper.leavingNodes.enabled=false")...)
	if diff := cmp.Diff(pods(t, objects(t))[nodeName], pods(t, without)[nodeName]); diff != "" {
		t.Errorf("without that duty the node's pod differs (-none +keeper):\n%s", diff)
	}
}

func TestWhatMakesANodeReadyToleratesTheStartupTaint(t *testing.T) {
	taint := corev1.Taint{Key: "csi.oxide.computer/agent-not-ready",
		Effect: corev1.TaintEffectNoSchedule}
	for _, set := range [][]string{nil, {"controller.tolerations[0].key=a",
		"node.tolerations[0].key=a", "node.tolerations[0].operator=Exists",
		"nodeKeeper.tolerations[0].key=a"}} {
		all := objects(t, kept(set...)...)
		every := maps.Clone(pods(t, all))
		if len(every) != 3 {
			t.Fatalf("there are the pods %q", slices.Sorted(maps.Keys(every)))
		}
		for name, pod := range every {
			if !slices.ContainsFunc(pod.Spec.Tolerations, func(a corev1.Toleration) bool {
				return (a.Key == taint.Key || a.Key == "") && a.Operator == corev1.TolerationOpExists &&
					(a.Effect == "" || a.Effect == taint.Effect)
			}) {
				t.Errorf("with %q %s tolerates %v", set, name, pod.Spec.Tolerations)
			}
			if n := len(pod.Spec.Tolerations); n != max(1, min(2, len(set))) {
				t.Errorf("with %q %s has %d tolerations: %v", set, name, n, pod.Spec.Tolerations)
			}
		}
	}
	for name, pod := range pods(t, objects(t, kept("nodeKeeper.startupTaint.enabled=false")...)) {
		if strings.Contains(fmt.Sprint(pod.Spec.Tolerations), taint.Key) {
			t.Errorf("without that duty %s tolerates %v", name, pod.Spec.Tolerations)
		}
	}
}
