package monitoring

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
)

// targetLabels contains labels that Prometheus adds to every series. namespace, pod and cluster are
// there only if an operator adds them.
var targetLabels = []string{"job", "instance", "namespace", "pod", "cluster"}

// metricRows returns name, type and labels of our metrics from docs/metrics.md.
func metricRows(t *testing.T) [][]string {
	t.Helper()
	row := regexp.MustCompile("(?m)^\\| `(oxide_(?:csi|node_keeper)_\\w+)` \\| (\\w+) \\| (.*?) ?\\| ")
	rows := row.FindAllStringSubmatch(read(t, "docs/metrics.md"), -1)
	if len(rows) < 20 {
		t.Fatalf("found %d metrics; is this the right page?", len(rows))
	}
	return rows
}

// known returns the labels of each series that an expression may name: our metrics, Prometheus'
// own, and those that the rules record. Other tests check that the page lists all of our metrics.
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

// values returns the values that the labels in an expression may have.
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

// problems returns errors about the names in an expression that do not exist.
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

// problemsOfMatcher returns errors about a matcher's label, if it is not in own (the metric's
// labels), and about values that the label never has. Each alternative of a regular expression has
// to be a value; an alternative with parentheses has to match a value.
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

func TestEveryNameInAnAlertExists(t *testing.T) {
	for _, rule := range ruleList(t) {
		for _, problem := range problems(t, rule.Expr) {
			t.Errorf("%s: %s", rule.Alert+rule.Record, problem)
		}
	}
}

func TestANameThatDoesNotExistIsReported(t *testing.T) {
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

// dashboard contains the fields of Grafana's format that the test checks.
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

// unselected returns the series in a query that are not restricted to the chosen cluster.
func unselected(t *testing.T, query string) (found []string) {
	t.Helper()
	expression, err := parser.ParseExpr(strings.ReplaceAll(query, "$__rate_interval", "5m"))
	if err != nil {
		t.Fatal(err)
	}
	parser.Inspect(expression, func(node parser.Node, _ []parser.Node) error {
		if n, ok := node.(*parser.VectorSelector); ok && !slices.ContainsFunc(n.LabelMatchers,
			func(m *labels.Matcher) bool { return m.Name == "cluster" && m.Value == "$cluster" }) {
			found = append(found, n.String())
		}
		return nil
	})
	return found
}
