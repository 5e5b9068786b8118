package monitoring

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/common/model"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/rulefmt"
	"github.com/prometheus/prometheus/promql/parser"
	"github.com/prometheus/prometheus/promql/promqltest"
	"github.com/prometheus/prometheus/rules"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

const alertsFile = "../../deploy/chart/monitoring/alerts.yaml"

// interval is the default time between two samples, and between two evaluations of the rules.
const interval = time.Minute

// series maps a metric with its labels to its samples, in promtool's notation.
type series map[string]string

// firing loads the series and evaluates the rules after each sample, like Prometheus.
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

func names(alerts []*rules.Alert) []string {
	all := []string{}
	for _, alert := range alerts {
		all = append(all, alert.Labels.Get("alertname"))
	}
	slices.Sort(all)
	return slices.Compact(all)
}

// checkTexts checks that no value is missing in the alerts' summaries and descriptions.
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

func read(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

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

func alerts(t *testing.T) []rulefmt.Rule {
	t.Helper()
	return slices.DeleteFunc(ruleList(t), func(r rulefmt.Rule) bool { return r.Alert == "" })
}

// reasons returns the reasons in docs/reasons.md. A test of the driver checks that none is missing.
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
	sections, all := []string{}, []string{}
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
		all = append(all, alert.Alert)
	}
	slices.Sort(all)
	slices.Sort(sections)
	if diff := cmp.Diff(all, sections); diff != "" {
		t.Errorf("the alerts (-) and the sections of docs/alerts.md (+):\n%s", diff)
	}
}

// temporary is the list of the reasons of failures that end without an operator's help.
var temporary = []string{"Canceled", "OperationPending", "DiskProofPending", "SnapshotNotReady",
	"DiskBusy"}

var volumeMethods = regexp.MustCompile(`^(Create|Delete|(Controller|Node)(Publish|Unpublish)|` +
	`Node(Stage|Unstage))(Volume|Snapshot)$`)

func TestEachLastingFailureOfAVolumeCallCausesOneAlert(t *testing.T) {
	const attach, lasting = "ControllerPublishVolume", "Conflict"
	all, want, got := healthy(), []string{}, []string{}
	fails := func(method, reason string, lasts bool) {
		all[leader.failed(method, reason)] = eachMinute
		if lasts {
			want = append(want, method+" "+reason)
		}
	}
	for _, reason := range reasons(t) {
		fails(attach, reason, !slices.Contains(temporary, reason))
	}
	methods := 0
	for _, method := range values(t)["method"] {
		if volumeMethods.MatchString(method) {
			methods++
		}
		if method != attach { // the loop above has it with all reasons
			fails(method, lasting, volumeMethods.MatchString(method))
		}
	}
	found, _ := firing(t, interval, all)
	for _, alert := range found {
		got = append(got, alert.Labels.Get("method")+" "+alert.Labels.Get("reason"))
	}
	slices.Sort(got)
	slices.Sort(want)
	if diff := cmp.Diff(want, got); diff != "" || methods != 10 {
		t.Errorf("the lasting failures (-), and those with an alert (+):\n%s", diff)
	}
}

// targetLabels lists the labels that Prometheus adds. Some installations lack the last three.
var targetLabels = []string{"job", "instance", "namespace", "pod", "cluster"}

// metricRows returns the rows of docs/metrics.md: name, type and labels of each of our metrics.
func metricRows(t *testing.T) [][]string {
	t.Helper()
	row := regexp.MustCompile("(?m)^\\| `(oxide_(?:csi|node_keeper)_\\w+)` \\| (\\w+) \\| (.*?) ?\\| ")
	rows := row.FindAllStringSubmatch(read(t, "docs/metrics.md"), -1)
	if len(rows) < 20 {
		t.Fatalf("found %d metrics; is this the right page?", len(rows))
	}
	return rows
}

// known() returns the labels of each metric that a rule may use: our metrics, "up", and recorded
// ones. Tests of the driver and of the keeper check that docs/metrics.md has all of our metrics.
func known(t *testing.T) map[string][]string {
	t.Helper()
	all := map[string][]string{"up": targetLabels,
		"oxide_csi:volume_calls:increase10m": append([]string{"method", "reason"}, targetLabels...)}
	for _, m := range metricRows(t) {
		own := slices.Clone(targetLabels)
		for _, label := range regexp.MustCompile("`(\\w+)`").FindAllStringSubmatch(m[3], -1) {
			own = append(own, label[1])
		}
		if m[2] != "histogram" {
			all[m[1]] = own
			continue
		}
		all[m[1]+"_bucket"] = append([]string{"le"}, own...)
		all[m[1]+"_sum"], all[m[1]+"_count"] = own, own
	}
	return all
}

// values() maps a label to its possible values. It omits labels with arbitrary values.
func values(t *testing.T) map[string][]string {
	t.Helper()
	var methods, results []string
	for _, service := range []grpc.ServiceDesc{csi.Identity_ServiceDesc, csi.Controller_ServiceDesc,
		csi.Node_ServiceDesc} {
		for _, method := range service.Methods {
			methods = append(methods, method.MethodName)
		}
	}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		results = append(results, code.String())
	}
	return map[string][]string{"method": methods, "reason": reasons(t), "code": results,
		"step":   {"Draining", "Stopping", "Attaching", "Starting", "Returning"},
		"result": {"done", "problem", "ok", "error"}}
}

// problems() returns an error for each metric, label or value in an expression that does not exist.
func problems(t *testing.T, text string) (found []string) {
	t.Helper()
	expression, err := parser.ParseExpr(text)
	if err != nil {
		return []string{err.Error()}
	}
	series := known(t)
	every := slices.Concat(slices.Collect(maps.Values(series))...)
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		var used []string
		switch n := node.(type) {
		case *parser.VectorSelector:
			if series[n.Name] == nil {
				found = append(found, "no process has the metric "+n.Name)
			}
			for _, matcher := range n.LabelMatchers {
				found = append(found, problemsOfMatcher(t, series[n.Name], matcher)...)
			}
		case *parser.AggregateExpr:
			used = n.Grouping
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = n.VectorMatching.MatchingLabels
			}
		}
		for _, label := range used {
			if !slices.Contains(every, label) {
				found = append(found, "no metric has the label "+label)
			}
		}
		return nil
	})
	return found
}

// problemsOfMatcher returns an error if the metric lacks the matcher's label, or if the label never
// has a value of the matcher. A regular expression with parentheses need match only one value.
func problemsOfMatcher(t *testing.T, own []string, m *labels.Matcher) (found []string) {
	t.Helper()
	if m.Name == labels.MetricName {
		return nil
	}
	if !slices.Contains(own, m.Name) {
		found = append(found, fmt.Sprintf("the metric of %s has the labels %q", m, own))
	}
	all := values(t)[m.Name]
	if strings.Contains(m.Value, "(") {
		if !slices.ContainsFunc(all, m.Matches) {
			found = append(found, fmt.Sprintf("%s matches no value", m))
		}
		return found
	}
	for value := range strings.SplitSeq(m.Value, "|") {
		if value != "" && !slices.Contains(all, value) {
			found = append(found, fmt.Sprintf("%s: the label never has the value %q", m, value))
		}
	}
	return found
}

func TestAlertsUseExistingMetricsLabelsAndValues(t *testing.T) {
	for _, rule := range ruleList(t) {
		for _, problem := range problems(t, rule.Expr) {
			t.Errorf("%s: %s", rule.Alert+rule.Record, problem)
		}
	}
}

func TestAnUnknownMetricLabelOrValueIsReported(t *testing.T) {
	for _, wrong := range []string{
		`oxide_csi_rack_upp`,
		`oxide_csi_call_seconds`,
		`oxide_csi_rack_up{method="Probe"}`,
		`oxide_csi_calls_total{reason="DiskNotEmpty"}`,
		`oxide_csi_calls_total{method=~"CreateVolume|MakeVolume"}`,
		`oxide_csi_calls_total{method=~".*(Volumez|Disk)"}`,
		`oxide_csi_changes_total{event="Eaten"}`,
		`sum by (reasons) (oxide_csi_calls_total)`,
		`oxide_csi_rack_up and on (node) oxide_csi_rack_up`,
		`rate(oxide_csi_calls_total`,
	} {
		if len(problems(t, wrong)) == 0 {
			t.Errorf("the check accepts %s", wrong)
		}
	}
}

type dashboard struct {
	UID, Title    string
	SchemaVersion int
	Templating    struct {
		List []struct{ Name, Type, AllValue string }
	}
	Panels []struct {
		ID                       int
		Type, Title, Description string
		Datasource               struct{ UID string }
		GridPos                  struct{ H, W, X, Y int }
		FieldConfig              struct {
			Defaults struct{ Unit string }
		}
		Targets []struct {
			RefID, Expr string
			Datasource  struct{ UID string }
		}
	}
}

func TestTheDashboardIsValidAndUsesExistingMetrics(t *testing.T) {
	var d dashboard
	text := read(t, "deploy/chart/monitoring/dashboard.json")
	if err := json.Unmarshal([]byte(text), &d); err != nil {
		t.Fatal(err)
	}
	if d.UID == "" || d.Title == "" || d.SchemaVersion == 0 || len(d.Panels) == 0 {
		t.Errorf("the dashboard has the uid %q, the title %q, the schema %d and %d panels", d.UID,
			d.Title, d.SchemaVersion, len(d.Panels))
	}
	var variables []string
	for _, v := range d.Templating.List {
		variables = append(variables, v.Name)
	}
	if !slices.Equal(variables, []string{"datasource", "cluster"}) ||
		d.Templating.List[1].AllValue != ".*" {
		t.Errorf("the variables are %v, want the data source, and the cluster with all of them as .*, "+
			"so that series without the label are shown, too", d.Templating.List)
	}
	ids, cells, shown := map[int]bool{}, map[[2]int]string{}, ""
	for _, p := range d.Panels {
		if ids[p.ID] || p.Description == "" || p.FieldConfig.Defaults.Unit == "" || len(p.Targets) == 0 {
			t.Errorf("panel %d (%s) lacks an id of its own, a description, a unit or a query", p.ID, p.Title)
		}
		ids[p.ID] = true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := cells[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("%s lies on %q or beyond the edge, at column %d, row %d", p.Title, other, x, y)
				}
				cells[[2]int{x, y}] = p.Title
			}
		}
		for _, query := range p.Targets {
			if p.Datasource.UID != "${datasource}" || query.Datasource.UID != "${datasource}" {
				t.Errorf("%s does not ask the chosen data source", p.Title)
			}
			for _, part := range unselected(t, query.Expr) {
				t.Errorf("%s: %s is of every cluster, want it with cluster=~\"$cluster\"", p.Title, part)
			}
			for _, problem := range problems(t, strings.NewReplacer("$__rate_interval", "5m",
				`cluster=~"$cluster"`, `cluster=~""`).Replace(query.Expr)) {
				t.Errorf("%s: %s", p.Title, problem)
			}
			shown += query.Expr + "\n"
		}
	}
	for _, metric := range metricRows(t) {
		if name := metric[1]; name != "oxide_csi_rack_api_info" && !strings.Contains(shown, name) {
			t.Errorf("no panel shows %s", name)
		}
	}
}

func unselected(t *testing.T, query string) (found []string) {
	t.Helper()
	expression, err := parser.ParseExpr(strings.ReplaceAll(query, "$__rate_interval", "5m"))
	if err != nil {
		t.Fatal(err)
	}
	for _, matchers := range parser.ExtractSelectors(expression) {
		if !slices.ContainsFunc(matchers,
			func(m *labels.Matcher) bool { return m.Name == "cluster" && m.Value == "$cluster" }) {
			found = append(found, fmt.Sprint(matchers))
		}
	}
	return found
}
