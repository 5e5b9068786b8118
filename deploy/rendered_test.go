package deploy_test

import (
	"os"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// extras begins the values that everywhere sets: labels and annotations of all objects.
const extras = `{"commonLabels": {"team": "storage"},
	"commonAnnotations": {"team": "storage", "contact": "us"}`

// beside returns values that add an argument, a variable, a mount and more to each of the names.
func beside(names, more string) string {
	var text strings.Builder
	for name := range strings.FieldsSeq(names) {
		text.WriteString(`, "` + name + `": {"extraArgs": ["--extra=true"],
			"extraEnv": [{"name": "EXTRA", "value": "true"}],
			"extraVolumeMounts": [{"name": "extra", "mountPath": "/extra"}]` + more + `}`)
	}
	return text.String()
}

// everywhere returns the arguments that add something to every object, pod and container.
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

// everything returns the arguments that switch on everything in the chart, except the Secret of its
// own, and set further values.
func everything(more ...string) []string {
	return with(append([]string{"snapshots.enabled=true", "instanceMetadata.enabled=true",
		"nodeKeeper.enabled=true", "metrics.enabled=true", "metrics.podMonitor=true", "ownCA=true",
		"topology=rack=a", "audit.enabled=true", "audit.kubectlImage.repository=mine/kubectl",
		"audit.kubectlImage.tag=v1.35.4", "audit.extraArgs[0]=--output=json",
		"networkPolicy.enabled=true", "networkPolicy.rack.port=8443",
		"networkPolicy.rack.cidrs={192.0.2.10/32,2001:db8::/64}",
		"networkPolicy.apiServer.cidrs={198.51.100.0/24}"}, more...)...)
}

// kept returns the arguments for the chart with its node keeper, and with further values.
func kept(more ...string) []string { return with(append(more, "nodeKeeper.enabled=true")...) }

// on returns the arguments for the chart on a version of Kubernetes.
func on(version string, more ...string) []string {
	return append(with(more...), "--kube-version", version)
}

const (
	everyPod = "arguments, variables, mounts, labels and annotations can be added"
	theWhole = "with everything there are these fields (D-45, D-54, D-63, D-66, E-31)"
)

// change compares what two lists of Helm's arguments render. The arguments "kustomize DIR..." stand
// for plain manifests, and "nothing" for no objects.
type change struct {
	name     string
	from, to []string
}

// changes lists the comparisons. testdata/rendered.txt contains the accepted result of each: the
// fields that are removed and added, and no others. `make manifests` writes the file.
func changes(t *testing.T) []change {
	return []change{
		{theWhole, []string{"nothing"}, everything()},
		{"the suite installs what users install", []string{"kustomize", "snapshots",
			"snapshot-controller", "simulator"}, []string{"kustomize", "e2e"}},
		{everyPod, everything(),
			append(everything(), everywhere(t)...)},
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
		// Without the registrar kubelet forgets the driver and no longer unmounts. So the container leave
		// ends first, then the driver's preStop hook, a minute before the grace period is over.
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

// images returns the settings for every image of the chart. % in a setting stands for the image.
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

// golden contains the accepted changes of fields, and has the same head as the other files that
// `make manifests` writes.
const golden = "testdata/rendered.txt"

// accepted returns the sections of golden by their names.
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

func TestTheChartRendersItsValues(t *testing.T) { // D-43
	objectsOf := func(t *testing.T, args []string) manifests {
		switch {
		case len(args) == 1:
			return nil
		case len(args) > 0 && args[0] == "kustomize":
			var all manifests
			for _, dir := range args[1:] {
				all = append(all, build(t, "kustomize/"+dir)...)
			}
			return all
		}
		return objects(t, args...)
	}
	text, want, every := renderedHead, map[string]string{}, changes(t)
	if !*update {
		want = accepted(t)
	}
	var all manifests
	for _, c := range short.Some(t, 20, every) {
		t.Run(c.name, func(t *testing.T) {
			to := objectsOf(t, c.to)
			for _, o := range to { // Kubernetes' document lacks monitoring's kinds and later fields
				if o.GetKind() != "PodMonitor" && !slices.Contains(c.to, "--kube-version") {
					all = append(all, o)
				}
			}
			got := differences(objectsOf(t, c.from).lines(), to.lines())
			text += "\n## " + c.name + "\n" + got
			if diff := gocmp.Diff(strings.TrimSpace(want[c.name]), strings.TrimSpace(got)); diff != "" &&
				!*update {
				t.Errorf("it is not as in %s (-file +chart); run `make manifests`:\n%s", golden, diff)
			}
		})
	}
	if *update {
		must(t, os.WriteFile(golden, []byte(text), 0o644))
	} else if len(want)-1 != len(every) { // the head is a section, too
		t.Errorf("%s has %d sections, want %d; run `make manifests`", golden, len(want)-1, len(every))
	}
	if out, ok := conforms(t, allSchemas(t), all); !ok {
		t.Error(out)
	}
}
