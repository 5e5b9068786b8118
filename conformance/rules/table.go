package rules

import (
	"fmt"
	"strings"
)

// tableHead is the text before the rules in simulator/ASSUMPTIONS.md.
const tableHead = `# What the simulator assumes of a rack

This table is written from the rules in conformance/rules, each of which has a check that runs on
any rack. To write it again: 'go test ./conformance/rules -run Assumptions -update'. The simulator
cites a rule's number where it imitates it. "Read" means found in the named source of
oxidecomputer/omicron (2026-08), dropshot or oxide.go; "tested" means asserted by omicron's own
integration tests; "inferred" is our reading without a source, and the first to check on a real
rack.

| | assumption | why it matters | source |
|---|---|---|---|
`

// Table returns the content of simulator/ASSUMPTIONS.md.
func Table() string {
	var text strings.Builder
	text.WriteString(tableHead)
	for _, rule := range All() {
		why := rule.Why
		if rule.Look != "" {
			why += fmt.Sprintf(" The driver looks first (`%s`), and leaves to the rack what changes after "+
				"that.", rule.Look)
		}
		fmt.Fprintf(&text, "| %s | %s | %s | %s |\n", rule.ID, rule.Says, why, rule.Source)
	}
	return text.String()
}
