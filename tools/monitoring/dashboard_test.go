package monitoring

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/promql/parser"
)

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
