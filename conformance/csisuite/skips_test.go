//go:build linux

package csisuite

import (
	"regexp"
	"strings"
	"testing"

	"github.com/onsi/ginkgo/v2/types"
)

func specReport(text string, state types.SpecState, message string) types.SpecReport {
	return types.SpecReport{LeafNodeType: types.NodeTypeIt, LeafNodeText: text, State: state,
		Failure: types.Failure{Message: message}}
}

func TestAuditFindsUnexplainedSkipsAndUnusedExplanations(t *testing.T) {
	skips := []ExplainedSkip{
		{regexp.MustCompile("cloning"), "CAP-11", "a rack cannot clone"},
		{regexp.MustCompile("expanding"), "CAP-13", "a rack cannot expand"},
	}
	report := types.Report{SpecReports: types.SpecReports{
		specReport("creating", types.SpecStatePassed, ""),
		specReport("cloning", types.SpecStateSkipped, "not supported"),
		specReport("dreaming", types.SpecStateSkipped, "not today"),
		specReport("held back", types.SpecStatePending, ""),
		specReport("not chosen", types.SpecStateSkipped, ""),
		specReport("failing", types.SpecStateFailed, "boom"),
		specReport("barred", types.SpecStateSkipped, "Spec skipped because a BeforeAll node failed"),
	}}
	audit := NewAudit(skips)
	audit.Add(report)
	want := "FIGURE sanity specs=6 passed=1 failed=2 skipped_explained=1 seconds=0.0"
	if got := audit.Line("sanity"); got != want {
		t.Errorf("figures\n got %s\nwant %s", got, want)
	}
	if text := strings.Join(audit.Faults, "\n"); len(audit.Faults) != 2 ||
		!strings.Contains(text, "dreaming (not today)") || !strings.Contains(text, "held back") {
		t.Errorf("faults are %q, want those of dreaming and held back", audit.Faults)
	}
	if unused := audit.Unused(); len(unused) != 1 || !strings.Contains(unused[0], "CAP-13") {
		t.Errorf("unused explanations are %q, want CAP-13's", unused)
	}
}

func TestAuditIgnoresPendingSpecsThatTheFilterExcludes(t *testing.T) {
	held := specReport("held back", types.SpecStatePending, "")
	held.LeafNodeLabels = []string{"ext4"}
	for filter, want := range map[string]int{"": 1, "ext4": 1, "xfs": 0} {
		audit := NewAudit(nil)
		audit.Add(types.Report{SuiteConfig: types.SuiteConfig{LabelFilter: filter},
			SpecReports: types.SpecReports{held}})
		if audit.Specs != want {
			t.Errorf("with the filter %q %d specs count, want %d", filter, audit.Specs, want)
		}
	}
}
