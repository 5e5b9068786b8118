package sanity

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"
)

// secrets are what an orchestrator may hand to every RPC, though the driver needs none.
func secrets() map[string]string {
	return map[string]string{"user.name_1-x": "me", "password": "pass-" + canary}
}

// secretMount is a capability whose mount flags are nobody's business.
func secretMount() *csi.VolumeCapability {
	capability := mounted()
	capability.GetMount().MountFlags = []string{"x-" + canary}
	return capability
}

var _ = onStage("secrets", sceneOptions{plugin: PluginOptions{
	Env: map[string]string{"OXIDE_LOG_LEVEL": "debug"},
}}, func(s *scene) {
	It("B-14 are ignored by every RPC that can be given some", func(ctx SpecContext) {
		s.secretLife(ctx, fresh("ignored"))
	})

	It("B-15 are in no log, nor are mount flags and the token, at the highest verbosity",
		func(ctx SpecContext) {
			s.secretLife(ctx, fresh("logged"))
			node := s.rack.Plugin(ctx, PluginOptions{Mode: ModeNode,
				Env: map[string]string{"OXIDE_LOG_LEVEL": "debug"}})
			s.secretNodeCalls(ctx, node)
			for _, p := range []*Plugin{s.plugin, node} {
				log, err := os.ReadFile(p.LogFile)
				Expect(err).NotTo(HaveOccurred())
				Expect(string(log)).NotTo(ContainSubstring(canary))
				Expect(string(log)).NotTo(ContainSubstring(tokenMark))
				Expect(string(log)).NotTo(ContainSubstring(s.rack.Token))
			}
			log, err := os.ReadFile(s.plugin.LogFile)
			Expect(err).NotTo(HaveOccurred())
			for _, rpc := range []string{"CreateVolume", "ControllerPublishVolume", "DeleteVolume"} {
				Expect(string(log)).To(ContainSubstring(rpc), "the log shows the calls")
			}
		})

	It("B-16 are in no error, whatever is wrong with the request", func(ctx SpecContext) {
		// errorRules looks at every error of the suite; these requests carry what it looks for.
		for _, bad := range []change{
			func(req *csi.CreateVolumeRequest) { req.Name = "" },
			func(req *csi.CreateVolumeRequest) { req.VolumeCapabilities[0].AccessMode = nil },
			withParameter("color", "red"), withRange(2*gib, gib),
			func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities[0].GetMount().FsType = "ntfs"
			},
			func(req *csi.CreateVolumeRequest) {
				req.VolumeCapabilities[0].GetMount().MountFlags = []string{
					strings.Repeat(canary, 400)}
			},
			func(req *csi.CreateVolumeRequest) {
				req.Secrets = map[string]string{"password": strings.Repeat(canary, 400)}
			},
			func(req *csi.CreateVolumeRequest) { fromSnapshot(req, someUUID) },
		} {
			req := createRequest(fresh("secret"))
			req.Secrets, req.VolumeCapabilities[0] = secrets(), secretMount()
			bad(req)
			_, err := s.ctl.CreateVolume(ctx, req)
			Expect(err).To(HaveOccurred())
			Expect(errorFaultOf(err)).To(BeEmpty())
		}
	})
})

// secretLife calls every RPC of the controller that takes secrets, in the life of a volume.
func (s *scene) secretLife(ctx context.Context, name string) {
	GinkgoHelper()
	node := s.rack.Instance("a").ID
	create := createRequest(name)
	create.Secrets, create.VolumeCapabilities[0] = secrets(), secretMount()
	volume := s.created(ctx, create)
	publish := publishRequest(volume, node)
	publish.Secrets, publish.VolumeCapability = secrets(), secretMount()
	_, err := s.ctl.ControllerPublishVolume(ctx, publish)
	Expect(err).NotTo(HaveOccurred())
	_, err = s.ctl.ValidateVolumeCapabilities(ctx, &csi.ValidateVolumeCapabilitiesRequest{
		VolumeId: volume.GetVolumeId(), Secrets: secrets(),
		VolumeCapabilities: []*csi.VolumeCapability{secretMount()},
	})
	Expect(err).NotTo(HaveOccurred())
	unpublish := unpublishRequest(volume, node)
	unpublish.Secrets = secrets()
	_, err = s.ctl.ControllerUnpublishVolume(ctx, unpublish)
	Expect(err).NotTo(HaveOccurred())
	snapshot, err := s.ctl.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: name, SourceVolumeId: volume.GetVolumeId(), Secrets: secrets(),
	})
	Expect(err).NotTo(HaveOccurred())
	id := snapshot.GetSnapshot().GetSnapshotId()
	_, err = s.ctl.ListSnapshots(ctx, &csi.ListSnapshotsRequest{Secrets: secrets()})
	Expect(err).NotTo(HaveOccurred())
	_, err = s.ctl.GetSnapshot(ctx, &csi.GetSnapshotRequest{SnapshotId: id, Secrets: secrets()})
	Expect(err).NotTo(HaveOccurred())
	_, err = s.ctl.DeleteSnapshot(ctx,
		&csi.DeleteSnapshotRequest{SnapshotId: id, Secrets: secrets()})
	Expect(err).NotTo(HaveOccurred())
	_, err = s.ctl.DeleteVolume(ctx,
		&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId(), Secrets: secrets()})
	Expect(err).NotTo(HaveOccurred())
}

// secretNodeCalls calls the node's RPCs that take secrets, for a volume that is not there.
func (s *scene) secretNodeCalls(ctx context.Context, node *Plugin) {
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

var _ = onStage("the token", sceneOptions{rack: RackOptions{Args: []string{"--token", ""}}},
	func(s *scene) {
		It("D-63 is read again from its file, under load and without a restart",
			func(ctx SpecContext) {
				file := filepath.Join(workDir(), "token")
				rotate := func(token string) {
					Expect(os.WriteFile(file+".new", []byte(token+"\n"), 0o600)).To(Succeed())
					Expect(os.Rename(file+".new", file)).To(Succeed())
				}
				rotate(tokenMark + "first")
				p := s.controller(ctx, PluginOptions{Env: map[string]string{
					"OXIDE_TOKEN": "", "OXIDE_TOKEN_FILE": file,
				}})
				load, stop := context.WithCancel(ctx)
				done := make(chan error, 1)
				go func() { done <- listUntil(load, p.Controller()) }()
				for _, token := range []string{"second", "third", "fourth"} {
					rotate(tokenMark + token)
					converge(ctx, func() (*csi.ListVolumesResponse, error) {
						return p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
					})
				}
				stop()
				Expect(<-done).NotTo(HaveOccurred(), "no call fails while the token is rotated")

				// That the file is really read again shows when it holds a token of nobody.
				rotate("nobody")
				eventually(ctx, func() error {
					_, err := p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
					if code := codeOf(err); code != codes.Unauthenticated {
						return fmt.Errorf("a token of nobody gets %s", code)
					}
					return nil
				})
				rotate(tokenMark + "fifth")
				converge(ctx, func() (*csi.ListVolumesResponse, error) {
					return p.Controller().ListVolumes(ctx, &csi.ListVolumesRequest{})
				})
				awaitReady(ctx, p)
			})
	})

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

var _ = onStage("a rack with a certificate of its own",
	sceneOptions{rack: RackOptions{TLS: true}}, func(s *scene) {
		It("B-26 is trusted by the CA file", func(ctx SpecContext) {
			s.volume(ctx)
		})

		It("OX-9 is not trusted without it, which an operator can repair",
			func(ctx SpecContext) {
				p := s.rack.Plugin(ctx, PluginOptions{Mode: ModeController,
					Env: map[string]string{"OXIDE_CA_FILE": ""}})
				_, err := p.Controller().CreateVolume(ctx, createRequest(fresh("untrusted")))
				expectRefusal(err, codes.Unavailable, "certificate")
			})
	})
