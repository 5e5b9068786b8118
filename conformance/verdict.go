package conformance

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// judge sets the verdict and returns the exit status. A failure decides the verdict; next come
// the reasons that stopped the run, and then the parts that the rack blocked. A run in which
// nothing passed never conforms.
func (w *job) judge(ctx context.Context) int {
	r := w.report
	failed, passed := r.Count(report.Failed), r.Count(report.Passed)
	if err := w.lost(); err != nil {
		w.stopped = errors.Join(err, w.stopped)
	}
	if ctx.Err() != nil {
		r.Ledger.Left = nil // there was no time to delete it
	}
	wrong := failed + len(r.Ledger.Left) + len(r.Witness.Findings)
	switch {
	case ctx.Err() != nil && failed == 0:
		r.Verdict, r.Why = report.InterruptedRun, fmt.Sprintf("interrupted after %d results; what the "+
			"run had made was removed", len(r.Results))
		if w.stopped != nil {
			r.Why = fmt.Sprintf("interrupted after %d results, and: %s", len(r.Results),
				oneLine(w.stopped.Error()))
		}
		return ExitInterrupted
	case wrong > 0:
		r.Verdict, r.Why = report.DoesNotConform, whatIsWrong(r, w.stopped)
		if ctx.Err() != nil {
			return ExitInterrupted
		}
		return ExitFails
	case w.stopped != nil:
		r.Verdict, r.Why = report.Incomplete, oneLine(w.stopped.Error())
		return ExitUsage
	case passed == 0:
		r.Verdict, r.Why = report.Incomplete, "nothing was passed, so nothing is shown"
		return ExitUsage
	case r.Count(report.Interrupted) > 0 || len(notRun(r)) > 0:
		r.Verdict, r.Why = report.Incomplete, fmt.Sprintf("%d results were interrupted; without "+
			"any result: %s", r.Count(report.Interrupted), cmp.Or(strings.Join(notRun(r), ", "), "no part"))
		return ExitUsage
	case r.Count(report.Blocked) > 0:
		r.Verdict, r.Why = report.BlockedByRack, fmt.Sprintf("the rack attaches or "+
			"detaches disks of stopped instances only: %d of %d could not be run; the %d that "+
			"could have passed",
			r.Count(report.Blocked), len(r.Results)-r.Count(report.NotApplicable), passed)
		return ExitBlocked
	}
	r.Verdict, r.Why = report.Conforms, fmt.Sprintf("all %d passed", passed)
	if n := r.Count(report.NotTested); n > 0 {
		r.Why += fmt.Sprintf("; %d more could not be brought about here, and say why", n)
	}
	return ExitConforms
}

// notRun lists the selected parts that have no result.
func notRun(r *report.Report) []string {
	return slices.DeleteFunc(slices.Clone(r.Run.Selected), func(part string) bool {
		return slices.ContainsFunc(r.Results, func(result report.Result) bool {
			return result.Group == part
		})
	})
}

func whatIsWrong(r *report.Report, stopped error) string {
	failed := r.Count(report.Failed)
	var parts []string
	if failed > 0 {
		var names []string
		for _, result := range r.Results {
			if result.Status == report.Failed && len(names) < 3 {
				names = append(names, shortName(result))
			}
		}
		if failed > len(names) {
			names = append(names, "…")
		}
		parts = append(parts, fmt.Sprintf("%d of %d failed: %s", failed, len(r.Results),
			strings.Join(names, ", ")))
	}
	if n := len(r.Ledger.Left); n > 0 {
		parts = append(parts, fmt.Sprintf("%d objects were left behind", n))
	}
	if n := len(r.Witness.Findings); n > 0 {
		parts = append(parts, fmt.Sprintf("the witness contradicts %d times", n))
	}
	if stopped != nil {
		parts = append(parts, oneLine(stopped.Error()))
	}
	return strings.Join(parts, "; ")
}

func shortName(r report.Result) string {
	if r.ID != "" {
		return r.ID
	}
	return r.Group + " " + r.Name
}

// oneLine joins the lines of an error.
func oneLine(text string) string {
	lines := strings.FieldsFunc(text, func(r rune) bool { return r == '\n' })
	for i, line := range lines {
		lines[i] = strings.Join(strings.Fields(line), " ")
	}
	return strings.Join(lines, "; ")
}
