//go:build linux

package sanity

import (
	"fmt"
	"io"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
)

// auditSuite registers the last step of the suite: it prints the figures, and fails if a skip has
// no explanation.
func auditSuite(name string, skips []csisuite.ExplainedSkip, out io.Writer) {
	ReportAfterSuite("every skip is explained", func(report types.Report) {
		audit := csisuite.NewAudit(skips)
		audit.Add(report)
		faults := audit.Faults
		if csisuite.FullRun(report.SuiteConfig) {
			faults = append(faults, audit.Unused()...)
		}
		fmt.Fprintf(out, "\n%s%s\n", bullets(audit.Explanations()), audit.Line(name))
		if len(faults) > 0 {
			Fail(fmt.Sprintf("%d skips are not in order:\n%s", len(faults), bullets(faults)))
		}
	})
}

func bullets(lines []string) string {
	var text strings.Builder
	for _, line := range lines {
		fmt.Fprintf(&text, "  %s\n", line)
	}
	return text.String()
}
