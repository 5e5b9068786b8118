//go:build linux

package sanity

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

func describeNodeInfo(f *nodeFixture) {
	info := func(ctx context.Context, n *node) *csi.NodeGetInfoResponse {
		GinkgoHelper()
		resp := expectOK(ctx, n.Node().NodeGetInfo, &csi.NodeGetInfoRequest{})
		return resp
	}

	It("D-4 D-28 NI-1 B-39 it is its instance, and knows its volumes, after a restart too", func(
		ctx SpecContext) {
		n := f.node(ctx, "b", harness.PluginOptions{})
		p := f.inUse(ctx, f.volume(ctx), n, harness.Mounted(""))
		Expect(info(ctx, n).GetNodeId()).To(Equal(f.rack.Instance("b").ID))
		Expect(info(ctx, f.a).GetNodeId()).To(Equal(f.rack.Instance("a").ID))
		n.Kill()
		Expect(n.Start(ctx)).To(Succeed())
		Expect(info(ctx, n).GetNodeId()).To(Equal(f.rack.Instance("b").ID))
		Expect(errOf(p.Stats(ctx, p.Node()))).To(Succeed())
		Expect(p.complaints(ctx)).To(BeEmpty())
		_, err := n.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{VolumeId: someUUID})
		expectReason(err, codes.NotFound, "VolumeUnknownToNode")
	})

	It("NI-2 B-40 foreign disks reduce the number of volumes", func(ctx SpecContext) {
		before := info(ctx, f.a).GetMaxVolumesPerNode()
		Expect(before).To(BeNumerically(">", 0))
		// A volume takes no place, because the places are meant for volumes.
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		f.awaitDevice(ctx, "a", volume.GetVolumeContext()["diskName"])
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before))

		byHand := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
		f.attachedByHand(ctx, byHand.Id, "a")
		f.awaitDevice(ctx, "a", string(byHand.Name))
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before - 1))

		// A disk that is staged as a static volume is one of the volumes that the orchestrator counts.
		p := f.attachedTo(ctx, &csi.Volume{VolumeId: byHand.Id}, f.a, harness.Mounted(""))
		p.stageAndPublish(ctx)
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before))
	})
}

// complaints returns the node's complaints about the volume's health.
func (p *placement) complaints(ctx context.Context) []csi.VolumeHealthErrorType {
	GinkgoHelper()
	var complaints []csi.VolumeHealthErrorType
	for _, entry := range p.health(ctx) {
		Expect(entry.GetReason()).NotTo(BeEmpty())
		complaints = append(complaints, entry.GetStatus())
	}
	return complaints
}

func (p *placement) health(ctx context.Context) []*csi.VolumeHealth_VolumeHealthEntry {
	GinkgoHelper()
	resp, err := p.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePublishPath: p.Target,
		StagingTargetPath: p.Staging,
	})
	Expect(err).NotTo(HaveOccurred())
	return resp.GetVolumeHealth().GetHealthStatuses()
}
