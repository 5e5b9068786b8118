//go:build e2e

package e2e

import (
	"fmt"
	"os"
	"strings"
)

// settings contains what e2e/run has prepared.
type settings struct {
	nodeImage, kubernetes, crds, work, evidence, standIns string
	archives                                              []string
	// previous is the directory of the previous release, and previousName its name; both are empty
	// without one.
	previous, previousName string
	// chart is the chart of a release; empty means the chart of this tree.
	chart string
	// reuse uses the cluster that an earlier run has kept, and its installation.
	offline, keep, reuse bool
}

// readSettings reads the environment. Its error names missing variables.
func readSettings() (settings, error) {
	var missing []string
	get := func(name string) string {
		value := os.Getenv(name)
		if value == "" {
			missing = append(missing, name)
		}
		return value
	}
	set := settings{
		nodeImage: get("E2E_NODE_IMAGE"), kubernetes: get("E2E_KUBERNETES"),
		crds: get("E2E_CRDS"), work: get("E2E_WORK"), evidence: get("E2E_EVIDENCE"),
		previous: os.Getenv("E2E_PREVIOUS"), previousName: os.Getenv("E2E_PREVIOUS_NAME"),
		chart:    os.Getenv("E2E_CHART"),
		archives: strings.Split(get("E2E_ARCHIVES"), ":"),
		standIns: os.Getenv("E2E_STANDINS"),
		offline:  os.Getenv("E2E_OFFLINE") == "1", keep: os.Getenv("KEEP") == "1",
		reuse: os.Getenv("E2E_REUSE") == "1",
	}
	if len(missing) > 0 {
		return set, fmt.Errorf("the suite needs a prepared machine, and %s is not set: run it with "+
			"go run ./e2e/run, which prepares one", strings.Join(missing, ", "))
	}
	return set, nil
}
