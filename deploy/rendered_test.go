package deploy_test

import (
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// extras is the beginning of a JSON object, which everywhere() completes.
const extras = `{"commonLabels": {"team": "storage"},
	"commonAnnotations": {"team": "storage", "contact": "us"}`

// beside() returns JSON that gives each Helm value in names an argument, a variable and a mount.
// The parameter more is the text of further fields of each value.
func beside(names, more string) string {
	var text strings.Builder
	for name := range strings.FieldsSeq(names) {
		text.WriteString(`, "` + name + `": {"extraArgs": ["--extra=true"],
			"extraEnv": [{"name": "EXTRA", "value": "true"}],
			"extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}]` + more + `}`)
	}
	return text.String()
}

// everywhere() returns Helm arguments that add labels, variables, mounts and more to every object.
func everywhere(t *testing.T) []string {
	t.Helper()
	const pod = `, "extraVolumes": [{"name": "extra", "emptyDir": {}}], 
		"annotations": {"team": "pods"},
		"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
		{"nodeSelectorTerms": [{"matchExpressions": [{"key": "pool", "operator": "Exists"}]}]}}},
		"podLabels": {"team": "pods", "tier": "csi"}, "serviceAccountAnnotations": {"role": "it"}`
	return values(t, extras+beside("controller node", pod+`,
		"extraContainers": [{"name": "beside", "image": "beside:v1"}],
		"extraInitContainers": [{"name": "before", "image": "before:v1"}]`)+
		beside("nodeKeeper", pod+`, "enabled": true`)+
		beside("provisioner attacher snapshotter registrar livenessProbe", "")+
		beside("instanceMetadata", `, "enabled": true`)+"}")
}

// everything() returns Helm arguments for every feature of the chart except its own Secret.
func everything(more ...string) []string {
	return with(append([]string{"snapshots.enabled=true", "instanceMetadata.enabled=true",
		"nodeKeeper.enabled=true", "metrics.enabled=true", "metrics.podMonitor=true", "ownCA=true",
		"topology=rack=a", "audit.enabled=true", "audit.kubectlImage.repository=mine/kubectl",
		"audit.kubectlImage.tag=v1.35.4", "audit.extraArgs[0]=--output=json",
		"networkPolicy.enabled=true", "networkPolicy.rack.port=8443",
		"networkPolicy.rack.cidrs={192.0.2.10/32,2001:db8::/64}",
		"networkPolicy.apiServer.cidrs={198.51.100.0/24}"}, more...)...)
}

func kept(more ...string) []string { return with(append(more, "nodeKeeper.enabled=true")...) }

func on(version string, more ...string) []string {
	return append(with(more...), "--kube-version", version)
}

const (
	everyPod = "arguments, variables, mounts, labels and annotations can be added"
	theWhole = "with everything there are these fields (B-34, D-45, D-54, D-63, D-66, E-31)"
)

// change compares two renderings of the chart. Each of from and to contains either Helm's
// arguments, or "kustomize DIR..." for plain manifests, or "nothing" for no objects.
type change struct {
	name     string
	from, to []string
}

// changes() lists the comparisons. For each comparison, testdata/rendered.txt contains the expected
// differences. `make manifests` writes this file.
func changes(t *testing.T) []change {
	crds := []string{"--api-versions", "snapshot.storage.k8s.io/v1"}
	return []change{
		{theWhole, []string{"nothing"}, everything()},
		{"the suite installs what users install", []string{"kustomize", "snapshots",
			"snapshot-controller", "simulator"}, []string{"kustomize", "e2e"}},
		{everyPod, everything(), append(everything(), everywhere(t)...)},
		{"the controller's replicas need different nodes on request (D-41)", nil,
			with("controller.antiAffinity=required")},
		{"the controller's replicas may share a node on request", nil,
			with("controller.antiAffinity=none")},
		{"kubelet's directories can be anywhere (D-51)", nil, with("node.kubeletDir=/opt/kubelet")},
		{"the instance's id comes by file (D-67)", nil, with("instanceMetadata.enabled=true")},
		{"the instance's id comes by variable (D-67)", with("instanceMetadata.enabled=true"),
			with("instanceMetadata.enabled=true", "instanceMetadata.via=env")},
		{"Kubernetes 1.32 gets no field that it refuses (B-47)", nil, on("1.32.0")},
		{"the scheduler of Kubernetes 1.37 waits for the driver", nil, on("1.37.0")},
		{"the fields of the CSIDriver can be switched off", on("1.37.0"), on("1.37.0",
			"csiDriver.seLinuxMount=false", "csiDriver.preventPodSchedulingIfMissing=false")},
		{"a sidecar without the gate of group snapshots does not get it", everything(),
			everything("snapshotter.featureGates=null")},
		{"the snapshotter's gates are the user's", everything(),
			everything("snapshotter.featureGates.ReleaseLeaderElectionOnExit=true")},
		{"a storage class has the user's labels and topologies", with("topology=rack=a"),
			append(with("topology=rack=a"), "--set-json", `storageClass={"labels": {"tier": "fast"},
			"allowedTopologies": [{"matchLabelExpressions": [{"key": "topology.csi.oxide.computer/rack",
			"values": ["a"]}]}]}`)},
		{"there can be further storage classes", nil, with("extraStorageClasses[0].name=oxide-xfs",
			"extraStorageClasses[0].parameters.blockSize=512", "extraStorageClasses[0].default=true")},
		{"snapshot classes have the user's labels, such as Velero's", with("snapshots.enabled=true"),
			[]string{"--set-json", `snapshots={"enabled": true, "class": {"labels": {"a": "b"},
			"annotations": {"c": "d"}, "parameters": {"csi.storage.k8s.io/snapshotter-secret-name": "s"}},
			"classes": [{"name": "velero", "default": true, "deletionPolicy": "Retain",
			"labels": {"velero.io/csi-volumesnapshot-class": "true"}}]}`}},
		{"the snapshotter is on if the cluster has its CRDs", with("snapshots.enabled=true"), crds},
		{"the snapshotter is off if the cluster lacks its CRDs", with("snapshots.enabled=false"), nil},
		{"the snapshotter can be off although the cluster has its CRDs",
			with("snapshots.enabled=false"), append(with("snapshots.enabled=false"), crds...)},
		{"further snapshot classes can do without the first", with("snapshots.enabled=true"),
			with("snapshots.enabled=true", "snapshots.class.create=false",
				"snapshots.classes[0].name=mine")},
		{"accounts can be the user's own", everything(), everything("serviceAccount.create=false",
			"controller.serviceAccountName=c", "node.serviceAccountName=n",
			"nodeKeeper.serviceAccountName=k", "audit.serviceAccountName=a")},
		{"roles can be the user's own", everything(), everything("rbac.create=false")},
		{"the chart's accounts and bindings have the user's names", nil,
			with("controller.serviceAccountName=c", "controller.serviceAccountAnnotations.a=b")},
		{"the controller can use the node's network and other name servers",
			with("controller.antiAffinity=required"), []string{"--set-json", `controller={
			"hostNetwork": true, "antiAffinity": "required", "dnsPolicy": "None", "dnsConfig": {
			"nameservers": ["192.0.2.53"], "options": [{"name": "ndots", "value": "1"}]}}`}},
		{"helm test runs a pod of the user's image, and its volume goes with the pod", nil,
			with("test.enabled=true", "test.image.repository=mine", "test.image.tag=v1",
				"resources.test.requests.cpu=1", "storageClass.name=fast")},
		{"helm test uses the user's storage class", nil, with("test.enabled=true",
			"test.image.repository=mine", "test.image.digest=sha256:"+strings.Repeat("0", 64),
			"test.storageClassName=slow")},
		{"controller and nodes get one topology (D-72, D-74, E-22)", nil,
			with(`topology=rack=a\,zone=b`, `topologyAlso=rack=c\,zone=b`)},
		{"volumes that stay need nodes that report their instance (D-61)", nil,
			with("topologyInstance=true", "storageClass.parameters.placement=instance")},
		{"volumes that move are created at once beside nodes that report their instance (D-61)",
			with("topologyInstance=true"), with("topologyInstance=true", "topology=rack=a")},
		{"metrics have ports of controller, node and sidecars, and a PodMonitor", nil, with(
			"snapshots.enabled=true", "metrics.enabled=true", "metrics.podMonitor=true",
			"metrics.podMonitorInterval=30s", "metrics.podMonitorRelabelings[0].targetLabel=rack",
			"metrics.podMonitorRelabelings[0].replacement=a", "metrics.attacherPort=9999",
			"metrics.podMonitorLabels.release=prometheus")},
		{"the Secret is made on request, with the user's keys (D-45)", nil, with("secret.create=true",
			"secret.host=https://rack", "secret.token=hush", "secret.project=p", "ownCA=true",
			"secret.caBundle=PEM", "secret.keys.host=oxide-host")},
		{"every program reads the user's Secret (D-45, E-31)", everything(), everything(
			"secret.existing=mine", "secret.keys.host=oxide-host", "secret.keys.token=oxide-token",
			"secret.keys.project=oxide-project")},
		{"every image can be pulled with a Secret", everything(),
			everything("imagePullSecrets[0].name=pull", "imagePullPolicy=Never")},
		{"every image can come from a mirror (D-40)", everything(),
			everything("imageRegistry=mirror.example.com/oxide/")},
		{"every image can come from anywhere (D-40)", everything(), everything(images("%.registry=other",
			"%.repository=x/y", "%.tag=v9")...)},
		{"every image can be pinned by its digest (D-40)", everything(),
			everything(images("%.digest=sha256:" + strings.Repeat("a", 64))...)},
		{"strategies and spreading are the user's", nil, []string{"--set-json", `controller={
			"updateStrategy": {"type": "Recreate"}, "priorityClassName": "", "topologySpreadConstraints": [
			{"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "DoNotSchedule"},
			{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway",
			"labelSelector": {"matchLabels": {"mine": "true"}}}]}`, "--set-json",
			`node={"updateStrategy": {"type": "OnDelete"}, "priorityClassName": ""}`}},
		{"no container needs to ask for resources", everything(),
			append(everything(), resources(t, "null")...)},
		{"no container needs to ask for memory", everything(),
			append(everything(), resources(t, "{requests: {memory: null}}")...)},
		{"every container has the user's resources", everything(),
			append(everything(), resources(t, "{requests: {cpu: 1}, limits: {memory: 1Gi}}")...)},
		{"the node keeper's budget can be left out", kept(),
			kept("nodeKeeper.podDisruptionBudget=false")},
		// On a node that shuts down, kubelet can unmount only while the registrar runs. So the grace
		// period has to be 60 s longer than "leave" may take, and 55 s longer than preStop may take.
		{"a node that is shut down keeps its driver until it has left", kept(),
			kept("nodeKeeper.leavingNodes.gracePeriodSeconds=300")},
		{"cold attach needs no other duty", kept(), kept("nodeKeeper.startupTaint.enabled=false",
			"nodeKeeper.leavingNodes.enabled=false")},
		{"a dry run of the node keeper may change no pod", kept(),
			kept("nodeKeeper.coldAttach.dryRun=true")},
		{"the startup taint alone needs few rights, and no change of the nodes' pods", nil, kept(
			"nodeKeeper.coldAttach.enabled=false", "nodeKeeper.leavingNodes.enabled=false")},
		{"the duty for leaving nodes alone needs few rights", kept(), kept(
			"nodeKeeper.coldAttach.enabled=false", "nodeKeeper.startupTaint.enabled=false")},
		{"pods that make a node ready tolerate the startup taint beside the user's tolerations", kept(),
			kept("controller.tolerations[0].key=a", "node.tolerations[0].key=a",
				"node.tolerations[0].operator=Exists", "nodeKeeper.tolerations[0].key=a")},
		{"without metrics the network policy allows no incoming connection", everything(),
			everything("metrics.enabled=false", "metrics.podMonitor=false")},
		{"a node that needs no Kubernetes may open no connection", everything(),
			everything("instanceMetadata.enabled=false", "nodeKeeper.enabled=false")},
		{"only the named pods can read metrics", everything(),
			everything("networkPolicy.metricsFrom[0].podSelector.matchLabels.a=b")},
	}
}

// images() returns each setting for every image, with % replaced by the path of its Helm value.
func images(settings ...string) (all []string) {
	for _, image := range []string{"image", "nodeImage", "instanceMetadata.image", "nodeKeeper.image",
		"provisioner.image", "attacher.image", "snapshotter.image", "registrar.image",
		"livenessProbe.image"} {
		for _, setting := range settings {
			all = append(all, strings.ReplaceAll(setting, "%", image))
		}
	}
	return all
}

func resources(t *testing.T, value string) []string {
	t.Helper()
	text := "resources:\n"
	for _, name := range []string{"controller", "node", "provisioner", "attacher", "snapshotter",
		"registrar", "livenessProbe", "instanceMetadata", "nodeKeeper", "leave"} {
		text += "  " + name + ": " + value + "\n"
	}
	return values(t, text)
}

const golden = "testdata/rendered.txt"

// accepted() returns the sections of the golden file by name.
func accepted(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile(golden)
	must(t, err)
	all := map[string]string{}
	for section := range strings.SplitSeq(string(text), "\n## ") {
		name, fields, _ := strings.Cut(section, "\n")
		all[name] = fields
	}
	return all
}

func TestTheChartRendersTheFieldsInTheGoldenFile(t *testing.T) { // D-43
	objectsOf := func(t *testing.T, args []string) manifests {
		switch {
		case len(args) == 1:
			return nil
		case len(args) > 0 && args[0] == "kustomize":
			var all manifests
			for _, dir := range args[1:] {
				all = append(all, build(t, "kustomize/"+dir, nil)...)
			}
			return all
		}
		return objects(t, args...)
	}
	text, want, every := renderedHead, map[string]string{}, changes(t)
	if !*update {
		want = accepted(t)
	}
	examples, err := filepath.Glob("examples/*.yaml")
	if err != nil || len(examples) == 0 {
		t.Fatalf("found no examples: %v", err)
	}
	all := build(t, "kustomize/e2e", nil) // for kubeconform, to which an unknown field is an error
	for _, file := range examples {
		all = append(all, parse(t, string(readFile(t, file)))...)
	}
	for _, c := range short.Some(t, 20, every) {
		t.Run(c.name, func(t *testing.T) {
			to := objectsOf(t, c.to)
			for _, o := range to { // allSchemas() lacks PodMonitor and other versions' fields
				if o.GetKind() != "PodMonitor" && !slices.Contains(c.to, "--kube-version") {
					all = append(all, o)
				}
			}
			got := differences(objectsOf(t, c.from).lines(), to.lines())
			text += "\n## " + c.name + "\n" + got
			if diff := cmp.Diff(strings.TrimSpace(want[c.name]), strings.TrimSpace(got)); diff != "" &&
				!*update {
				t.Errorf("it is not as in %s (-file +chart); run `make manifests`:\n%s", golden, diff)
			}
		})
	}
	if *update {
		must(t, os.WriteFile(golden, []byte(text), 0o644))
	} else if len(want)-1 != len(every) { // accepted() also returns the file's head
		t.Errorf("%s has %d sections, want %d; run `make manifests`", golden, len(want)-1, len(every))
	}
	if out, ok := conforms(t, allSchemas(t), all); !ok {
		t.Error(out)
	}
}

func whole(t *testing.T) []string {
	t.Helper()
	text := strings.TrimSpace(accepted(t)[theWhole])
	return strings.Split(strings.ReplaceAll("\n"+text, "\n+", "\n"), "\n")[1:]
}

// matching() returns the texts of the pattern's groups, joined by spaces, for each line that begins
// with the pattern. It sorts the results and drops duplicates.
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
	// These patterns match the path of a pod, or of a container, at the beginning of a line.
	aPod       = `(\S+\.template\.spec)\.`
	aContainer = `(\S+\.template\.spec\.(?:initC|c)ontainers\[[^]]+\])\.`
	nodes      = "DaemonSet/oxide-csi-node.spec.template.spec"
	driver     = nodes + ".containers[oxide-plugin]"
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

func TestOnlyTheNodeDriverIsPrivileged(t *testing.T) { // D-52, B-31
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
			".securityContext.runAsUser: 65532", `.securityContext.seccompProfile.type: "RuntimeDefault"`)
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

// Only the node keeper's container has both a Kubernetes token and a token of the rack.
func TestOnlyContainersThatCallTheKubernetesAPIHaveItsToken(t *testing.T) { // D-54, D-66
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
		!slices.Equal(added, variables[1:]) { // variables[0] is in the audit's container
		t.Errorf("an argument is added to %q, a variable to %q, a mount to %q", added, variables, mounts)
	}
}

// forever contains the fields that Kubernetes refuses to change in an existing object, with the
// values that every release has to render. A changed value makes `helm upgrade` and `kubectl apply`
// fail with "field is immutable". The user then has to delete the object while pods use volumes.
// The list omits podInfoOnMount and fsGroupPolicy, which are mutable since Kubernetes 1.29.
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
		"the plain manifests": build(t, "kustomize/snapshots", nil).lines(), "the whole": whole(t)} {
		got := matching(lines, `(CSIDriver/\S+(?:attachRequired|volumeLifecycleModes).+|`+
			`StorageClass/\S+\.(?:provisioner|parameters|reclaimPolicy|volumeBindingMode).+|`+
			`(?:Deployment/oxide-csi-controller|DaemonSet/oxide-csi-node)\.spec\.selector.+|`+
			`(?:Cluster)?RoleBinding/oxide-csi-controller\S*\.roleRef\.name.+)`)
		if diff := cmp.Diff(forever, got); diff != "" {
			t.Errorf("%s: immutable fields (-every release, +this one):\n%s", form, diff)
		}
	}
}

func TestNameOverridesApplyToNamesAndReferencesOnly(t *testing.T) {
	all := objects(t, everything("fullnameOverride=blue-csi", "nameOverride=blue")...)
	known := []string{"csi.oxide.computer", "oxide-disk", "oxide-snapshot"}
	for _, o := range all {
		if !strings.HasPrefix(o.GetName(), "blue-csi-") && !slices.Contains(known, o.GetName()) {
			t.Errorf("%s keeps its name", key(o))
		}
	}
	text := strings.Join(all.lines(), "\n")
	// Leave out the labels by which other programs select the pods: the overrides do not change them.
	references := regexp.MustCompile(`(?m)^.*(\.app|values\[\]): .*$`).ReplaceAllString(text, "")
	for _, o := range objects(t, everything()...) {
		if !slices.Contains(known, o.GetName()) && strings.Contains(references, o.GetName()) {
			t.Errorf("a line still has the earlier name of %s", key(o))
		}
	}
	// After the new names are replaced by the old ones, no line may differ.
	back := strings.NewReplacer("blue-csi", "oxide-csi", `kubernetes.io/name: "blue"`,
		`kubernetes.io/name: "oxide-csi-driver"`).Replace(text)
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

func TestProgramsAcceptTheArgumentsThatTheChartSets(t *testing.T) {
	all := objects(t, append(kept("nodeKeeper.coldAttach.dryRun=true",
		"nodeKeeper.leavingNodes.fence=true"), "--set-string",
		"nodeKeeper.coldAttach.window=CRON_TZ=Europe/Zurich 0 2 * * 6")...)
	keeper := matching(all.lines(), `\S+containers\[oxide-node-keeper\]\.args\[\]: "(.+)"`)
	for _, set := range []string{"--dry-run", "--fence", "--window=CRON_TZ=Europe/Zurich 0 2 * * 6"} {
		if !slices.Contains(keeper, set) {
			t.Errorf("the keeper's arguments %q lack %s", keeper, set)
		}
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
