package sanity

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// explainedSkip is a spec that may be skipped, and why. Anything else that is skipped fails the
// suite, and so does an entry here that explains nothing.
type explainedSkip struct {
	// spec matches the whole text of the spec, containers included.
	spec *regexp.Regexp
	// Capability is the row of the capabilities that the driver declares or withholds.
	capability string
	// reason is the rack's or the standard's, in a few words.
	reason string
}

// csiSanitySkips are the specs of csi-sanity that do not apply to this driver.
var csiSanitySkips = []explainedSkip{
	{regexp.MustCompile(`GroupController Service \[GroupController`), "CAP-3",
		"a rack has no snapshot of several disks at one moment"},
	{regexp.MustCompile(`creating a snapshot with accessibility requirements`), "CAP-5",
		"a snapshot is reachable wherever its rack is"},
	{regexp.MustCompile(`should create volume from an existing source volume`), "CAP-11",
		"a rack cannot clone a disk, only a snapshot of it"},
	{regexp.MustCompile(`should fail when the volume source volume is not found`), "CAP-11",
		"a rack cannot clone a disk, only a snapshot of it"},
	{regexp.MustCompile(`should fail when the volume is already published but is incompatible`),
		"CAP-12", "a rack attaches disks for reading and writing only"},
	{regexp.MustCompile(`ExpandVolume \[Controller Server\]`), "CAP-13",
		"the size of a disk is fixed when it is created"},
	{regexp.MustCompile(`ModifyVolume \[Controller Server\]`), "CAP-17",
		"a disk has nothing that can be modified"},
	{regexp.MustCompile(`create volume with an? (invalid )?volume attribute class`), "CAP-17",
		"a disk has nothing that can be modified"},
	{regexp.MustCompile(`Node Service NodeExpandVolume`), "CAP-21",
		"the size of a disk is fixed when it is created"},
	{regexp.MustCompile(`pagination should detect volumes added between pages`), "CAP-8",
		"csi-sanity itself holds this case back as fragile"},
}

// attachSkips are the specs of csi-sanity that attach a disk to the running instance in which the
// suite runs. A rack that attaches only to stopped instances cannot run them.
var attachSkips = withReason("CAP-7", "this rack attaches disks to stopped instances only",
	`when publishing more volumes than the node max attach limit`,
	`volume lifecycle should work`,
	`volume lifecycle should be idempotent`,
	`already mounted at a different target path`,
	`NodeUnpublishVolume should remove target path`,
	`when volume does not exist on the specified path`,
	`NodeGetVolumeHealth should return health for a valid volume`,
	`Node Service should work`,
	`Node Service should be idempotent`,
)

func withReason(capability, reason string, specs ...string) []explainedSkip {
	var skips []explainedSkip
	for _, spec := range specs {
		skips = append(skips, explainedSkip{regexp.MustCompile(spec), capability, reason})
	}
	return skips
}

// figures are the counts of a finished suite.
type figures struct {
	specs, passed, failed, explained int
	seconds                          float64
}

// audit counts what a suite did, which may have run in parts, and checks its skips.
type audit struct {
	figures
	skips []explainedSkip
	// used counts the specs that each of skips explains.
	used []int
	// faults are the skips that nothing explains.
	faults []string
}

func newAudit(skips []explainedSkip) *audit {
	return &audit{skips: skips, used: make([]int, len(skips))}
}

// add counts a report.
func (a *audit) add(report types.Report) {
	a.seconds += report.RunTime.Seconds()
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt || leftOut(spec, report.SuiteConfig) {
			continue
		}
		a.specs++
		switch {
		case spec.State.Is(types.SpecStatePassed):
			a.passed++
		case !spec.State.Is(types.SpecStateSkipped|types.SpecStatePending) || barred(spec):
			a.failed++
		default:
			a.explain(spec)
		}
	}
}

func (a *audit) explain(spec types.SpecReport) {
	i := slices.IndexFunc(a.skips, func(s explainedSkip) bool {
		return s.spec.MatchString(spec.FullText())
	})
	if i < 0 {
		a.faults = append(a.faults, fmt.Sprintf("skipped without an explanation: %s (%s)",
			spec.FullText(), spec.Failure.Message))
		return
	}
	a.used[i]++
	a.explained++
}

// explanations say how many specs were skipped for which reason.
func (a *audit) explanations() []string {
	var lines []string
	for i, skip := range a.skips {
		if a.used[i] > 0 {
			lines = append(lines, fmt.Sprintf("%d skipped for %s, %s: %q",
				a.used[i], skip.capability, skip.reason, skip.spec))
		}
	}
	return lines
}

// unused are the explanations that explained nothing, which says something only of a suite that
// ran in full.
func (a *audit) unused() []string {
	var faults []string
	for i, skip := range a.skips {
		if a.used[i] == 0 {
			faults = append(faults, fmt.Sprintf(
				"nothing was skipped any more for %s (%s): take %q off the list",
				skip.capability, skip.reason, skip.spec))
		}
	}
	return faults
}

// leftOut reports whether the caller chose not to run a spec, which is not a skip: only those that
// were entered and left, or were held back by their author, count as skipped.
func leftOut(spec types.SpecReport, config types.SuiteConfig) bool {
	if spec.State.Is(types.SpecStatePending) {
		filter, err := types.ParseLabelFilter(config.LabelFilter)
		return err == nil && !filter(spec.Labels())
	}
	return spec.State.Is(types.SpecStateSkipped) && spec.Failure.IsZero()
}

// barred reports whether a spec could not run because the preparation of its container failed.
func barred(spec types.SpecReport) bool {
	return spec.Failure.Message == "Spec skipped because a BeforeAll node failed"
}

// figureLine is what the suite prints at its end, for machines too.
func (f figures) figureLine(suite string) string {
	return fmt.Sprintf("FIGURE %s specs=%d passed=%d failed=%d skipped_explained=%d seconds=%.1f",
		suite, f.specs, f.passed, f.failed, f.explained, f.seconds)
}

// fullRun reports whether a configuration leaves no spec out.
func fullRun(config types.SuiteConfig) bool {
	return config.LabelFilter == "" && len(config.FocusStrings) == 0 &&
		len(config.SkipStrings) == 0 && len(config.FocusFiles) == 0 && len(config.SkipFiles) == 0
}

// skipPattern joins the entries' patterns for ginkgo's own filter.
func skipPattern(skips []explainedSkip) string {
	var patterns []string
	for _, skip := range skips {
		patterns = append(patterns, "("+skip.spec.String()+")")
	}
	return strings.Join(patterns, "|")
}
