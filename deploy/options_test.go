package deploy_test

import (
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

func notesOf(t *testing.T, args ...string) string {
	t.Helper()
	// Helm prints notes only for an installation, so a template beside them prints them here.
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
		dir, "--namespace", "oxide-csi", "--kube-version", kubernetes, "--show-only",
		"templates/notes.yaml"}, args...)...)
	if err != nil {
		t.Fatalf("%v\n%s", err, complaints)
	}
	return out
}

func TestTheChartsNotesListWhatTheUserStillHasToDo(t *testing.T) {
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

// The driver reads host, project and certificates only at its start. It reads a new token without a
// restart.
func TestAChangedHostOfTheChartsOwnSecretReplacesThePods(t *testing.T) {
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

func TestTheChartInstallsTheAlertRulesOfTheFile(t *testing.T) {
	all := objects(t, with("metrics.enabled=true", "metrics.prometheusRule.enabled=true",
		"metrics.prometheusRule.labels.release=mine")...).kinds("PrometheusRule")
	if len(all) != 1 || all[0].GetLabels()["release"] != "mine" {
		t.Fatalf("got the rules %v, want one PrometheusRule with the label", all)
	}
	var want map[string]any
	if err := yaml.Unmarshal(readFile(t, "chart/monitoring/alerts.yaml"), &want); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, all[0].Object["spec"]); diff != "" {
		t.Errorf("the file (-) differs from the PrometheusRule (+):\n%s", diff)
	}
}

func TestTheChartInstallsTheDashboardOfTheFile(t *testing.T) {
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
