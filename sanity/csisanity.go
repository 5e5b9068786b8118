package sanity

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

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// combination is one way in which csi-sanity meets the driver.
type combination struct {
	// filesystem is empty for raw block.
	filesystem string
	// split runs controller and node as two processes; otherwise one does both.
	split bool
}

// combinations are all ways that the driver promises.
func combinations() []combination {
	var all []combination
	for _, split := range []bool{false, true} {
		for _, filesystem := range []string{"ext4", "xfs", "btrfs", ""} {
			all = append(all, combination{filesystem: filesystem, split: split})
		}
	}
	return all
}

// access is the filesystem, or "block".
func (c combination) access() string {
	if c.filesystem == "" {
		return "block"
	}
	return c.filesystem
}

func (c combination) String() string {
	if c.split {
		return c.access() + ", controller and node as two processes"
	}
	return c.access() + ", one process"
}

// labels are what a label filter can choose a combination by.
func (c combination) labels() Labels {
	if c.split {
		return Label("csi-sanity", c.access(), "split")
	}
	return Label("csi-sanity", c.access(), "one")
}

// config is csi-sanity's for this combination. Where to find the driver is added when it runs.
func (c combination) config() *csisanity.TestConfig {
	config := csisanity.NewTestConfig()
	config.TestVolumeAccessType = "mount"
	if c.filesystem == "" {
		config.TestVolumeAccessType = "block"
	}
	config.TestVolumeSize = harness.GiB
	config.TestNodeVolumeAttachLimit = true
	config.RemoveTargetPath = removeEmpty
	config.RemoveStagingPath = removeEmpty
	// One half of the combinations asks for volumes and nodes whose IDs are UUIDs of nothing,
	// the other for IDs that no rack could have given.
	if c.split {
		config.IDGen = uuids{}
	}
	config.DialOptions = append(config.DialOptions,
		grpc.WithChainUnaryInterceptor(withFilesystem(c.filesystem), harness.ErrorRules))
	config.ControllerDialOptions = config.DialOptions
	return &config
}

// place puts csi-sanity's directories below one that exists.
func place(config *csisanity.TestConfig, dir string) {
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

// quietCSISanity sends what csi-sanity logs into the report of the spec that logs it.
func quietCSISanity() {
	klog.LogToStderr(false)
	klog.SetOutput(GinkgoWriter)
}
