package conformance

import (
	"context"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// diffVerb compares two reports.
func diffVerb(_ context.Context, p *Program, args []string) (int, error) {
	if len(args) != 2 {
		return ExitUsage, fmt.Errorf("diff takes two reports, each a folder or its report.json; "+
			"found %d arguments", len(args))
	}
	var both [2]*report.Report
	for i, path := range args {
		var err error
		if both[i], err = report.Read(path); err != nil {
			return ExitUsage, err
		}
	}
	difference := report.Diff(both[0], both[1])
	p.say("%s", difference)
	if difference.Worse() {
		return ExitFails, nil
	}
	return ExitConforms, nil
}
