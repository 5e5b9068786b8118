package doctor

import (
	"regexp"
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// TestTheCommandOfEveryReasonOnlyReadsAndIsComplete asks for each reason's command where every name
// is known: none may stay a word in capitals.
func TestTheCommandOfEveryReasonOnlyReadsAndIsComplete(t *testing.T) {
	reads := regexp.MustCompile(`^(kubectl (get|describe|logs|exec|debug) |oxide (disk|instance) ` +
		`(view|disk list) |oxide-csi-plugin (doctor|audit) )`)
	unknown := regexp.MustCompile(`[{}]|\b[A-Z]{2,}\b|--delete`)
	c := resolve(healthy(t))[0]
	for reason, a := range advices {
		command := c.commandAt("", a.Next)
		if !reads.MatchString(command) || unknown.MatchString(command) || a.ByItself == "" ||
			a.Link != "" && at(a.Link) < 0 || !slices.Contains(csierr.Reasons(), reason) {
			t.Errorf("%s: %+v: %s", reason, a, command)
		}
	}
	if len(advices) != len(csierr.Reasons()) {
		t.Errorf("%d of %d reasons have an advice", len(advices), len(csierr.Reasons()))
	}
}
