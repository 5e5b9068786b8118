//go:build linux

package sanity

import (
	"context"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// usageByUnit is what NodeGetVolumeStats answers.
type usageByUnit map[csi.VolumeUsage_Unit]*csi.VolumeUsage

func (p *placement) stats(ctx context.Context, path string) (usageByUnit, error) {
	resp, err := p.Node().NodeGetVolumeStats(ctx, &csi.NodeGetVolumeStatsRequest{
		VolumeId: p.Volume.GetVolumeId(), VolumePath: path,
	})
	if err != nil {
		return nil, err
	}
	byUnit := usageByUnit{}
	for _, usage := range resp.GetUsage() {
		byUnit[usage.GetUnit()] = usage
	}
	return byUnit, nil
}

func describeStats(f *nodeFixture) {
	It("VS-2 VS-5 finds no volume where there is none, or another one", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		other := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		for _, path := range []string{
			"some/path", filepath.Join(p.dir, "nowhere"), filepath.Dir(p.Target), "/", other.Target,
			other.Staging,
		} {
			_, err := p.stats(ctx, path)
			expectRefusal(err, codes.NotFound)
		}
		for _, path := range []string{p.Target, p.Staging} {
			_, err := p.stats(ctx, path)
			Expect(err).NotTo(HaveOccurred())
		}
	})

	DescribeTable("VS-3 reports how full a filesystem is", func(ctx SpecContext, name string) {
		p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
		before, err := p.stats(ctx, p.Target)
		Expect(err).NotTo(HaveOccurred())
		for seed := range 4 {
			Expect(p.writeThrough(seed)).To(Succeed())
		}
		p.syncAll() // btrfs counts what it wrote when it commits
		after, err := p.stats(ctx, p.Target)
		Expect(err).NotTo(HaveOccurred())
		bytes := csi.VolumeUsage_BYTES
		Expect(after[bytes].GetTotal()).To(BeNumerically("~", harness.GiB, harness.GiB/4))
		Expect(after[bytes].GetTotal()).To(Equal(before[bytes].GetTotal()))
		Expect(after[bytes].GetUsed() - before[bytes].GetUsed()).
			To(BeNumerically("~", 4*pieceSize, harness.MiB))
		Expect(after[bytes].GetAvailable()).
			To(BeNumerically("<", before[bytes].GetAvailable()-3*pieceSize))
		Expect(after).To(HaveKey(csi.VolumeUsage_INODES))
		for _, usage := range after {
			for _, value := range []int64{usage.GetTotal(), usage.GetUsed(), usage.GetAvailable()} {
				Expect(value).To(BeNumerically(">=", 0))
			}
		}
	}, Entry("VS-3 ext4", "ext4"), Entry("VS-3 xfs", "xfs"), Entry("VS-3 btrfs", "btrfs"))

	It("VS-4 reports how large a raw volume is", func(ctx SpecContext) {
		req := harness.CreateRequest(fresh("raw"))
		req.CapacityRange.RequiredBytes = 2 * harness.GiB
		req.VolumeCapabilities[0] = harness.Raw()
		p := f.inUse(ctx, f.created(ctx, req), f.a, harness.Raw())
		usage, err := p.stats(ctx, p.Target)
		Expect(err).NotTo(HaveOccurred())
		Expect(usage).To(HaveLen(1))
		Expect(usage[csi.VolumeUsage_BYTES].GetTotal()).To(Equal(2 * harness.GiB))
	})

	It("VS-2 VS-3 knows after a restart where its volumes are", func(ctx SpecContext) {
		n := f.node(ctx, "a", harness.PluginOptions{})
		p := f.inUse(ctx, f.volume(ctx), n, harness.Mounted(""))
		Expect(n.Stop()).To(Succeed())
		Expect(n.Start(ctx)).To(Succeed())
		_, err := p.stats(ctx, p.Target)
		Expect(err).NotTo(HaveOccurred())
		_, err = p.stats(ctx, filepath.Dir(p.Target))
		expectRefusal(err, codes.NotFound)
	})
}

func describeNodeInfo(f *nodeFixture) {
	info := func(ctx context.Context, n *node) *csi.NodeGetInfoResponse {
		GinkgoHelper()
		resp, err := n.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		Expect(err).NotTo(HaveOccurred())
		return resp
	}

	It("D-28 NI-1 B-39 it is its instance, after a restart too", func(ctx SpecContext) {
		n := f.node(ctx, "b", harness.PluginOptions{})
		Expect(info(ctx, n).GetNodeId()).To(Equal(f.rack.Instance("b").ID))
		Expect(info(ctx, f.a).GetNodeId()).To(Equal(f.rack.Instance("a").ID))
		n.Kill()
		Expect(n.Start(ctx)).To(Succeed())
		Expect(info(ctx, n).GetNodeId()).To(Equal(f.rack.Instance("b").ID))
	})

	It("NI-2 B-40 disks that are not the driver's take places away", func(ctx SpecContext) {
		before := info(ctx, f.a).GetMaxVolumesPerNode()
		Expect(before).To(BeNumerically(">", 0))
		// A volume takes none: it is what the places are for.
		volume := f.volume(ctx)
		f.published(ctx, volume, "a")
		eventually(ctx, func() error {
			return f.a.shows(volume.GetVolumeContext()["diskName"])
		})
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before))

		byHand := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
		f.attachedByHand(ctx, byHand.Id, "a")
		eventually(ctx, func() error { return f.a.shows(string(byHand.Name)) })
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before - 1))

		// Staged as a static volume it is one of those that the orchestrator counts.
		p := f.attachedTo(ctx, &csi.Volume{VolumeId: byHand.Id}, f.a, harness.Mounted(""))
		p.stageAndPublish(ctx)
		Expect(info(ctx, f.a).GetMaxVolumesPerNode()).To(Equal(before))
	})

	It("NI-2 it never says 0, which would mean that there is no limit", func(ctx SpecContext) {
		n := f.node(ctx, "a", harness.PluginOptions{Args: []string{"--max-disks=1"}})
		byHand := f.rackDisk(ctx, fresh("by-hand"), f.rack.Project)
		f.attachedByHand(ctx, byHand.Id, "a")
		eventually(ctx, func() error { return f.a.shows(string(byHand.Name)) })
		Expect(info(ctx, n).GetMaxVolumesPerNode()).To(Equal(int64(1)))
		Expect(n.logged()).To(ContainSubstring("no room"))
	})

	It("NI-3 it has a topology only when one is configured", func(ctx SpecContext) {
		Expect(info(ctx, f.a).GetAccessibleTopology()).To(BeNil())
		n := f.node(ctx, "a", harness.PluginOptions{Env: map[string]string{"OXIDE_TOPOLOGY_RACK": "r1"}})
		Expect(info(ctx, n).GetAccessibleTopology().GetSegments()).
			To(Equal(map[string]string{topologyRack: "r1"}))
	})

	It("NC-1 it does what it declares, and answers to nothing else", func(ctx SpecContext) {
		resp, err := f.a.Node().NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
		Expect(err).NotTo(HaveOccurred())
		var declared []csi.NodeServiceCapability_RPC_Type
		for _, capability := range resp.GetCapabilities() {
			declared = append(declared, capability.GetRpc().GetType())
		}
		Expect(declared).To(ConsistOf(
			csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
			csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
			csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
			csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
			csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH))
	})

	It("NE-1 it cannot expand a volume", func(ctx SpecContext) {
		_, err := f.a.Node().NodeExpandVolume(ctx, &csi.NodeExpandVolumeRequest{
			VolumeId: someUUID, VolumePath: f.a.dir,
		})
		expectRefusal(err, codes.Unimplemented)
	})

	It("NH-2 NH-3 a volume that is in order has no complaints, and an unknown one none to "+
		"be asked for", func(ctx SpecContext) {
		p := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted(""))
		Expect(p.complaints(ctx)).To(BeEmpty())
		_, err := f.a.Node().NodeGetVolumeHealth(ctx,
			&csi.NodeGetVolumeHealthRequest{VolumeId: someUUID})
		expectRefusal(err, codes.NotFound)
		storage, err := f.a.Node().NodeGetStorageHealth(ctx, &csi.NodeGetStorageHealthRequest{})
		Expect(err).NotTo(HaveOccurred())
		Expect(storage.GetBackendHealth()).To(BeEmpty())
	})

	It("D-6 B-41 the node service is not in the controller's process", func(ctx SpecContext) {
		_, err := f.plugin.Node().NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
		expectRefusal(err, codes.Unimplemented)
		_, err = f.plugin.Node().NodeGetVolumeHealth(ctx, &csi.NodeGetVolumeHealthRequest{})
		expectRefusal(err, codes.Unimplemented)
	})
}

// syncAll has the volume's filesystem write everything to the disk.
func (p *placement) syncAll() {
	GinkgoHelper()
	dir, err := os.Open(p.Target)
	Expect(err).NotTo(HaveOccurred())
	defer dir.Close()
	Expect(unix.Syncfs(int(dir.Fd()))).To(Succeed())
}

// complaints are what the node has to say against the volume's health.
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

// exists is for paths that must be there.
func exists(path string) error {
	_, err := os.Stat(path)
	return err
}
