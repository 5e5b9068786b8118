package deploy_test

import (
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func TestAWrongChartValueIsRefusedWithAnExplanation(t *testing.T) {
	for _, c := range short.Some(t, 12, []struct{ set, want string }{
		{"node.kubeletDir=/var/lib/kubelet/", "without a slash at its end"},
		{"node.kubeletDir=/var/../kubelet", "it has to be an absolute path"},
		{"node.maxUnavailable=0", `node.maxUnavailable is "0"`},
		{"node.extraEnv[0].name=CSI_MODE", "belong to the CSI specification"},
		{"node.podLabels.app=mine", "node.podLabels has app, by which the pods are found"},
		{"clusterId=" + strings.Repeat("a", 64), "at most 63 letters"},
		{"maxDisks=1", "maxDisks is 1: it has to be a number from 2 to 1000, what the rack lets an " +
			"instance have; the boot disk is one of them"},
		{"deviceTimeout=0s", `deviceTimeout is "0s"`},
		{"topology=rack", `topology is "rack": it has to be key=value pairs such as rack=a`},
		{"topology=rack=a;rack=b", "topology names several locations: a node is in one"},
		{"topology=rack=a\\,Instance=b", "topology has the key instance, with which nodes name"},
		{"topology=rack=a,topologyAlso=instance=b", "topologyAlso has the key instance"},
		{"topologyAlso=rack=b", "topologyAlso is given without topology"},
		{"secret.create=true", "secret.host is empty: with secret.create the chart needs"},
		{"secret.create=true,secret.existing=mine", "secret.create and secret.existing are both set"},
		{"secret.create=true,secret.token=t,secret.project=p,secret.host=ftp://rack", "secret.host is " +
			"not the address of a rack"},
		{"secret.token=hush", "secret.token is given, and would be left unused"},
		{"secret.create=true,ownCA=true", "secret.caBundle is empty"},
		{"secret.caBundle=x", "ownCA is off"},
		{"metrics.podMonitor=true", "metrics.podMonitor is set and metrics.enabled is not"},
		{"metrics.prometheusRule.enabled=true",
			"metrics.prometheusRule.enabled is set and metrics.enabled is not"},
		{"metrics.nodePort=9808", "metrics.nodePort is 9808: it has to be a port"},
		{"metrics.attacherPort=9812", "metrics.attacherPort is 9812: it has to be a port from 1 to " +
			"65535, and not 9808, 9811, 9809, 9812, which others in the pod have"},
		{"metrics.podMonitorLabels.app=a", "metrics.podMonitorLabels has app, by which"},
		{"commonLabels.app=a", "commonLabels has app, by which the pods are found"},
		{`commonLabels.app\.kubernetes\.io/name=a`, "commonLabels has app.kubernetes.io/name"},
		{"fullnameOverride=" + strings.Repeat("a", 41), "at most 40 lower-case letters"},
		{"controller.affinity.podAntiAffinity.a=b", "controller.affinity has a podAntiAffinity, and " +
			"controller.antiAffinity is preferred: set it to none"},
		{"nodeKeeper.enabled=true,nodeKeeper.coldAttach.enabled=false,nodeKeeper.startupTaint." +
			"enabled=false,nodeKeeper.leavingNodes.enabled=false", "nodeKeeper.enabled is set and none of " +
			"its duties is"},
		{"nodeKeeper.leavingNodes.fence=true,nodeKeeper.leavingNodes.enabled=false",
			"nodeKeeper.leavingNodes.fence is set and leavingNodes.enabled is not"},
		{"nodeKeeper.leavingNodes.gracePeriodSeconds=60", "gracePeriodSeconds is 60: it has to be at " +
			"least 120"},
		{"nodeKeeper.affinity.podAntiAffinity.a=b", "nodeKeeper.affinity has a podAntiAffinity"},
		{"nodeKeeper.podLabels.app=mine", "nodeKeeper.podLabels has app, by which the pods are found"},
		{"networkPolicy.enabled=true", "networkPolicy.rack.cidrs is empty: the controller could not " +
			"reach the rack"},
		{"networkPolicy.enabled=true", "networkPolicy.apiServer.cidrs is empty"},
		{"audit.enabled=true", "audit.kubectlImage has no repository, or neither a tag nor a digest"},
		{"audit.extraArgs[0]=--delete", "audit.extraArgs has --delete: the CronJob only reports"},
		{"extraStorageClasses[0].name=oxide-disk", "two storage classes are called oxide-disk"},
		{"storageClass.default=true,extraStorageClasses[0].name=b,extraStorageClasses[0].default=true",
			"the storage classes oxide-disk and b are all the default"},
		{"snapshots.classes[0].name=oxide-snapshot", "two snapshot classes are called oxide-snapshot"},
		{"snapshots.classes[0].name=b,snapshots.class.default=true,snapshots.classes[0].default=true",
			"the snapshot classes oxide-snapshot and b are all the default"},
		{"storageClass.allowedTopologies[0].matchLabelExpressions[0].key=rack",
			"'/storageClass/allowedTopologies/0/matchLabelExpressions/0"},
		{`storageClass.allowedTopologies[0].matchLabelExpressions[0].key=` +
			`topology\.csi\.oxide\.computer/rack,` +
			"storageClass.allowedTopologies[0].matchLabelExpressions[0].values={a}",
			"oxide-disk has allowedTopologies, and neither topology nor topologyInstance is set"},
		{"controller.hostNetwork=true", "controller.hostNetwork is set, and controller.antiAffinity is " +
			"preferred: replicas on one node would want the same ports"},
		{"controller.dnsPolicy=None", "controller.dnsPolicy is None, and controller.dnsConfig has no"},
		{"node.serviceAccountName=oxide-csi-controller", "node.serviceAccountName is " +
			"oxide-csi-controller, which another pod has, too"},
		{"snapshotter.featureGates.A\n- --b=true", "does not match pattern"},
		{"node.stateDir=/etc/oxide", "'/node/stateDir'"}, {"node.stateDir=/run", "'/node/stateDir'"},
		{"node.stateDir=/k/a,node.kubeletDir=/k", "may not be in each other"},
		{"node.stateDir=/k,node.kubeletDir=/k/a", "may not be in each other"},
		{"networkPolicy.rack.cidrs[0]=1.2.3/8", `cidrs has "1.2.3/8"`},
		{"networkPolicy.rack.cidrs[0]=1.2.3.256/8", `cidrs has "1.2.3.256/8"`},
		{"networkPolicy.rack.cidrs[0]=1.2.3.4/33", `cidrs has "1.2.3.4/33"`},
		{"networkPolicy.rack.cidrs[0]=fd00::1::2/64", `cidrs has "fd00::1::2/64"`},
		{"networkPolicy.rack.cidrs[0]=fd00:1/64", `cidrs has "fd00:1/64"`},
		{"networkPolicy.rack.cidrs[0]=:::/0", `cidrs has ":::/0"`},
		{"networkPolicy.rack.cidrs[0]=fd00::/129", `cidrs has "fd00::/129"`},
		{"snapshotter.featureGates.A=perhaps", "'/snapshotter/featureGates/A': got string, want boolean"},
		{"test.enabled=true", "test.image has neither a tag nor a digest"},
		{"replicas=3", "additional properties 'replicas' not allowed"},
	}) {
		t.Run(c.set, func(t *testing.T) { refused(t, c.want, with(c.set)...) })
	}
}

// refused() checks that Helm refuses the values with an error that contains want and no token.
func refused(t *testing.T, want string, args ...string) {
	t.Helper()
	_, complaints, err := helm(t, args...)
	if err == nil || !strings.Contains(complaints, want) {
		t.Errorf("helm template said %q (%v), want a refusal with %q", complaints, err, want)
	}
	if strings.Contains(complaints, "hush") {
		t.Errorf("the refusal shows a secret: %q", complaints)
	}
}

func TestAWrongStorageClassParameterIsRefusedWithAnExplanation(t *testing.T) {
	const class, fsType = "storageClass.parameters.", `csi\.storage\.k8s\.io/`
	const names = "which the driver does not know; it knows blockSize, diskType, imageId, " +
		"mkfsOptions, placement and csi.storage.k8s.io/fstype"
	const image = "imageId=0a1de000-0000-4000-8000-000000000001"
	for _, c := range short.Some(t, 4, []struct{ set, want string }{
		{"blocksize=512", "storage class oxide-disk has the parameter blocksize, " + names},
		{"fstype=xfs", "has the parameter fstype, " + names},
		{fsType + "fsType=xfs", "has the parameter csi.storage.k8s.io/fsType, " + names},
		{fsType + "fs-type=xfs", "has the parameter csi.storage.k8s.io/fs-type, " + names},
		{fsType + "fstype=zfs", `has csi.storage.k8s.io/fstype "zfs": it is one of ext4, ext3, xfs, ` +
			"btrfs"},
		{"diskType=fast", `class oxide-disk has diskType "fast": it is one of distributed, local`},
		{"diskType=", `has diskType "": it is one of`},
		{"blockSize=513", `has blockSize "513": it is one of 512, 2048, 4096`},
		{"blockSize=4k", `has blockSize "4k": it is one of`},
		{"imageId=debian", `has imageId "debian": it has to be the UUID of an image, not a name`},
		{"diskType=local," + class + "blockSize=512", "has diskType local and blockSize 512: local " +
			"disks have 4096"},
		{"diskType=local," + class + image, "diskType local and imageId: local disks are created blank"},
		{"placement=node", `class oxide-disk has placement "node": it is one of rack, instance`},
		{"placement=instance", "class oxide-disk has placement instance, and topologyInstance is off: " +
			"set it"},
		{"placement=instance,topologyInstance=true,storageClass.volumeBindingMode=Immediate",
			"placement instance and volumeBindingMode Immediate: it has to be WaitForFirstConsumer"},
		{"mkfsOptions=-F", `has the mkfsOptions "-F", which is not allowed; allowed are bytesPerInode, ` +
			"fsBlockSize, inodeSize, label, nodeSize, reflink, reservedPercent"},
		{"mkfsOptions=inodeSize", "has the mkfsOptions inodeSize=: it has to be 256, 512, 1024 or 2048"},
		{"mkfsOptions=reservedPercent=51", "reservedPercent=51: it has to be a number from 0 to 50"},
		{"mkfsOptions=reservedPercent=05", "reservedPercent=05: it has to be a number from 0 to 50"},
		{"mkfsOptions=bytesPerInode=1023", "bytesPerInode=1023: it has to be a number from 1024"},
		{"mkfsOptions=label=-a", "label=-a: it has to be 1 to 12 of A-Z"},
		{`mkfsOptions=label=a\,label=b`, "has the mkfsOptions label twice"},
		{"mkfsOptions=reflink=true", "mkfsOptions reflink, which ext4 does not have; it is for xfs"},
		{"mkfsOptions=reservedPercent=0," + class + fsType + "fstype=btrfs", "reservedPercent, which " +
			"btrfs does not have; it is for ext3, ext4"},
	}) {
		t.Run(c.set, func(t *testing.T) { refused(t, c.want, with(class+c.set)...) })
	}
	refused(t, `storage class b has diskType "fast"`, with("extraStorageClasses[0].name=b",
		"extraStorageClasses[0].parameters.diskType=fast")...)
	for _, fine := range short.Some(t, 3, []string{
		"diskType=local," + class + "blockSize=4096", "blockSize=512," + class + image,
		`mkfsOptions=bytesPerInode=16384\,label=a`, "mkfsOptions=reservedPercent=0",
		"mkfsOptions=reflink=false," + class + fsType + "fstype=xfs", "mkfsOptions=", "placement=rack",
		"placement=rack,storageClass.volumeBindingMode=Immediate",
		"placement=instance,topologyInstance=true",
	}) {
		if _, complaints, err := helm(t, with(class+fine)...); err != nil {
			t.Errorf("%s is refused: %v\n%s", fine, err, complaints)
		}
	}
}

func TestNullIsAcceptedForEmptyChartValues(t *testing.T) {
	args := with("metrics.enabled=true", "metrics.podMonitor=true", "nodeKeeper.enabled=true")
	for path, value := range defaults(t) {
		list, isList := value.([]any)
		if _, isMap := value.(map[string]any); isMap || isList && len(list) == 0 {
			args = append(args, setting(t, path, nil)...)
		}
	}
	if _, complaints, err := helm(t, args...); err != nil {
		t.Errorf("%q: %v\n%s", args, err, complaints)
	}
}

func TestAnOldKubernetesIsRefusedWithAnExplanation(t *testing.T) {
	refused(t, "chart requires kubeVersion: >=1.29.0-0 which is incompatible with Kubernetes v1.28.15",
		on("1.28.15")...)
	refused(t, "instanceMetadata.via is env, which needs Kubernetes 1.35 (this is v1.34.2): use file",
		on("1.34.2", "instanceMetadata.enabled=true", "instanceMetadata.via=env")...)
}

// `helm lint` compares the chart's values with its schema, so it fails if the schema lacks a value.
func TestTheDefaultValuesPassHelmLintAndHaveComments(t *testing.T) {
	out, complaints, err := run(t, nil, tool(t, "helm"), "lint", "chart", "--strict", "--kube-version",
		kubernetes)
	if err != nil {
		t.Errorf("helm lint: %v\n%s%s", err, out, complaints)
	}
	text := readFile(t, "chart/values.yaml")
	if bare := regexp.MustCompile(`\n[^#\n]*\n\w+:`).FindAll(text, -1); bare != nil {
		t.Errorf("values.yaml has no comment above %q", bare)
	}
}

// The node keeper's tests contain the same windows: chart and keeper have to agree on each.
func TestTheChartRefusesAnInvalidColdAttachWindow(t *testing.T) {
	for window, fine := range map[string]bool{"bogus": false, "0 2 * *": false,
		"0 2 * * 6 2030": false, "60 2 * * 6": false, "0 24 * * *": false, "0 2 0 * *": false,
		"0 2 * 13 *": false, "0 2 * * 7": false, "@daily": false, "0 2 * * sat-": false,
		"0 2 * * 6;": false, "0 2 * * 6": true, "CRON_TZ=Europe/Zurich 0 2 * * 6": true,
		"TZ=UTC */5 0-6/2,22 1,15 jan-MAR mon-fri": true, "0  2 ? * SAT": true} {
		_, complaints, err := helm(t, append(kept(), values(t, fmt.Sprintf(
			"nodeKeeper: {coldAttach: {window: %q}}", window))...)...)
		if (err == nil) != fine ||
			!fine && !strings.Contains(complaints, "nodeKeeper.coldAttach.window is ") {
			t.Errorf("the window %q: %v %s, want it accepted: %v", window, err, complaints, fine)
		}
	}
}

// defaults() returns the leaves of the chart's values.yaml by path.
func defaults(t *testing.T) map[string]any {
	t.Helper()
	var all map[string]any
	must(t, yaml.Unmarshal(readFile(t, "chart/values.yaml"), &all))
	found := map[string]any{}
	var walk func(path string, part any)
	walk = func(path string, part any) {
		parts, _ := part.(map[string]any)
		for name, deeper := range parts {
			walk(strings.TrimPrefix(path+"."+name, "."), deeper)
		}
		if len(parts) == 0 {
			found[path] = part
		}
	}
	walk("", all)
	return found
}

func setting(t *testing.T, path string, value any) []string {
	t.Helper()
	text, err := json.Marshal(value)
	must(t, err)
	return []string{"--set-json", path + "=" + string(text)}
}

func complained(complaints, path string) bool {
	in := "'/" + strings.NewReplacer(".", "/", "[", "/", "]", "").Replace(path)
	return slices.ContainsFunc([]string{in + "'", in + "/", "  " + path + " ", "~ " + path + " ~"},
		func(name string) bool { return strings.Contains(complaints, name) })
}

// TestStringValuesAreRenderedUnchangedOrRefused sets every string value to texts that YAML, a flag
// or a template could misread. The chart has to refuse the text, or to render it like a plain word.
func TestStringValuesAreRenderedUnchangedOrRefused(t *testing.T) {
	paths := []string{"commonLabels.x", "commonAnnotations.x", "imagePullSecrets[0].name",
		"node.extraArgs[0]", "controller.nodeSelector.x", "storageClass.mountOptions[0]",
		"controller.dnsConfig.searches[0]"}
	for path, value := range defaults(t) {
		if _, isText := value.(string); isText {
			paths = append(paths, path)
		}
	}
	on := values(t, `{ownCA: true, test: {enabled: true, image: {repository: a, tag: b}},
audit: {enabled: true, kubectlImage: {repository: a, tag: b}}, nodeKeeper: {enabled: true},
metrics: {enabled: true, podMonitor: true}, snapshots: {enabled: true},
instanceMetadata: {enabled: true},
secret: {create: true, host: "https://a", token: t, project: p, caBundle: c}}`)
	const plain = "zqzq"
	render := func(set []string, text string) (manifests, string) {
		args := slices.Clone(on)
		for _, path := range set {
			args = append(args, setting(t, path, text)...)
		}
		out, complaints, err := helm(t, args...)
		if err != nil {
			return nil, complaints
		}
		return parse(t, out), ""
	}
	accepted := func(paths []string, text string) []string {
		taken := slices.Clone(paths)
		for {
			odd, complaints := render(taken, text)
			before := len(taken)
			taken = slices.DeleteFunc(taken, func(path string) bool {
				return odd == nil && complained(complaints, path)
			})
			if odd == nil && len(taken) == before { // Helm names no path: find the refused values one by one
				taken = slices.DeleteFunc(taken, func(path string) bool {
					alone, _ := render([]string{path}, text)
					return alone == nil
				})
			}
			if odd == nil && len(taken) == before {
				t.Fatalf("%q is refused: %s", text, complaints)
			}
			if odd != nil {
				return taken
			}
		}
	}
	for _, text := range short.Some(t, 3, []string{"on", "123", "a\n- --b=c", "null", "1e3", "~",
		"0x1f", "{{ 1 }}", "a: b", "a #b", `"`, "'", "- a", "2001-01-01", "a\nb: c"}) {
		// Leave out settings that accept this text but no ordinary word: numbers, for example.
		taken := accepted(accepted(paths, text), plain)
		odd, _ := render(taken, text)
		usual, _ := render(taken, plain)
		got, _ := json.Marshal(odd)
		want, _ := json.Marshal(usual)
		// An annotation of the pods contains a checksum of the Secret, which differs by design.
		sum := regexp.MustCompile(`"csi.oxide.computer/settings":"[0-9a-f]+"`)
		got, want = sum.ReplaceAll(got, nil), sum.ReplaceAll(want, nil)
		inside, _ := json.Marshal(text)
		replaced := strings.ReplaceAll(string(want), plain, string(inside[1:len(inside)-1]))
		if replaced != string(got) {
			at := 0
			for at < min(len(got), len(replaced)) && got[at] == replaced[at] {
				at++
			}
			t.Errorf("of %v = %q there is\n%.200s\nwant\n%.200s", taken, text, got[max(0, at-80):],
				replaced[max(0, at-80):])
		}
		t.Logf("%q is taken in %d of %d places", text, len(taken), len(paths))
	}
}

var unchecked = map[string]string{
	"secret.token":    "only the rack knows its tokens",
	"secret.project":  "only the rack knows its projects",
	"secret.caBundle": "the driver reads the certificates",
}

// The test runs Helm twice, because Helm renders templates only if the schema accepts all values.
// The second run leaves out the values that the schema has refused.
func TestAWrongValueOfEachSettingIsReported(t *testing.T) {
	wrong := func(path string, value any) any {
		switch value.(type) {
		case string:
			return "~ " + path + " ~" // some checks report only the value, so it contains the path
		case float64:
			return -1
		case []any:
			return []any{7}
		case map[string]any:
			return map[string]any{"~ wrong ~": []any{7}}
		}
		return "~ wrong ~" // in place of a boolean
	}
	left := map[string]any{} // by path
	for path, value := range defaults(t) {
		left[path] = wrong(path, value)
	}
	switches := with("secret.create=true", "ownCA=true", "networkPolicy.enabled=true",
		"audit.enabled=true", "test.enabled=true", "nodeKeeper.enabled=true", "metrics.enabled=true")
	for _, run := range []struct {
		by   string
		args []string
	}{{"schema", nil}, {"templates", switches}} {
		by, args := run.by, run.args
		for path, value := range left {
			args = append(args, setting(t, path, value)...)
		}
		_, complaints, err := helm(t, args...)
		if err == nil {
			t.Fatalf("the %s report nothing", by)
		}
		for path := range left {
			if complained(complaints, path) {
				delete(left, path)
			}
		}
	}
	for path := range left {
		if unchecked[path] == "" {
			t.Errorf("nothing reports the value %v of %s", left[path], path)
		}
	}
	for path := range unchecked {
		if left[path] == nil {
			t.Errorf("%s is on the list of unchecked values, and is checked", path)
		}
	}
}
