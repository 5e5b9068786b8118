package deploy_test

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

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
