package monitoring

import (
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
