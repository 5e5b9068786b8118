// Package csisuite configures csi-sanity for the driver: the combinations, their settings, and
// the specs that may be skipped with a reason. The suite on simulated racks and the conformance
// program share it.
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

// Combination is one configuration in which csi-sanity runs against the driver.
type Combination struct {
	// Filesystem is empty for raw block.
	Filesystem string
	// Split runs controller and node as two processes. Otherwise one process is both.
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
	if c.Split {
		return Label("csi-sanity", c.Access(), "split")
	}
	return Label("csi-sanity", c.Access(), "one")
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
	// One half of the combinations asks for volumes and nodes with UUIDs that belong to no object,
	// and the other half for IDs that no rack gives.
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

// withFilesystem names the filesystem in every capability, because csi-sanity names none.
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
// removal, so a leaked mount would only appear as a confusing failure of the next spec.
func removeEmpty(path string) error {
	GinkgoHelper()
	entries, err := os.ReadDir(path)
	if os.IsNotExist(err) {
		return nil // unstaging may have removed it
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
