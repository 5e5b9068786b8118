// Package csisuite configures csi-sanity for the driver. It lists the combinations to test (each
// filesystem, with the driver as one process and as two), and the specs that may be skipped, with
// the reasons. The sanity suite on simulated racks and the conformance program share the package.
package csisuite

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Combination is one configuration in which csi-sanity runs against the driver.
type Combination struct {
	// Filesystem is empty for raw block.
	Filesystem string
	// Split means that controller and node are two processes instead of one.
	Split bool
}

// Combinations returns all combinations that the driver supports.
func Combinations() []Combination {
	var all []Combination
	for _, split := range []bool{false, true} {
		for _, filesystem := range []string{"ext4", "xfs", "btrfs", ""} {
			all = append(all, Combination{Filesystem: filesystem, Split: split})
		}
	}
	return all
}

// Access returns the filesystem, or "block".
func (c Combination) Access() string {
	if c.Filesystem == "" {
		return "block"
	}
	return c.Filesystem
}

func (c Combination) String() string {
	if c.Split {
		return c.Access() + ", controller and node as two processes"
	}
	return c.Access() + ", one process"
}

// Labels returns the labels by which a label filter can choose a combination.
func (c Combination) Labels() Labels {
	processes := map[bool]string{true: "split", false: "one"}[c.Split]
	return Label("csi-sanity", c.Access(), processes)
}

// Config returns csi-sanity's configuration for this combination. The caller adds the driver's
// address.
func (c Combination) Config() *csisanity.TestConfig {
	config := csisanity.NewTestConfig()
	config.TestVolumeAccessType = "mount"
	if c.Filesystem == "" {
		config.TestVolumeAccessType = "block"
	}
	config.TestVolumeSize = harness.GiB
	config.TestNodeVolumeAttachLimit = true
	config.RemoveTargetPath = removeEmpty
	config.RemoveStagingPath = removeEmpty
	// With two processes, csi-sanity asks for unknown volumes and nodes by UUIDs. With one process it
	// asks by its own IDs, which are no UUIDs and so cannot exist on a rack.
	if c.Split {
		config.IDGen = uuids{}
	}
	config.DialOptions = append(config.DialOptions,
		grpc.WithChainUnaryInterceptor(withFilesystem(c.Filesystem), harness.ErrorRules))
	config.ControllerDialOptions = config.DialOptions
	return &config
}

// Place makes csi-sanity use directories in dir. The directory dir has to exist.
func Place(config *csisanity.TestConfig, dir string) {
	config.TargetPath = filepath.Join(dir, "mount")
	config.StagingPath = filepath.Join(dir, "staging")
}

// withFilesystem names the filesystem in every capability, because csi-sanity names none.
func withFilesystem(filesystem string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		var all []*csi.VolumeCapability
		switch req := req.(type) {
		case interface {
			GetVolumeCapabilities() []*csi.VolumeCapability
		}:
			all = req.GetVolumeCapabilities()
		case interface{ GetVolumeCapability() *csi.VolumeCapability }:
			all = append(all, req.GetVolumeCapability())
		}
		for _, capability := range all {
			if mount := capability.GetMount(); mount != nil {
				mount.FsType = filesystem
			}
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

// removeEmpty removes a directory, and fails the spec if the directory is not empty or is a mount
// point. csi-sanity ignores such an error, and then the next spec fails for a confusing reason.
func removeEmpty(path string) error {
	GinkgoHelper()
	entries, err := os.ReadDir(path)
	if os.IsNotExist(err) {
		return nil // unstaging may have removed it
	}
	Expect(err).NotTo(HaveOccurred(), "read %s, which csi-sanity made", path)
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	Expect(entries).To(BeEmpty(), "the driver left something in %s: %s", path,
		strings.Join(names, ", "))
	Expect(os.Remove(path)).To(Succeed(), "is something still mounted at %s?", path)
	return nil
}

// uuids generates IDs that have a UUID's form but belong to no object.
type uuids struct{}

func (uuids) GenerateUniqueValidVolumeID() string { return uuid.NewString() }
func (uuids) GenerateInvalidVolumeID() string     { return uuid.NewString() }
func (uuids) GenerateUniqueValidNodeID() string   { return uuid.NewString() }
func (uuids) GenerateInvalidNodeID() string       { return uuid.NewString() }

// Quiet sends csi-sanity's log lines to the report of the spec that writes them.
func Quiet() {
	klog.LogToStderr(false)
	klog.SetOutput(GinkgoWriter)
}

// ExplainedSkip is a spec that may be skipped, with the reason. A skipped spec without an
// ExplainedSkip fails the suite, and so does an ExplainedSkip without a skipped spec.
type ExplainedSkip struct {
	// Spec matches the whole text of the spec, containers included.
	Spec *regexp.Regexp
	// Capability is the ID, such as CAP-3, of the requirement for the tested capability.
	Capability string
	// Reason says in a few words why the spec does not apply.
	Reason string
}

// Skips are the specs of csi-sanity that do not apply to this driver.
var Skips = []ExplainedSkip{
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

// AttachSkip matches the specs of csi-sanity that attach a disk to the running instance in which
// the suite runs. They cannot pass on a rack that attaches disks only to stopped instances.
var AttachSkip = ExplainedSkip{regexp.MustCompile(
	`when publishing more volumes than the node max attach limit|` +
		`volume lifecycle should (work|be idempotent)|already mounted at a different target path|` +
		`NodeUnpublishVolume should remove target path|` +
		`when volume does not exist on the specified path|` +
		`NodeGetVolumeHealth should return health for a valid volume|` +
		`Node Service should (work|be idempotent)`), "CAP-7",
	"this rack attaches or detaches disks of stopped instances only"}

// Audit counts the specs of a suite, from one or more reports, and checks that skips are explained.
type Audit struct {
	Specs, Passed, Failed, Explained int
	Seconds                          float64
	skips                            []ExplainedSkip
	// used[i] is the number of skipped specs that skips[i] explains.
	used []int
	// Faults names the skipped specs that no entry of skips explains.
	Faults []string
}

// NewAudit returns an audit of a suite that may skip the given specs.
func NewAudit(skips []ExplainedSkip) *Audit {
	return &Audit{skips: skips, used: make([]int, len(skips))}
}

// Add counts the specs of a report.
func (a *Audit) Add(report types.Report) {
	a.Seconds += report.RunTime.Seconds()
	for _, spec := range report.SpecReports {
		if spec.LeafNodeType != types.NodeTypeIt || leftOut(spec, report.SuiteConfig) {
			continue
		}
		a.Specs++
		switch {
		case spec.State.Is(types.SpecStatePassed):
			a.Passed++
		case !spec.State.Is(types.SpecStateSkipped | types.SpecStatePending),
			spec.Failure.Message == "Spec skipped because a BeforeAll node failed":
			a.Failed++ // the setup of a skipped spec's container has failed
		default:
			if i := Explain(a.skips, spec); i >= 0 {
				a.used[i]++
				a.Explained++
				continue
			}
			a.Faults = append(a.Faults, fmt.Sprintf("skipped without an explanation: %s (%s)",
				spec.FullText(), spec.Failure.Message))
		}
	}
}

// Explain returns the index of the entry of skips that explains why a spec was skipped, or -1.
func Explain(skips []ExplainedSkip, spec types.SpecReport) int {
	return slices.IndexFunc(skips, func(s ExplainedSkip) bool {
		return s.Spec.MatchString(spec.FullText())
	})
}

// Unused describes the unused entries of skips. Call it only after a run of the whole suite.
func (a *Audit) Unused() []string {
	var faults []string
	for i, skip := range a.skips {
		if a.used[i] == 0 {
			faults = append(faults, fmt.Sprintf(
				"nothing was skipped any more for %s (%s): take %q off the list",
				skip.Capability, skip.Reason, skip.Spec))
		}
	}
	return faults
}

// leftOut reports whether a filter of the caller excluded a spec, which then does not count as
// skipped. A spec counts as skipped if it skips itself, or if its author marked it as pending.
func leftOut(spec types.SpecReport, config types.SuiteConfig) bool {
	if spec.State.Is(types.SpecStatePending) {
		filter, err := types.ParseLabelFilter(config.LabelFilter)
		return err == nil && !filter(spec.Labels())
	}
	return spec.State.Is(types.SpecStateSkipped) && spec.Failure.IsZero()
}

// Line returns the suite's result as one line that programs can parse.
func (a *Audit) Line(suite string) string {
	return fmt.Sprintf("FIGURE %s specs=%d passed=%d failed=%d skipped_explained=%d seconds=%.1f",
		suite, a.Specs, a.Passed, a.Failed, a.Explained, a.Seconds)
}
