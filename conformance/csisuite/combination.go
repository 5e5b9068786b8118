package csisuite

import (
	"context"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc"
	"k8s.io/klog/v2"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Combination is one way in which csi-sanity meets the driver.
type Combination struct {
	// Filesystem is empty for raw block.
	Filesystem string
	// Split runs controller and node as two processes; otherwise one does both.
	Split bool
}

// Combinations are all ways that the driver promises.
func Combinations() []Combination {
	var all []Combination
	for _, split := range []bool{false, true} {
		for _, filesystem := range []string{"ext4", "xfs", "btrfs", ""} {
			all = append(all, Combination{Filesystem: filesystem, Split: split})
		}
	}
	return all
}

// Access is the filesystem, or "block".
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

// Labels are what a label filter can choose a combination by.
func (c Combination) Labels() Labels {
	if c.Split {
		return Label("csi-sanity", c.Access(), "split")
	}
	return Label("csi-sanity", c.Access(), "one")
}

// Config is csi-sanity's for this combination. Where to find the driver is added when it runs.
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
	// One half of the combinations asks for volumes and nodes whose IDs are UUIDs of nothing,
	// the other for IDs that no rack could have given.
	if c.Split {
		config.IDGen = uuids{}
	}
	config.DialOptions = append(config.DialOptions,
		grpc.WithChainUnaryInterceptor(withFilesystem(c.Filesystem), harness.ErrorRules))
	config.ControllerDialOptions = config.DialOptions
	return &config
}

// Place puts csi-sanity's directories below one that exists.
func Place(config *csisanity.TestConfig, dir string) {
	config.TargetPath = filepath.Join(dir, "mount")
	config.StagingPath = filepath.Join(dir, "staging")
}

// withFilesystem names the filesystem in every capability, which csi-sanity leaves to the driver's
// default.
func withFilesystem(filesystem string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		for _, capability := range capabilitiesOf(req) {
			if mount := capability.GetMount(); mount != nil {
				mount.FsType = filesystem
			}
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

func capabilitiesOf(req any) []*csi.VolumeCapability {
	switch req := req.(type) {
	case interface {
		GetVolumeCapabilities() []*csi.VolumeCapability
	}:
		return req.GetVolumeCapabilities()
	case interface{ GetVolumeCapability() *csi.VolumeCapability }:
		return []*csi.VolumeCapability{req.GetVolumeCapability()}
	}
	return nil
}

// removeEmpty removes a directory that must be empty. csi-sanity ignores the error of its own
// removal, and a leaked mount would show as a puzzle in the next spec.
func removeEmpty(path string) error {
	GinkgoHelper()
	entries, err := os.ReadDir(path)
	if os.IsNotExist(err) {
		return nil // unstaging may remove the staging directory
	}
	Expect(err).NotTo(HaveOccurred(), "read %s, which csi-sanity made", path)
	Expect(entries).To(BeEmpty(), "the driver left something in %s: %s", path, names(entries))
	Expect(os.Remove(path)).To(Succeed(), "is something still mounted at %s?", path)
	return nil
}

func names(entries []fs.DirEntry) string {
	var list []string
	for _, entry := range entries {
		list = append(list, entry.Name())
	}
	return strings.Join(list, ", ")
}

// uuids generates IDs that could be the rack's, but are of nothing.
type uuids struct{}

func (uuids) GenerateUniqueValidVolumeID() string { return uuid.NewString() }
func (uuids) GenerateInvalidVolumeID() string     { return uuid.NewString() }
func (uuids) GenerateUniqueValidNodeID() string   { return uuid.NewString() }
func (uuids) GenerateInvalidNodeID() string       { return uuid.NewString() }

// Quiet sends what csi-sanity logs into the report of the spec that logs it.
func Quiet() {
	klog.LogToStderr(false)
	klog.SetOutput(GinkgoWriter)
}
