//go:build linux

package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// workDir creates a directory for the spec. Its path is short enough for a socket.
func workDir() string {
	GinkgoHelper()
	dir, err := os.MkdirTemp(theRun.Dir, "work-")
	Expect(err).NotTo(HaveOccurred())
	DeferCleanup(os.RemoveAll, dir)
	return dir
}

// secrets are the secrets that an orchestrator may pass to every RPC. The driver needs none.
func secrets() map[string]string {
	return map[string]string{"user.name_1-x": "me", "password": "pass-" + harness.Canary}
}

// secretMount returns a capability with secret mount flags.
func secretMount() *csi.VolumeCapability {
	capability := harness.Mounted("")
	capability.GetMount().MountFlags = []string{"x-" + harness.Canary}
	return capability
}

var _ = describeController("secrets", fixtureOptions{plugin: harness.PluginOptions{
	Env: map[string]string{"OXIDE_LOG_LEVEL": "debug"},
}}, func(f *fixture) {
	It("B-14 B-15 are ignored, and no log contains them, the mount flags or the token",
		func(ctx SpecContext) {
			f.secretLife(ctx, fresh("logged"))
			node := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeNode,
				Env: map[string]string{"OXIDE_LOG_LEVEL": "debug"}})
			f.secretNodeCalls(ctx, node)
			for _, p := range []*harness.Plugin{f.plugin, node} {
				log, err := os.ReadFile(p.LogFile)
				Expect(err).NotTo(HaveOccurred())
				Expect(string(log)).NotTo(ContainSubstring(harness.Canary))
				Expect(string(log)).NotTo(ContainSubstring(harness.TokenPrefix))
				Expect(string(log)).NotTo(ContainSubstring(f.rack.Token))
			}
			log, err := os.ReadFile(f.plugin.LogFile)
			Expect(err).NotTo(HaveOccurred())
			for _, rpc := range []string{"CreateVolume", "ControllerPublishVolume", "DeleteVolume"} {
				Expect(string(log)).To(ContainSubstring(rpc), "the log shows the calls")
			}
		})
})

// secretLife calls every RPC of the controller that accepts secrets, in the life of a volume.
func (f *fixture) secretLife(ctx context.Context, name string) {
	GinkgoHelper()
	node := f.rack.Instance("a").ID
	create := harness.CreateRequest(name)
	create.Secrets, create.VolumeCapabilities[0] = secrets(), secretMount()
	volume := f.created(ctx, create)
	publish := harness.PublishRequest(volume, node)
	publish.Secrets, publish.VolumeCapability = secrets(), secretMount()
	expectOK(ctx, f.ctl.ControllerPublishVolume, publish)
	_, err := f.ctl.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: volume.GetVolumeId(), Secrets: secrets(),
		VolumeCapabilities: []*csi.VolumeCapability{secretMount()},
	})
	Expect(err).NotTo(HaveOccurred())
	unpublish := harness.UnpublishRequest(volume, node)
	unpublish.Secrets = secrets()
	expectOK(ctx, f.ctl.ControllerUnpublishVolume, unpublish)
	snapshot, err := f.ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: name, SourceVolumeId: volume.GetVolumeId(), Secrets: secrets(),
	})
	Expect(err).NotTo(HaveOccurred())
	id := snapshot.GetSnapshot().GetSnapshotId()
	expectOK(ctx, f.ctl.ListSnapshots, &csi.ListSnapshotsRequest{Secrets: secrets()})
	expectOK(ctx, f.ctl.GetSnapshot, &csi.GetSnapshotRequest{SnapshotId: id, Secrets: secrets()})
	expectOK(ctx, f.ctl.DeleteSnapshot,
		&csi.DeleteSnapshotRequest{SnapshotId: id, Secrets: secrets()})
	expectOK(ctx, f.ctl.DeleteVolume,
		&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId(), Secrets: secrets()})
}

// secretNodeCalls calls the node's RPCs that accept secrets, for a volume that does not exist.
func (f *fixture) secretNodeCalls(ctx context.Context, node *harness.Plugin) {
	GinkgoHelper()
	staging := filepath.Join(node.Dir, "staging")
	Expect(os.Mkdir(staging, 0o755)).To(Succeed())
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err := node.Node().NodeStageVolume(short, &csi.NodeStageVolumeRequest{
		VolumeId: someUUID, StagingTargetPath: staging, VolumeCapability: secretMount(),
		Secrets:        secrets(),
		PublishContext: map[string]string{"diskName": "csi-not-there-at-all"},
	})
	Expect(err).To(HaveOccurred())
	_, err = node.Node().NodePublishVolume(ctx, &csi.NodePublishVolumeRequest{
		VolumeId: someUUID, StagingTargetPath: staging, VolumeCapability: secretMount(),
		TargetPath: filepath.Join(node.Dir, "target"), Secrets: secrets(),
	})
	Expect(err).To(HaveOccurred())
}

var _ = describeController("the token",
	fixtureOptions{rack: harness.RackOptions{Args: []string{"--token", ""}}},
	func(f *fixture) {
		It("D-63 is read again from its file, under load and without a restart",
			func(ctx SpecContext) {
				file := filepath.Join(workDir(), "token")
				rotated(file, harness.TokenPrefix+"first")
				p := f.controller(ctx, harness.PluginOptions{Env: map[string]string{
					"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": file,
				}})
				load, stop := context.WithCancel(ctx)
				done := make(chan error, 1)
				go func() { done <- listUntil(load, p.Controller()) }()
				for _, token := range []string{"second", "third", "fourth"} {
					rotated(file, harness.TokenPrefix+token)
					eventually(ctx, func() error {
						return errOf(p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{}))
					})
				}
				stop()
				Expect(<-done).NotTo(HaveOccurred(), "no call fails while the token is rotated")

				// A token that the rack does not know proves that the file is read again.
				rotated(file, "nobody")
				eventually(ctx, func() error {
					_, err := p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
					if code := codeOf(err); code != codes.Unauthenticated {
						return fmt.Errorf("a token of nobody gets %s", code)
					}
					return nil
				})
				rotated(file, harness.TokenPrefix+"fifth")
				eventually(ctx, func() error {
					return errOf(p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{}))
				})
				Expect(p.AwaitReady(ctx)).To(Succeed())

				// Without the file the last token is used, and Probe reports it.
				Expect(os.Remove(file)).To(Succeed())
				expectOK(ctx, p.Controller().ListVolumes, &csi.ListVolumesRequest{})
				expectReason(errOf(probe(ctx, p)), codes.FailedPrecondition, "TokenFileUnreadable")
				rotated(file, harness.TokenPrefix+"sixth")
				expectOK(ctx, p.Controller().ListVolumes, &csi.ListVolumesRequest{})
				Expect(p.AwaitReady(ctx)).To(Succeed())
			})
	})

// rotated writes a token into a file as a kubelet does: a new file replaces the old one.
func rotated(file, token string) {
	GinkgoHelper()
	Expect(os.WriteFile(file+".new", []byte(token+"\n"), 0o600)).To(Succeed())
	Expect(os.Rename(file+".new", file)).To(Succeed())
}

// listUntil lists volumes again and again until the context ends, and returns the first failure.
func listUntil(ctx context.Context, ctl csi.ControllerClient) error {
	for ctx.Err() == nil {
		_, err := ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})
		if err != nil && ctx.Err() == nil {
			return err
		}
	}
	return nil
}

var _ = describeController("a rack with a certificate of its own",
	fixtureOptions{rack: harness.RackOptions{TLS: true}}, func(f *fixture) {
		It("B-26 OX-9 is trusted only with the CA file, and an operator can add the file later",
			func(ctx SpecContext) {
				f.volume(ctx)
				p := startPlugin(ctx, f.rack, harness.PluginOptions{Mode: harness.ModeController,
					Env: map[string]string{"OXIDE_CA_FILE": ""}})
				_, err := p.Controller().CreateVolume(ctx, harness.CreateRequest(fresh("untrusted")))
				expectRefusal(err, codes.Unavailable, "certificate")
			})
	})
