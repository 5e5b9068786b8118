package deploy_test

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func whole(t *testing.T) []string {
	t.Helper()
	text := strings.TrimSpace(accepted(t)[theWhole])
	return strings.Split(strings.ReplaceAll("\n"+text, "\n+", "\n"), "\n")[1:]
}

// matching returns the groups of a pattern for each line that matches it, joined by spaces. The
// result is sorted and has no duplicates.
func matching(lines []string, pattern string) (found []string) {
	for _, line := range lines {
		if m := regexp.MustCompile("^" + pattern).FindStringSubmatch(line); m != nil {
			found = append(found, strings.Join(m[1:], " "))
		}
	}
	slices.Sort(found)
	return slices.Compact(found)
}

const (
	// These patterns match the path of a pod or of a container at the beginning of a line.
	aPod       = `(\S+\.template\.spec)\.`
	aContainer = `(\S+\.template\.spec\.(?:initC|c)ontainers\[[^]]+\])\.`
	// nodes is the path of the node's pod, and driver that of the only privileged container.
	nodes  = "DaemonSet/oxide-csi-node.spec.template.spec"
	driver = nodes + ".containers[oxide-plugin]"
)

func TestEachRuleOfARoleHasOneResourceAndNoWildcard(t *testing.T) { // D-54
	lines := whole(t)
	rules := matching(lines, `((?:Cluster)?Role/\S+\.rules\[\d+\])`)
	if len(rules) < 30 {
		t.Errorf("found only %d rules; does the test read them?", len(rules))
	}
	for _, rule := range rules {
		at := regexp.QuoteMeta(rule)
		resources := matching(lines, at+`\.resources\[\]: "(.+)"`)
		words := matching(lines, at+`\.(?:apiGroups|resources|verbs)\[\]: "(.*)"`)
		if len(resources) != 1 || len(matching(lines, at+`\.apiGroups\[\]: (.+)`)) != 1 ||
			slices.Contains(words, "*") || slices.Contains(resources, "secrets") {
			t.Errorf("%s has %q", rule, words)
		}
	}
}

func TestOnlyTheNodesDriverIsPrivileged(t *testing.T) { // D-52, B-31
	lines := whole(t)
	pods, containers := matching(lines, aPod), matching(lines, aContainer)
	if len(pods) != 4 || len(containers) != 13 {
		t.Errorf("there are the pods %q and the containers %q", pods, containers)
	}
	fields := func(at, field string) []string {
		return matching(lines, regexp.QuoteMeta(at)+`(\.`+field+`.*)`)
	}
	is := func(at, field string, want ...string) {
		t.Helper()
		if got := fields(at, field); !slices.Equal(got, want) {
			t.Errorf("%s has %q, want %q", at, got, want)
		}
	}
	for _, pod := range pods {
		if pod == nodes {
			is(pod, "host", ".hostPID: true")
			is(pod, "securityContext", ".securityContext.runAsGroup: 0", ".securityContext.runAsUser: 0",
				`.securityContext.seccompProfile.type: "RuntimeDefault"`)
			continue
		}
		is(pod, "host")
		is(pod, `volumes\S*hostPath`)
		is(pod, "securityContext", ".securityContext.fsGroup: 65532",
			".securityContext.runAsGroup: 65532", ".securityContext.runAsNonRoot: true",
			".securityContext.runAsUser: 65532",
			`.securityContext.seccompProfile.type: "RuntimeDefault"`)
	}
	for _, container := range containers {
		if container == driver {
			is(container, "securityContext.privileged", ".securityContext.privileged: true")
			continue
		}
		is(container, "securityContext", ".securityContext.allowPrivilegeEscalation: false",
			`.securityContext.capabilities.drop[]: "ALL"`, ".securityContext.readOnlyRootFilesystem: true")
	}
	paths := matching(lines, regexp.QuoteMeta(nodes)+`\.volumes\S+hostPath\.path: "(.+)"`)
	if !slices.Equal(paths, []string{"/dev", "/run/csi.oxide.computer", "/var/lib/kubelet",
		"/var/lib/kubelet/plugins/csi.oxide.computer/", "/var/lib/kubelet/plugins_registry/"}) {
		t.Errorf("the nodes have the host's directories %q", paths)
	}
}

// No container has both Kubernetes' token and the rack's, except the node keeper.
func TestOnlyContainersThatUseKubernetesHaveItsToken(t *testing.T) { // D-54, D-66
	lines := whole(t)
	got := matching(lines, `\S+ontainers\[(.+)\]\.volumeMounts\S+mountPath: `+
		`"/var/run/secrets/kubernetes\.io/serviceaccount"`)
	want := []string{"csi-attacher", "csi-provisioner", "csi-snapshotter", "leave", "list",
		"oxide-instance-metadata", "oxide-node-keeper"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("containers with a token (-want +got):\n%s", diff)
	}
	projected := matching(lines, `\S+volumes\[(.+)\]\.projected`)
	mounts := matching(lines, `\S+ontainers\[(.+)\]\.volumeMounts\[(?:`+strings.Join(projected, "|")+
		`)\]\.mountPath`)
	automatic := matching(lines, aPod+`automountServiceAccountToken: false`)
	if !slices.Equal(mounts, want) || !slices.Equal(automatic, matching(lines, aPod)) {
		t.Errorf("the projected %q are mounted by %q, and no token is added to %q", projected, mounts,
			automatic)
	}
}

// A sidecar that finds the driver not ready logs the driver's reason and ends, and is restarted
// less and less often. kubectl describe shows the end of the log only with this policy.
func TestEveryContainerRequestsResourcesAndReportsWhyItFailed(t *testing.T) { // B-34
	lines := whole(t)
	want := matching(lines, aContainer)
	for _, field := range []string{`resources\.requests\.cpu: .`, `resources\.requests\.memory: .`,
		`imagePullPolicy: "IfNotPresent"`, `terminationMessagePolicy: "FallbackToLogsOnError"`} {
		if diff := cmp.Diff(want, matching(lines, aContainer+field)); diff != "" {
			t.Errorf("the containers (-) and those with %s (+):\n%s", field, diff)
		}
	}
}

func TestCommonLabelsAndAnnotationsAreOnEveryObjectAndInNoSelector(t *testing.T) {
	lines := strings.Split(accepted(t)[everyPod], "\n")
	one := func(field string) []string {
		return matching(lines, `\+(\w+/[\w-]+(?:\.oxide\.computer)?)\.metadata\.`+field)
	}
	all := matching(whole(t), `(\w+/[\w-]+(?:\.oxide\.computer)?)\.metadata\.name: `)
	if diff := cmp.Diff(all, one(`labels\.team: "storage"`)); diff != "" {
		t.Errorf("the objects (-) and those with the label (+):\n%s", diff)
	}
	got := one(`annotations\.contact: "us"`)
	if diff := cmp.Diff(all, got); diff != "" {
		t.Errorf("the objects (-) and those with the annotation (+):\n%s", diff)
	}
	if wrong := matching(lines, `(-.+|\S+\.(?:s|podS|matchS)elector.+)`); len(wrong) > 0 {
		t.Errorf("they change %q", wrong)
	}
	added := matching(lines, `\+`+aContainer+`args\[\]: "--extra=true"`)
	mounts := matching(lines, `\+`+aContainer+`volumeMounts\[extra\]`)
	variables := matching(lines, `\+`+aContainer+`env\[EXTRA\]`)
	if len(added) != 10 || !slices.Equal(added, mounts) ||
		!slices.Equal(added, variables[1:]) { // the audit has the controller's variables
		t.Errorf("an argument is added to %q, a variable to %q, a mount to %q", added, variables, mounts)
	}
}

// forever contains the fields of every release that Kubernetes refuses to change in an existing
// object. Nobody can upgrade to a release that changes one: Helm and kubectl apply end with "field
// is immutable", and the object would have to be deleted first, while pods use volumes.
// podInfoOnMount and fsGroupPolicy were immutable before 1.29, which is the oldest version for the
// chart.
var forever = []string{
	`CSIDriver/csi.oxide.computer.spec.attachRequired: true`,
	`CSIDriver/csi.oxide.computer.spec.volumeLifecycleModes[]: "Persistent"`,
	`ClusterRoleBinding/oxide-csi-controller-snapshots.roleRef.name: "oxide-csi-controller-snapshots"`,
	`ClusterRoleBinding/oxide-csi-controller.roleRef.name: "oxide-csi-controller"`,
	`DaemonSet/oxide-csi-node.spec.selector.matchLabels.app.kubernetes.io/name: "oxide-csi-driver"`,
	`DaemonSet/oxide-csi-node.spec.selector.matchLabels.app: "oxide-csi-node"`,
	`Deployment/oxide-csi-controller.spec.selector.matchLabels.app.kubernetes.io/name: ` +
		`"oxide-csi-driver"`,
	`Deployment/oxide-csi-controller.spec.selector.matchLabels.app: "oxide-csi-controller"`,
	`RoleBinding/oxide-csi-controller.roleRef.name: "oxide-csi-controller"`,
	`StorageClass/oxide-disk.provisioner: "csi.oxide.computer"`,
	`StorageClass/oxide-disk.reclaimPolicy: "Delete"`,
	`StorageClass/oxide-disk.volumeBindingMode: "WaitForFirstConsumer"`,
}

func TestNoReleaseChangesAnImmutableField(t *testing.T) { // D-57
	for form, lines := range map[string][]string{
		"the plain manifests": build(t, "kustomize/snapshots").lines(), "the whole": whole(t)} {
		got := matching(lines, `(CSIDriver/\S+(?:attachRequired|volumeLifecycleModes).+|`+
			`StorageClass/\S+\.(?:provisioner|parameters|reclaimPolicy|volumeBindingMode).+|`+
			`(?:Deployment/oxide-csi-controller|DaemonSet/oxide-csi-node)\.spec\.selector.+|`+
			`(?:Cluster)?RoleBinding/oxide-csi-controller\S*\.roleRef\.name.+)`)
		if diff := cmp.Diff(forever, got); diff != "" {
			t.Errorf("%s: immutable fields (-every release, +this one):\n%s", form, diff)
		}
	}
}

func TestTheNamesOfTheObjectsCanBeChanged(t *testing.T) {
	all := objects(t, everything("fullnameOverride=blue-csi", "nameOverride=blue")...)
	known := []string{"csi.oxide.computer", "oxide-disk", "oxide-snapshot"}
	for _, o := range all {
		if !strings.HasPrefix(o.GetName(), "blue-csi-") && !slices.Contains(known, o.GetName()) {
			t.Errorf("%s keeps its name", key(o))
		}
	}
	// References to the objects have to change with the names.
	back := strings.NewReplacer("blue-csi", "oxide-csi", `kubernetes.io/name: "blue"`,
		`kubernetes.io/name: "oxide-csi-driver"`).Replace(strings.Join(all.lines(), "\n"))
	lines := strings.Split(back, "\n")
	slices.Sort(lines)
	if diff := differences(whole(t), lines); diff != "" {
		t.Errorf("more than the names has changed:\n%s", diff)
	}
}

func TestTheDriverKnowsEveryVariableInTheManifests(t *testing.T) { // B-23
	out, complaints, err := run(t, nil, program(t, "oxide-csi-plugin"), "--help")
	known := slices.Compact(slices.Sorted(slices.Values(
		regexp.MustCompile(`(?:CSI|OXIDE)_[A-Z_]+`).FindAllString(out+complaints, -1))))
	if len(known) < 15 {
		t.Fatalf("the driver's help names %d variables (%v):\n%s", len(known), err, out+complaints)
	}
	given := map[string]bool{}
	for name, text := range accepted(t) {
		for _, v := range matching(strings.Split(text, "\n"),
			`\+\S+\.containers\[oxide-plugin\]\.env\[(\w+)\]`) {
			given[v] = true
			if v != "EXTRA" && !slices.Contains(known, v) {
				t.Errorf("%s: the driver does not know %s", name, v)
			}
		}
	}
	if len(given) < 15 {
		t.Errorf("the manifests set only %q", slices.Sorted(maps.Keys(given)))
	}
}

func TestTheProgramsAcceptTheirArgumentsInTheChart(t *testing.T) {
	all := objects(t, append(kept("nodeKeeper.coldAttach.dryRun=true",
		"nodeKeeper.leavingNodes.fence=true"), "--set-string",
		"nodeKeeper.coldAttach.window=CRON_TZ=Europe/Zurich 0 2 * * 6")...)
	keeper := []string{"--cold-attach", "--dry-run", "--settle=30s", "--min-interval=10m",
		"--stateful-set-interval=30m", "--max-stops-per-volume=4", "--max-stops-per-node=12",
		"--window=CRON_TZ=Europe/Zurich 0 2 * * 6", "--window-length=1h",
		"--drain-timeout=5m", "--startup-taint", "--leaving-nodes", "--fence", "--http-endpoint=:9815",
		"--log-level=info", "--log-format=text"}
	var want []string
	for _, arg := range keeper {
		want = append(want, fmt.Sprintf("%q", arg))
	}
	slices.Sort(want)
	got := matching(all.lines(), `\S+containers\[oxide-node-keeper\]\.args\[\]: (.+)`)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the arguments (-want +got):\n%s", diff)
	}
	for _, c := range [][]string{append(append([]string{"oxide-node-keeper"}, keeper...), "--version"),
		{"oxide-node-keeper", "leave", "--timeout=240s", "--help"},
		{"oxide-csi-plugin", "audit", "--volumes=/lists/wanted.json", "--help"}} {
		out, complaints, err := run(t, nil, program(t, c[0]), c[1:]...)
		if err != nil || strings.TrimSpace(out) == "" {
			t.Errorf("%q: %v %s%s", c, err, out, complaints)
		}
	}
}
