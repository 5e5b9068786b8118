package sanity

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

func TestEverySkipNeedsAnExplanationAndEveryExplanationASkip(t *testing.T) {
	skips := []explainedSkip{
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
	}}
	figures, faults := audit(report, skips, true)
	want := "FIGURE sanity specs=5 passed=1 failed=1 skipped_explained=1 seconds=0.0"
	if got := figures.figureLine("sanity"); got != want {
		t.Errorf("figures\n got %s\nwant %s", got, want)
	}
	if text := strings.Join(faults, "\n"); len(faults) != 3 ||
		!strings.Contains(text, "dreaming (not today)") ||
		!strings.Contains(text, "held back") || !strings.Contains(text, "CAP-13") {
		t.Errorf("faults are %q, want those of dreaming, held back and CAP-13", faults)
	}
	if _, faults := audit(report, skips, false); len(faults) != 2 {
		t.Errorf("faults of a partial run are %q, want no unused explanation", faults)
	}
}
