package sanity

import (
	"fmt"
	"io"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
)

// auditSuite registers what ends the suite: the figures, and the failure for a skip that nothing
// explains.
func auditSuite(name string, skips []explainedSkip, out io.Writer) {
	ReportAfterSuite("every skip is explained", func(report types.Report) {
		audit := newAudit(skips)
		audit.add(report)
		faults := audit.faults
		if fullRun(report.SuiteConfig) {
			faults = append(faults, audit.unused()...)
		}
		fmt.Fprintln(out, audit.figureLine(name))
		if len(faults) > 0 {
			Fail(fmt.Sprintf("%d skips are not in order:\n%s", len(faults), bullets(faults)))
		}
	})
}

func bullets(lines []string) string {
	return "  " + strings.Join(lines, "\n  ")
}
