package monitoring

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
)

// alertsFile contains the alert rules, which the chart installs, too.
const alertsFile = "../../deploy/chart/monitoring/alerts.yaml"

// interval is the time between evaluations of the rules and between samples.
const interval = time.Minute

// series contains time series in the notation of promtool, by metric and labels.
type series map[string]string

// firing evaluates the rules from the first sample to the last, as Prometheus does; interval is the
// time between two samples and between two evaluations. It returns the alerts that fire at the end,
// and the names of those that have ever fired.
func firing(t *testing.T, interval time.Duration, all series) (atEnd []*rules.Alert,
	ever []string) {
	t.Helper()
	load := "load " + interval.String() + "\n"
	for _, name := range slices.Sorted(maps.Keys(all)) {
		load += "  " + name + " " + all[name] + "\n"
	}
	loader, err := promqltest.NewLazyLoader(load, promqltest.LazyLoaderOpts{
		EnableAtModifier: true, EnableNegativeOffset: true})
	if err != nil {
		t.Fatalf("%v in\n%s", err, load)
	}
	defer func() { _ = loader.Close() }()
	manager := rules.NewManager(&rules.ManagerOptions{
		QueryFunc:  rules.EngineQueryFunc(loader.QueryEngine(), loader.Storage()),
		Appendable: loader.Storage(),
		Context:    t.Context(),
		NotifyFunc: func(context.Context, string, ...*rules.Alert) {},
		Logger:     slog.New(slog.DiscardHandler),
	})
	groups, errs := manager.LoadGroups(interval, labels.EmptyLabels(), "", nil, false, alertsFile)
	if len(errs) > 0 {
		t.Fatalf("load %s: %v", alertsFile, errs)
	}
	end := time.Unix(0, 0).Add(samples * interval)
	for at := time.Unix(0, 0).UTC(); at.Before(end); at = at.Add(interval) {
		loader.WithSamplesTill(at, func(err error) {
			if err != nil {
				t.Fatal(err)
			}
			atEnd = nil
			for _, group := range groups {
				group.Eval(loader.Context(), at)
				atEnd = append(atEnd, active(t, group)...)
			}
			ever = append(ever, names(atEnd)...)
		})
	}
	slices.Sort(ever)
	return atEnd, slices.Compact(ever)
}

// active returns the alerts of a group that fire.
func active(t *testing.T, group *rules.Group) (found []*rules.Alert) {
	t.Helper()
	for _, rule := range group.Rules() {
		if err := rule.LastError(); err != nil {
			t.Fatalf("%s: %v", rule.Name(), err)
		}
	}
	for _, rule := range group.AlertingRules() {
		for _, alert := range rule.ActiveAlerts() {
			if alert.State == rules.StateFiring {
				found = append(found, alert)
			}
		}
	}
	return found
}

// names returns the names of alerts, each once.
func names(alerts []*rules.Alert) []string {
	all := []string{}
	for _, alert := range alerts {
		all = append(all, alert.Labels.Get("alertname"))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// checkTexts checks that the texts of the alerts are complete.
func checkTexts(t *testing.T, alerts []*rules.Alert) {
	t.Helper()
	for _, alert := range alerts {
		for _, name := range []string{"summary", "description"} {
			text := alert.Annotations.Get(name)
			for _, sign := range []string{"<no value>", "<error", "%!", "  ", " .", " ,", " :", "()"} {
				if strings.Contains(" "+text, sign) {
					t.Errorf("the %s of %s lacks a value: %q", name, alert.Labels, text)
				}
			}
		}
	}
}

// read returns a file of the project.
func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// ruleList returns all rules in the file.
func ruleList(t *testing.T) []rulefmt.Rule {
	t.Helper()
	groups, errs := rulefmt.ParseFile(alertsFile, false, model.UTF8Validation)
	if len(errs) > 0 {
		t.Fatalf("%s: %v", alertsFile, errs)
	}
	var all []rulefmt.Rule
	for _, group := range groups.Groups {
		all = append(all, group.Rules...)
	}
	return all
}

// alerts returns the alert rules in the file.
func alerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	return slices.DeleteFunc(ruleList(t), func(r rulefmt.Rule) bool { return r.Alert == "" })
}

// reasons returns all reasons of the driver from its page. A test of the driver checks that the
// page is complete.
func reasons(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, m := range regexp.MustCompile("(?m)^### `(\\w+)`$").FindAllStringSubmatch(
		read(t, "docs/reasons.md"), -1) {
		all = append(all, m[1])
	}
	if len(all) < 70 {
		t.Fatalf("found %d reasons; is this the right page?", len(all))
	}
	return all
}

const runbook = "https://github.com/oxidecomputer/oxide-csi-plugin/blob/main/docs/alerts.md#"

func TestEveryAlertHasASeverityAndALinkToItsSection(t *testing.T) {
	page := read(t, "docs/alerts.md")
	var sections []string
	for _, m := range regexp.MustCompile(`(?m)^## (OxideCSI\w+)$`).FindAllStringSubmatch(page, -1) {
		sections = append(sections, m[1])
	}
	for _, alert := range alerts(t) {
		if !slices.Contains([]string{"critical", "warning", "info"}, alert.Labels["severity"]) {
			t.Errorf("%s has the severity %q", alert.Alert, alert.Labels["severity"])
		}
		want := runbook + strings.ToLower(alert.Alert)
		if got := alert.Annotations["runbook_url"]; got != want {
			t.Errorf("%s has the runbook %s, want %s", alert.Alert, got, want)
		}
		if alert.Annotations["summary"] == "" || alert.Annotations["description"] == "" {
			t.Errorf("%s has no summary or no description", alert.Alert)
		}
		severity := fmt.Sprintf("| [%s](#%s) | %s |", alert.Alert, strings.ToLower(alert.Alert),
			alert.Labels["severity"])
		if !strings.Contains(page, severity) {
			t.Errorf("the table of docs/alerts.md lacks %q", severity)
		}
		if !slices.Contains(sections, alert.Alert) {
			t.Errorf("docs/alerts.md has no section %s", alert.Alert)
		}
		sections = slices.DeleteFunc(sections, func(s string) bool { return s == alert.Alert })
	}
	if len(sections) > 0 {
		t.Errorf("docs/alerts.md explains %q, which are not alerts", sections)
	}
}

// temporary lists the reasons that disappear without an operator.
var temporary = []string{"Canceled", "OperationPending", "DiskProofPending", "SnapshotNotReady",
	"DiskBusy"}

func TestEveryLastingReasonFiresExactlyOneAlert(t *testing.T) {
	all := healthy()
	for _, reason := range reasons(t) {
		all[leader.failed("ControllerPublishVolume", reason)] = eachMinute
	}
	raised := map[string][]string{}
	found, _ := firing(t, interval, all)
	for _, alert := range found {
		reason := alert.Labels.Get("reason")
		raised[reason] = append(raised[reason], alert.Labels.Get("alertname"))
	}
	for _, reason := range reasons(t) {
		want := 1
		if slices.Contains(temporary, reason) {
			want = 0
		}
		if len(raised[reason]) != want {
			t.Errorf("calls that keep failing with %s raise the alerts %q, want %d", reason,
				raised[reason], want)
		}
	}
	if len(raised[""]) > 0 {
		t.Errorf("alerts without a reason: %q", raised[""])
	}
}

func TestEveryFailingCallThatChangesAVolumeFiresAnAlert(t *testing.T) {
	changes := regexp.MustCompile(`^(Create|Delete|(Controller|Node)(Publish|Unpublish)|` +
		`Node(Stage|Unstage))(Volume|Snapshot)$`)
	all, want := healthy(), []string{}
	for _, method := range values(t)["method"] {
		all[leader.failed(method, "Conflict")] = eachMinute
		if changes.MatchString(method) {
			want = append(want, method)
		}
	}
	found, _ := firing(t, interval, all)
	got := []string{}
	for _, alert := range found {
		got = append(got, alert.Labels.Get("method"))
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" || len(want) != 10 {
		t.Errorf("the calls that change a volume (-), and those with an alert (+):\n%s", diff)
	}
}
