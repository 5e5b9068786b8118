//go:build linux

package sanity

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var _ = describeOutage("a disk that can fail", func(f *nodeFixture) {
	Describe("but does not fail", func() { describeMoves(f) })
	Describe("but does not fail, and its snapshots", func() { describeSnapshots(f) })
	describeFailures(f)
	describeHangs(f)
}, "--disks=fuse")

// fails makes the volume's disk fail.
func (f *nodeFixture) fails(ctx context.Context, volume *csi.Volume, how adminapi.DiskFault) {
	GinkgoHelper()
	Expect(f.rack.Admin.FailDisk(ctx, volume.GetVolumeId(), how)).To(Succeed())
	DeferCleanup(f.repaired, volume)
}

// repaired ends the failure of the volume's disk.
func (f *nodeFixture) repaired(ctx context.Context, volume *csi.Volume) {
	GinkgoHelper()
	Expect(f.rack.Admin.HealDisk(ctx, volume.GetVolumeId())).To(Succeed())
}

func describeFailures(f *nodeFixture) {
	DescribeTable("NU-4 NH-2 B-38 fails under a pod: the failure is reported, the volume can be "+
		"unstaged, and acknowledged data is there after the repair", func(ctx SpecContext, name string) {
		p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
		Expect(p.writeThrough(0)).To(Succeed())
		f.fails(ctx, p.Volume, adminapi.DiskFault{On: []string{"write", "flush"}})
		Expect(p.writeThrough(1)).NotTo(Succeed())
		if name != "block" { // a raw device has no state of its own
			eventually(ctx, func() error {
				p.tryToWrite()
				if told := p.complaints(ctx); len(told) == 0 {
					return errors.New("the volume's health has no complaint")
				}
				return nil
			})
			Expect(p.complaintReasons(ctx)).To(ConsistOf("FilesystemFailed"))
		}

		if err := p.takenBack(ctx); err != nil { // a lost write is reported once
			expectReason(err, codes.Internal, "NodeToolFailed")
		}
		f.detached(ctx, p)
		f.repaired(ctx, p.Volume)
		moved := f.inUse(ctx, p.Volume, f.b, harness.Access(name))
		Expect(moved.verify(0)).To(Succeed())
		Expect(moved.writeThrough(2)).To(Succeed())
		Expect(moved.complaints(ctx)).To(BeEmpty())
	}, everyAccess())

	DescribeTable("NU-4 fails one flush when the volume is unstaged, and the caller gets the error",
		func(ctx SpecContext, name string) {
			p := f.inUse(ctx, f.volume(ctx, harness.Access(name)), f.a, harness.Access(name))
			Expect(p.write(0)).To(Succeed())
			if name == "ext4" { // nobody would learn that its flush failed
				Expect(harness.StopLazyInit(p.Staging)).To(Succeed())
			}
			f.fails(ctx, p.Volume, adminapi.DiskFault{On: []string{"flush"}, Times: 1})
			expectReason(p.takenBack(ctx), codes.Internal, "NodeToolFailed")
			f.detached(ctx, p)
		}, everyAccess())

	It("NS-11 is unreadable and does not count as blank", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		f.fails(ctx, p.Volume, adminapi.DiskFault{On: []string{"read"}, From: harness.GiB / 2,
			To: harness.GiB/2 + 512})
		expectReason(p.stage(ctx), codes.FailedPrecondition, "DeviceUnreadable")
		Expect(blank(edges(p.device()))).To(BeTrue(), "it was formatted all the same")
		f.repaired(ctx, p.Volume)
		p.stageAndPublish(ctx)
		Expect(p.writeThrough(0)).To(Succeed())
	})
}

// takenBack unpublishes and unstages the volume, and returns the first error. The repeated call
// must succeed.
func (p *placement) takenBack(ctx context.Context) error {
	GinkgoHelper()
	first := p.unpublish(ctx)
	if first != nil {
		Expect(p.unpublish(ctx)).To(Succeed())
	}
	second := p.unstage(ctx)
	if second != nil {
		Expect(p.unstage(ctx)).To(Succeed())
	}
	return cmp.Or(first, second)
}

// complaintReasons returns the reasons of the volume's complaints.
func (p *placement) complaintReasons(ctx context.Context) (reasons []string) {
	GinkgoHelper()
	for _, entry := range p.health(ctx) {
		reasons = append(reasons, entry.GetReason())
	}
	return reasons
}

// tryToWrite creates a file and makes the filesystem write its journal. It ignores errors.
func (p *placement) tryToWrite() {
	_ = p.writeThrough(1)
	dir, err := os.Open(p.Target)
	if err != nil {
		return
	}
	defer dir.Close()
	_ = unix.Syncfs(int(dir.Fd()))
}

func describeHangs(f *nodeFixture) {
	It("B-12 B-38 hangs and delays only its own volume, which works again on another node",
		func(ctx SpecContext) {
			bystander := f.inUse(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
			p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
			f.fails(ctx, p.Volume, adminapi.DiskFault{On: []string{"read"}, Hang: true})
			brief, cancel := context.WithTimeout(ctx, impatience)
			defer cancel()
			Expect(codeOf(p.stage(brief))).To(Equal(codes.DeadlineExceeded))
			Expect(bystander.writeThrough(0)).To(Succeed())
			Expect(bystander.complaints(ctx)).To(BeEmpty())
			bystander.remove(ctx)

			// The disk can be detached from the instance, and the hanging calls end.
			expectOK(ctx, f.ctl.ControllerUnpublishVolume,
				harness.UnpublishRequest(p.Volume, p.Instance.ID))
			eventually(ctx, func() error { return p.unstage(ctx) })
			f.repaired(ctx, p.Volume)
			moved := f.inUse(ctx, p.Volume, f.b, harness.Mounted("ext4"))
			Expect(moved.writeThrough(0)).To(Succeed())
		})

	It("B-38 is slow and is staged all the same", func(ctx SpecContext) {
		p := f.attachedTo(ctx, f.volume(ctx), f.a, harness.Mounted("ext4"))
		f.fails(ctx, p.Volume, adminapi.DiskFault{On: []string{"write", "flush"},
			Delay: adminapi.Duration(20 * time.Millisecond)})
		p.stageAndPublish(ctx)
		Expect(p.writeThrough(0)).To(Succeed())
		faults, err := f.rack.Admin.DiskFaults(ctx, p.Volume.GetVolumeId())
		Expect(err).NotTo(HaveOccurred())
		Expect(faults).To(HaveLen(1))
		Expect(faults[0].Fired).NotTo(BeZero(), fmt.Sprint("of ", faults[0]))
	})
}
