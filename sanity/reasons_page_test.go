//go:build linux

package sanity

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
)

// reasonsPage is the path of the page that explains every reason of the driver.
const reasonsPage = "../docs/reasons.md"

// reasonEntry matches the entry of a reason on the page. The line below the heading has the
// reason's codes.
var reasonEntry = regexp.MustCompile("(?m)^### `([A-Za-z0-9]+)`\n\n(.+)$")

// explainedReasons returns the reasons that the page explains, each with its codes.
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

// faultsOfReasons compares the page with the driver's reasons in the whole suite. Every reason
// must have occurred, with exactly the codes that the page names.
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

// happenElsewhere are the reasons that no caller can cause from outside. Tests of the driver
// cause them.
var happenElsewhere = []string{
	"Canceled",           // a caller that gave up gets no answer
	"FilesystemNotGrown", // no call fails with it, but a volume's health shows it
	"Internal",           // a bug
	"InstanceUnknown",    // a node without an identity does not start
}
