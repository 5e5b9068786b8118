package monitoring

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/prometheus/model/labels"
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
// distance of samples and evaluations. It returns the alerts that fire at the end, and the names of
// those that have ever fired.
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
					t.Errorf("the %s of %s has a gap: %q", name, alert.Labels, text)
				}
			}
		}
	}
}
