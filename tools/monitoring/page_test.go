package monitoring

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/rulefmt"
)

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
		t.Errorf("docs/alerts.md explains %q, which are no alerts", sections)
	}
}

// byItself lists the reasons that disappear without help, or that no call of a volume can have.
var byItself = []string{"Canceled", "OperationPending", "DiskProofPending", "SnapshotNotReady",
	"DiskBusy"}

func TestEveryReasonThatStaysFiresExactlyOneAlert(t *testing.T) {
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
		if slices.Contains(byItself, reason) {
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

func TestEveryCallThatChangesAVolumeIsInAnAlert(t *testing.T) {
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
