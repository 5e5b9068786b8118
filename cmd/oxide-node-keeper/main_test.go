package main

import (
	"bytes"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/oxidecomputer/oxide-csi-plugin/keeper"
)

// page returns the text of a page of the documentation.
func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// written returns a default in one form for comparison: 1m30s and 90s become the same.
func written(text string) string {
	text = strings.ToLower(strings.Trim(text, "`\""))
	if d, err := time.ParseDuration(text); err == nil {
		return d.String()
	}
	return text
}

// spokenDefaults contains the defaults in the table for flags that have no default in the program.
var spokenDefaults = map[string]string{"node-name": "$k8s_node_name",
	"leader-election-namespace": "$k8s_namespace", "kubeconfig": "the pod's service account",
	"http-endpoint": "none"}

func TestTheDocumentationListsEveryFlag(t *testing.T) {
	var help bytes.Buffer
	if status := keeper.Main(t.Context(), []string{"--help"}, os.Getenv, &help, &help); status != 0 {
		t.Fatalf("--help ends with %d: %s", status, help.String())
	}
	program := regexp.MustCompile(`(?m)^  -([a-z-]+)(?: \S+)?\n    \t.*?(?: \(default (\S+)\))?$`)
	want := maps.Clone(spokenDefaults)
	for _, m := range program.FindAllStringSubmatch(help.String(), -1) {
		if want[m[1]] == "" && m[1] != "version" {
			want[m[1]] = written(m[2])
		}
	}
	_, table, _ := strings.Cut(page(t, "configuration.md"), "\n## The node keeper\n")
	table, _, _ = strings.Cut(table, "\n## ")
	got := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `--([a-z-]+)` \\| (.*?) ?\\| .+ \\|$")
	for _, m := range row.FindAllStringSubmatch(table, -1) {
		got[m[1]] = written(m[2])
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 20 {
		t.Errorf("the program (-) and docs/configuration.md (+):\n%s", diff)
	}
}

// The types are compared by the metrics' names: a registry does not describe types, and does not
// return a vector that has no sample.
func TestTheDocumentationListsEveryMetric(t *testing.T) {
	described := make(chan *prometheus.Desc)
	go func() {
		defer close(described)
		keeper.NewMetrics().Registry.Describe(described)
	}()
	want := map[string]string{}
	parts := regexp.MustCompile(`fqName: "(\w+)".*variableLabels: \{([^}]*)\}`)
	for desc := range described {
		m := parts.FindStringSubmatch(desc.String())
		kind := "gauge"
		switch {
		case strings.HasSuffix(m[1], "_total"):
			kind = "counter"
		case strings.HasSuffix(m[1], "_seconds"):
			kind = "histogram"
		}
		labels := strings.FieldsFunc(m[2], func(r rune) bool { return r == ',' })
		want[m[1]] = strings.Join(append([]string{kind}, slices.Sorted(slices.Values(labels))...), " ")
	}
	got := map[string]string{}
	row := regexp.MustCompile("(?m)^\\| `(oxide_node_keeper_\\w+)` \\| (\\w+) \\| (.*?) ?\\| ")
	for _, m := range row.FindAllStringSubmatch(page(t, "metrics.md"), -1) {
		labels := regexp.MustCompile(`\w+`).FindAllString(m[3], -1)
		got[m[1]] = strings.Join(append([]string{m[2]}, slices.Sorted(slices.Values(labels))...), " ")
	}
	if diff := cmp.Diff(want, got); diff != "" || len(want) < 5 {
		t.Errorf("the program (-) and docs/metrics.md (+):\n%s", diff)
	}
}
