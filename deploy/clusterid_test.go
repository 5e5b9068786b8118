package deploy_test

import (
	"crypto/rand"
	"encoding/json"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"sigs.k8s.io/yaml"
)

const systemUID = "9f3f1c52-0d1c-4b1e-8a41-6c7f4d1a2b3c"

// answering() starts an API server that has the namespace kube-system and the given objects, by
// path. It returns Helm arguments that send the chart's lookups to this server.
func answering(t *testing.T, objects map[string]any) []string {
	t.Helper()
	all := map[string]any{}
	for path, text := range map[string]string{
		"/version": `{"major": "1", "minor": "35", "gitVersion": "v` + kubernetes + `"}`,
		"/api":     `{"kind": "APIVersions", "versions": ["v1"]}`,
		"/apis": `{"kind": "APIGroupList", "apiVersion": "v1", "groups": [{"name": "apps",
			"versions": [{"groupVersion": "apps/v1", "version": "v1"}],
			"preferredVersion": {"groupVersion": "apps/v1", "version": "v1"}}]}`,
		"/api/v1": `{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [
			{"name": "namespaces", "kind": "Namespace", "verbs": ["get", "list"]},
			{"name": "secrets", "kind": "Secret", "namespaced": true, "verbs": ["get", "list"]}]}`,
		"/apis/apps/v1": `{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "apps/v1",
			"resources": [{"name": "deployments", "kind": "Deployment", "namespaced": true,
			"verbs": ["get", "list"]}]}`,
		"/api/v1/namespaces/kube-system": `{"apiVersion": "v1", "kind": "Namespace",
			"metadata": {"name": "kube-system", "uid": "` + systemUID + `"}}`,
	} {
		all[path] = json.RawMessage(text)
	}
	maps.Copy(all, objects)
	prefix := "/" + rand.Text() // helm() caches by arguments, and a later server may get this port
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		answer := all[strings.TrimPrefix(r.URL.Path, prefix)]
		w.Header().Set("Content-Type", "application/json")
		if answer == nil {
			w.WriteHeader(http.StatusNotFound)
			answer = map[string]any{"kind": "Status", "apiVersion": "v1", "status": "Failure",
				"reason": "NotFound", "code": http.StatusNotFound}
		}
		if err := json.NewEncoder(w).Encode(answer); err != nil {
			t.Error(err)
		}
	}))
	t.Cleanup(server.Close)
	return []string{"--dry-run=server", "--kube-apiserver", server.URL + prefix, "--kubeconfig",
		"/dev/null"}
}

const (
	secretPath     = "/api/v1/namespaces/oxide-csi/secrets/oxide-secret"
	otherPath      = "/api/v1/namespaces/oxide-csi/secrets/other-secret"
	deploymentPath = "/apis/apps/v1/namespaces/oxide-csi/deployments"
)

// secretWith returns a Secret whose keys have the value "x". The argument "other KEY" gives KEY the
// value "other".
func secretWith(keys ...string) any {
	data := map[string]any{"host": "eA==", "token": "eA==", "project": "eA=="}
	for _, key := range keys {
		key, other := strings.CutPrefix(key, "other ")
		data[key] = map[bool]string{false: "eA==", true: "b3RoZXI="}[other]
	}
	return map[string]any{"apiVersion": "v1", "kind": "Secret", "data": data}
}

// deployed() returns two Deployments: the controller of an earlier release, whose OXIDE_CLUSTER_ID
// has the fields in id, and an unrelated one with the cluster ID "foreign".
func deployed(id map[string]any) any {
	id["name"] = "OXIDE_CLUSTER_ID"
	deployment := func(name, app string, containers ...any) any {
		return map[string]any{"apiVersion": "apps/v1", "kind": "Deployment",
			"metadata": map[string]any{"name": name, "namespace": "oxide-csi"},
			"spec": map[string]any{"template": map[string]any{
				"metadata": map[string]any{"labels": map[string]any{"app": app}},
				"spec":     map[string]any{"containers": containers}}}}
	}
	foreign := map[string]any{"name": pluginName, "env": []any{
		map[string]any{"name": "OXIDE_CLUSTER_ID", "value": "foreign"}}}
	return map[string]any{"apiVersion": "apps/v1", "kind": "DeploymentList", "items": []any{
		deployment("other", "other", foreign),
		deployment("of-any-name", "oxide-csi-controller", map[string]any{"name": "csi-attacher"},
			map[string]any{"name": pluginName, "env": []any{
				map[string]any{"name": "OXIDE_HOST", "value": ""}, id}})}}
}

func fromSecret(optional bool) map[string]any {
	ref := map[string]any{"name": "oxide-secret", "key": "cluster-id"}
	if optional {
		ref["optional"] = true
	}
	return map[string]any{"valueFrom": map[string]any{"secretKeyRef": ref}}
}

// The cluster ID is part of the ownership tag of every disk. After a change of the ID, the driver
// regards all earlier disks as those of another cluster.
func TestAnUpgradeKeepsTheClusterIDOrWarnsOfItsChange(t *testing.T) { // A2.1
	const required, optional, warning = "of the Secret", "of the Secret, if it is there", "WARNING"
	for _, c := range []struct {
		name    string
		objects map[string]any
		args    []string
		want    string
		notes   string
	}{
		{"a new installation has kube-system's UID", map[string]any{secretPath: secretWith()}, nil,
			systemUID, "The cluster's id is " + systemUID},
		{"a new installation without its Secret has kube-system's UID", nil, nil, systemUID, systemUID},
		{"the Secret's key replaces the UID", map[string]any{secretPath: secretWith("cluster-id")}, nil,
			required, ""},
		{"the Secret's key may have another name",
			map[string]any{secretPath: secretWith("oxide-cluster")},
			with("secret.keys.clusterId=oxide-cluster"), required, ""},
		{"clusterId replaces the Secret's key and the earlier id", map[string]any{
			secretPath:     secretWith("cluster-id"),
			deploymentPath: deployed(map[string]any{"value": "old"})}, with("clusterId=blue"), "blue",
			warning + ": this upgrade changes the cluster's id from old to blue."},
		{"clusterId that equals the earlier id is no change", map[string]any{
			deploymentPath: deployed(map[string]any{"value": "blue"})}, with("clusterId=blue"), "blue",
			"The cluster's id is blue"},
		{"clusterId that equals the Secret's id is no change", map[string]any{
			secretPath: secretWith("cluster-id"), deploymentPath: deployed(fromSecret(false))},
			with("clusterId=x"), "x", "The cluster's id is x"},
		{"clusterId that differs from the Secret's id is a change", map[string]any{
			secretPath: secretWith("cluster-id"), deploymentPath: deployed(fromSecret(false))},
			with("clusterId=blue"), "blue", warning + ": this upgrade changes the cluster's id from x to " +
				"blue."},
		{"the first id of a release without one is a change", map[string]any{secretPath: secretWith(),
			deploymentPath: deployed(fromSecret(true))}, with("clusterId=blue"), "blue",
			warning + ": this upgrade changes the cluster's id from none to blue."},
		{"the id of another Secret is a change", map[string]any{secretPath: secretWith("cluster-id"),
			otherPath: secretWith("other cluster-id"), deploymentPath: deployed(fromSecret(false))},
			with("secret.existing=other-secret"), required,
			warning + ": this upgrade changes the cluster's id from x to other."},
		{"another Secret without an id keeps the first Secret's id", map[string]any{
			secretPath: secretWith("cluster-id"), otherPath: secretWith("other token"),
			deploymentPath: deployed(fromSecret(false))}, with("secret.existing=other-secret"), "x",
			"The cluster's id is x"},
		{"an upgrade keeps the earlier id", map[string]any{
			deploymentPath: deployed(map[string]any{"value": "from-before"})}, nil, "from-before",
			"from-before"},
		{"an upgrade keeps the earlier id although the Secret has a new one", map[string]any{
			secretPath:     secretWith("cluster-id"),
			deploymentPath: deployed(map[string]any{"value": "from-before"})}, nil, "from-before",
			"from-before"},
		{"an upgrade keeps the Secret's id", map[string]any{secretPath: secretWith("cluster-id"),
			deploymentPath: deployed(fromSecret(true))}, nil, required,
			"The cluster's id is that of the Secret's key cluster-id"},
		{"an upgrade of a release without an id sets none, and warns", map[string]any{
			secretPath: secretWith(), deploymentPath: deployed(fromSecret(true))}, nil, optional,
			warning + ": there is no cluster id"},
		{"a release that never started for lack of a key gets the UID", map[string]any{
			secretPath: secretWith(), deploymentPath: deployed(fromSecret(false))}, nil, systemUID,
			systemUID},
	} {
		t.Run(c.name, func(t *testing.T) {
			args := slices.Concat(answering(t, c.objects), c.args)
			got := clusterIDOf(t, objects(t, args...))
			if got != c.want {
				t.Errorf("OXIDE_CLUSTER_ID is %s, want %s", got, c.want)
			}
			notes := notesOf(t, args...)
			if !strings.Contains(notes, c.notes) ||
				strings.Contains(notes, warning) != strings.Contains(c.notes, warning) {
				t.Errorf("the notes do not say %q:\n%s", c.notes, notes)
			}
		})
	}
}

func clusterIDOf(t *testing.T, all manifests) string {
	t.Helper()
	_, driver := controllersPod(t, all)
	for _, v := range driver.Env {
		switch {
		case v.Name != "OXIDE_CLUSTER_ID":
		case v.ValueFrom == nil:
			return v.Value
		case v.ValueFrom.SecretKeyRef.Optional != nil && *v.ValueFrom.SecretKeyRef.Optional:
			return "of the Secret, if it is there"
		default:
			return "of the Secret"
		}
	}
	return "missing"
}

func TestHelmTemplateTakesTheClusterIDFromTheSecret(t *testing.T) { // A2.1
	if got := clusterIDOf(t, objects(t)); got != "of the Secret" {
		t.Errorf("helm template takes the cluster's id %s", got)
	}
	const said = "No cluster was asked for its id"
	if text := render(t)["controller.yaml"]; !strings.Contains(text, said) {
		t.Errorf("the manifest does not say %q:\n%s", said, text)
	}
	if text := render(t, with("clusterId=blue")...)["controller.yaml"]; strings.Contains(text, said) {
		t.Errorf("the manifest with an id says %q", said)
	}
}

func notesOf(t *testing.T, args ...string) string {
	t.Helper()
	// `helm template` omits NOTES.txt, so a template in a copy of the chart renders it.
	dir := filepath.Join(t.TempDir(), "chart")
	must(t, os.CopyFS(dir, os.DirFS("chart")))
	templates := filepath.Join(dir, "templates")
	must(t, os.Rename(filepath.Join(templates, "NOTES.txt"), filepath.Join(dir, "notes")))
	show := []byte("notes: |\n{{ tpl (.Files.Get \"notes\") . | indent 2 }}\n")
	must(t, os.WriteFile(filepath.Join(templates, "notes.yaml"), show, 0o644))
	out, complaints, err := run(t, nil, tool(t, "helm"), append([]string{"template", "oxide-csi",
		dir, "--namespace", "oxide-csi", "--kube-version", kubernetes, "--show-only",
		"templates/notes.yaml"}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, complaints)
	}
	return out
}

func TestInstallationNotesSayWhatToDoNext(t *testing.T) {
	const create, cluster = "kubectl create secret generic", "no cluster was asked"
	const lacks = "WARNING: the Secret oxide-secret has no key token"
	const byHand, label = "howto/attach-by-hand.md", "csi.oxide.computer/cold-attach=allowed"
	const dry, keeper = "(dryRun)", "nodeKeeper.enabled=true"
	without := map[string]any{"apiVersion": "v1", "kind": "Secret", "data": map[string]any{
		"host": "eA==", "project": "eA=="}}
	for _, c := range []struct {
		args      []string
		want, not []string
	}{
		{nil, []string{create + " oxide-secret --namespace oxide-csi", "--from-literal=host=",
			"--from-literal=cluster-id=my-cluster\n", cluster, "If that is not there yet", byHand,
			"it is unknown whether the Secret oxide-secret has one, and which one this release had before",
			"Snapshots are off: the cluster does not have the snapshot CRDs"}, []string{label}},
		{with("clusterId=a", "snapshots.enabled=true", "secret.create=true", "secret.host=https://a",
			"secret.token=hush", "secret.project=p"), nil,
			[]string{create, cluster, "Snapshots are off", "hush"}},
		{with(keeper), []string{label}, []string{byHand, dry}},
		{with(keeper, "nodeKeeper.coldAttach.dryRun=true"), []string{label, dry}, []string{byHand}},
		{with(keeper, "nodeKeeper.coldAttach.enabled=false"), []string{byHand}, []string{label}},
		{answering(t, nil), []string{"The Secret is not there yet", create,
			"--from-literal=cluster-id=" + systemUID + "\n"}, []string{"WARNING"}},
		{answering(t, map[string]any{secretPath: secretWith("cluster-id")}), []string{
			"The cluster's id is that of the Secret's key cluster-id"}, []string{create, "WARNING"}},
		{answering(t, map[string]any{secretPath: without}), []string{lacks},
			[]string{create, "no key host", "no key project"}},
	} {
		got := notesOf(t, c.args...)
		for _, want := range append(c.want, "FailedAttachVolume that says InstanceMustBeStopped") {
			if !strings.Contains(got, want) {
				t.Errorf("%q: the notes lack %q:\n%s", c.args, want, got)
			}
		}
		for _, not := range c.not {
			if strings.Contains(got, not) {
				t.Errorf("%q: the notes have %q:\n%s", c.args, not, got)
			}
		}
	}
}

// The driver reads host, project and certificates only when it starts. It reads a new token without
// a restart.
func TestSecretChangesReplaceThePodsUnlessOnlyTheTokenChanges(t *testing.T) {
	mark := func(set ...string) map[string]string {
		pod, _ := controllersPod(t, objects(t, with(append([]string{"secret.create=true",
			"secret.token=a", "secret.project=p", "secret.host=https://a"}, set...)...)...))
		return pod.Annotations
	}
	first := mark()
	for set, changes := range map[string]bool{"secret.host=https://b": true, "secret.project=q": true,
		"secret.token=b": false, "ownCA=true,secret.caBundle=c": true} {
		if got := mark(set); len(got) != 1 || !maps.Equal(got, first) != changes {
			t.Errorf("with %s the pods are replaced: %v, want %v", set, !maps.Equal(got, first), changes)
		}
	}
	if pod, _ := controllersPod(t, objects(t)); len(pod.Annotations) > 0 {
		t.Errorf("with a Secret made elsewhere the pods have the annotations %v", pod.Annotations)
	}
}

func TestThePrometheusRuleContainsAlertsYAML(t *testing.T) {
	all := slices.DeleteFunc(objects(t, with("metrics.enabled=true",
		"metrics.prometheusRule.enabled=true", "metrics.prometheusRule.labels.release=mine")...),
		func(o *unstructured.Unstructured) bool { return o.GetKind() != "PrometheusRule" })
	if len(all) != 1 || all[0].GetLabels()["release"] != "mine" {
		t.Fatalf("got the rules %v, want one PrometheusRule with the label", all)
	}
	var want map[string]any
	must(t, yaml.Unmarshal(readFile(t, "chart/monitoring/alerts.yaml"), &want))
	if diff := cmp.Diff(want, all[0].Object["spec"]); diff != "" {
		t.Errorf("the file (-) differs from the PrometheusRule (+):\n%s", diff)
	}
}

func TestTheConfigMapForGrafanaContainsDashboardJSON(t *testing.T) {
	all := objects(t, with("metrics.dashboard.enabled=true",
		"metrics.dashboard.annotations.grafana_folder=Storage")...)
	dashboard := find[corev1.ConfigMap](t, all, "ConfigMap", "oxide-csi-dashboard")
	want := strings.TrimSpace(string(readFile(t, "chart/monitoring/dashboard.json")))
	if dashboard.Data["oxide-csi.json"] != want {
		t.Errorf("the dashboard is not the file's:\n%s", cmp.Diff(want, dashboard.Data["oxide-csi.json"]))
	}
	if dashboard.Labels["grafana_dashboard"] != "1" ||
		dashboard.Annotations["grafana_folder"] != "Storage" {
		t.Errorf("Grafana looks for the label grafana_dashboard; the ConfigMap has %v and %v",
			dashboard.Labels, dashboard.Annotations)
	}
}
