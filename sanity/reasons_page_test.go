//go:build linux

package sanity

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// reasonsPage is the page that explains every reason of the driver, seen from this package.
const reasonsPage = "../docs/reasons.md"

// reasonEntry is where the page explains a reason; the line below has its codes.
var reasonEntry = regexp.MustCompile("(?m)^### `([A-Za-z0-9]+)`\n\n(.+)$")

// explainedReasons are the reasons that the page explains, each with its codes.
func explainedReasons() (map[string]string, error) {
	page, err := os.ReadFile(reasonsPage)
	if err != nil {
		return nil, fmt.Errorf("read the page of reasons: %w", err)
	}
	reasons := map[string]string{}
	for _, match := range reasonEntry.FindAllSubmatch(page, -1) {
		reasons[string(match[1])] = string(match[2])
	}
	return reasons, nil
}

// faultsOfReasons compares the page with what the driver said in the whole suite: every reason has
// to have happened, with the codes that the page names and no others.
func faultsOfReasons(file string) ([]string, error) {
	explained, err := explainedReasons()
	if err != nil {
		return nil, err
	}
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("read the reasons that the driver gave: %w", err)
	}
	var faults []string
	happened := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		reason, code, _ := strings.Cut(strings.TrimSpace(line), " ")
		if happened[reason] = true; !strings.Contains(explained[reason], "`"+code+"`") {
			faults = append(faults, fmt.Sprintf("%s came with %s, the page says %q", reason, code,
				explained[reason]))
		}
	}
	for reason := range explained {
		if !happened[reason] && !slices.Contains(happenElsewhere, reason) {
			faults = append(faults, "no spec brought about "+reason)
		}
	}
	slices.Sort(faults)
	return slices.Compact(faults), nil
}

// happenElsewhere are the reasons that no caller can bring about from outside; tests of the driver
// make them happen.
var happenElsewhere = []string{
	"Canceled",           // a caller that gave up hears nothing
	"FilesystemNotGrown", // no call fails with it; a volume's health has it
	"Internal",           // a bug
	"InstanceUnknown",    // a node without an identity does not start
}
