package deploy_test

import (
	"fmt"
	"maps"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

const (
	keeperName = "oxide-csi-node-keeper"
	leaveRole  = "oxide-csi-node-leave"
)

// kept returns the arguments for the chart with its node keeper, and with further values.
func kept(values ...string) []string { return with(append(values, "nodeKeeper.enabled=true")...) }

func TestTheKeeperAcceptsTheArgumentsInTheChart(t *testing.T) {
	all := objects(t, append(kept("nodeKeeper.coldAttach.dryRun=true",
		"nodeKeeper.leavingNodes.fence=true"), "--set-string",
		"nodeKeeper.coldAttach.window=CRON_TZ=Europe/Zurich 0 2 * * 6")...)
	c := container(t, pods(t, all)[keeperName].Spec, "oxide-node-keeper")
	want := []string{"--cold-attach", "--dry-run", "--settle=30s", "--min-interval=10m",
		"--stateful-set-interval=30m", "--max-stops-per-volume=4", "--max-stops-per-node=12",
		"--window=CRON_TZ=Europe/Zurich 0 2 * * 6", "--window-length=1h",
		"--drain-timeout=5m", "--startup-taint", "--leaving-nodes", "--fence", "--http-endpoint=:9815",
		"--log-level=info", "--log-format=text"}
	if diff := cmp.Diff(want, c.Args); diff != "" {
		t.Errorf("the arguments (-want +got):\n%s", diff)
	}
	// Set the variables of a pod, and a rack that is never contacted.
	program := program(t, "oxide-node-keeper")
	for _, args := range [][]string{append(slices.Clone(c.Args), "--version"),
		{"leave", "--timeout=240s", "--help"}} {
		cmd := exec.CommandContext(t.Context(), program, args...)
		if out, complaints, err := finish(t, cmd, nil); err != nil || strings.TrimSpace(out) == "" {
			t.Errorf("the program refuses the arguments %q (%v): %s%s", args, err, out, complaints)
		}
	}
}

// The tests of the program have the same windows.
func TestAWindowThatTheKeeperWouldRefuseIsRefused(t *testing.T) {
	rendered := func(window string) error {
		_, complaints, err := helm(t, append(kept(), values(t, fmt.Sprintf(
			"nodeKeeper: {coldAttach: {window: %q}}", window))...)...)
		if err != nil && !strings.Contains(complaints, "nodeKeeper.coldAttach.window is ") {
			t.Fatalf("%v: %s", err, complaints)
		}
		return err
	}
	for _, window := range short.Some(t, 3, []string{"bogus", "0 2 * *", "0 2 * * 6 2030",
		"60 2 * * 6", "0 24 * * *", "0 2 0 * *", "0 2 * 13 *", "0 2 * * 7", "@daily", "0 2 * * sat-",
		"0 2 * * 6;"}) {
		if rendered(window) == nil {
			t.Errorf("the window %q is rendered", window)
		}
	}
	for _, window := range short.Some(t, 1, []string{"0 2 * * 6", "CRON_TZ=Europe/Zurich 0 2 * * 6",
		"TZ=UTC */5 0-6/2,22 1,15 jan-MAR mon-fri", "0  2 ? * SAT"}) {
		if err := rendered(window); err != nil {
			t.Errorf("the window %q is refused", window)
		}
	}
}

// rights returns the rules of a role, as resource: verbs.
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

// The files cluster.go, record.go, fence.go, events.go and run.go of package keeper use these
// rights.
func TestTheKeeperHasOnlyTheRightsOfItsDuties(t *testing.T) {
	const cold, taint, leaving = "nodeKeeper.coldAttach.enabled=false",
		"nodeKeeper.startupTaint.enabled=false", "nodeKeeper.leavingNodes.enabled=false"
	always := map[string]string{"nodes": "list update", "csinodes": "list",
		"volumeattachments": "list watch"}
	planned := map[string]string{"nodes": "list update patch", "pods": "list",
		"persistentvolumes": "list", "persistentvolumeclaims": "list", "poddisruptionbudgets": "list",
		"events": "create"}
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
			lease := map[string]string{"leases": "create", "leases oxide-node-keeper": "get update",
				"configmaps": "create", "configmaps oxide-node-keeper": "get update"}
			if diff := cmp.Diff(lease, rights(t, all, "Role", keeperName)); diff != "" {
				t.Errorf("in its namespace (-want +got):\n%s", diff)
			}
		})
	}
	// Each rule has a comment that names what needs it.
	lines := strings.Split(render(t, kept()...)["rbac-node-keeper.yaml"], "\n")
	for i, line := range lines {
		if strings.Contains(line, "  - apiGroups:") && strings.Contains(lines[i+1], "pods]") &&
			!strings.HasPrefix(lines[i-1], "  # ") {
			t.Errorf("%s has no reason above it", lines[i+1])
		}
	}
}

func TestTheLeaverMayReadOnlyNodesAndVolumeAttachments(t *testing.T) {
	want := map[string]string{"nodes": "get", "volumeattachments": "list"}
	if diff := cmp.Diff(want, rights(t, objects(t, kept()...), "ClusterRole", leaveRole)); diff != "" {
		t.Errorf("the rights of leave (-want +got):\n%s", diff)
	}
	without := objects(t, kept("nodeKeeper.leavingNodes.enabled=false")...)
	if diff := cmp.Diff(pods(t, objects(t))[nodeName], pods(t, without)[nodeName]); diff != "" {
		t.Errorf("without that duty the node's pod differs (-none +keeper):\n%s", diff)
	}
}

func TestPodsThatMakeANodeReadyTolerateTheStartupTaint(t *testing.T) {
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
