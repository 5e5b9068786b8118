//go:build linux

package sanity

import (
	"context"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"strings"

	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// What the driver relies on in a rack, asked of the rack itself with Oxide's own client. A rule of
// the simulator that is none of a rack's would let a wrong driver pass.
var _ = describeController("B-51 the rules of a rack", fixtureOptions{rack: withOtherProject},
	func(f *fixture) {
		describeRackDisks(f)
		describeRackAttachments(f)
		describeRackSnapshots(f)
		describeRackItself(f)
	})

// rackCreate makes a disk, and expects the refusal in words when there are some.
func (f *rackFixture) rackCreate(ctx context.Context, name string, size int64, refusal ...string) {
	GinkgoHelper()
	disk, err := f.rack.CreateDisk(ctx, f.rack.Project, name, size)
	if err == nil {
		DeferCleanup(func(ctx SpecContext) {
			Expect(f.rack.DeleteDisk(ctx, disk.Id)).To(Succeed())
		}, NodeTimeout(callTimeout))
	}
	if len(refusal) == 0 {
		Expect(err).NotTo(HaveOccurred())
		return
	}
	Expect(err).To(HaveOccurred())
	for _, word := range refusal {
		Expect(err.Error()).To(ContainSubstring(word))
	}
}

func describeRackDisks(f *fixture) {
	It("OF-1 a new disk is answered as creating and is detached at the next look",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("new"), f.rack.Project)
			Expect(stateOf(disk)).To(Equal("creating"))
			Expect(stateOf(f.disk(ctx, disk.Id))).To(Equal("detached"))
			f.rackCreate(ctx, string(disk.Name), harness.GiB, "ObjectAlreadyExists", "400")
		})

	It("OF-2 a disk is viewed by UUID without a project, or by name with one",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("view"), f.rack.Project)
			project := oxide.NameOrId(f.rack.Project)
			_, err := f.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Id), Project: project})
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			_, err = f.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Name)})
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			_, err = f.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Name), Project: project})
			Expect(err).NotTo(HaveOccurred())
		})

	It("OF-2 every page with an entry has a next one, and the last page is empty",
		func(ctx SpecContext) {
			f.rackDisk(ctx, fresh("page"), f.rack.Project)
			page, err := f.rack.Client.DiskList(ctx,
				oxide.DiskListParams{Project: oxide.NameOrId(f.rack.Project)})
			Expect(err).NotTo(HaveOccurred())
			Expect(page.Items).To(HaveLen(1))
			Expect(page.NextPage).NotTo(BeEmpty())
			last, err := f.rack.Client.DiskList(ctx,
				oxide.DiskListParams{PageToken: page.NextPage})
			Expect(err).NotTo(HaveOccurred())
			Expect(last.Items).To(BeEmpty())
			Expect(last.NextPage).To(BeEmpty())
		})

	It("OF-5 the states that others see: creating, detached, maintenance, attached",
		func(ctx SpecContext) {
			f.switched(ctx, "create_hold", "300ms", "0s")
			f.switched(ctx, "snapshot_hold", "300ms", "0s")
			name := fresh("states")
			create := inBackground(func() (*oxide.Disk, error) {
				return f.rack.Client.DiskCreate(ctx, oxide.DiskCreateParams{
					Project: oxide.NameOrId(f.rack.Project),
					Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "states",
						Size: oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()},
				})
			})
			f.awaitDisk(ctx, "creating")
			disk := create()
			f.removedLater(disk.Id)
			f.awaitDisk(ctx, "detached")
			snapshot := inBackground(func() (*oxide.Snapshot, error) {
				return f.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
					Project: oxide.NameOrId(f.rack.Project),
					Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Description: "states",
						Disk: oxide.NameOrId(disk.Id)}})
			})
			f.awaitDisk(ctx, "maintenance")
			f.snapshotRemovedLater(snapshot().Id)
			f.attach(ctx, disk.Id, "a")
			f.awaitDisk(ctx, "attached")
		})

	DescribeTable("OF-6 what is no name", func(ctx SpecContext, name, word string) {
		f.rackCreate(ctx, name, harness.GiB, "400", word)
	},
		Entry("OF-6 more than 63 characters", strings.Repeat("n", 64), "at most 63"),
		Entry("OF-6 a digit first", "1disk", "must begin with"),
		Entry("OF-6 capitals", "aDisk", "invalid character"),
		Entry("OF-6 a dash last", "disk-", "cannot end with"),
		Entry("OF-6 a UUID", "ae5be1f8-5f0f-4d3c-9a52-2c1f1d4bd20e", "UUID"),
	)

	DescribeTable("OF-7 what is no size", func(ctx SpecContext, size int64, word string) {
		f.rackCreate(ctx, fresh("size"), size, "InvalidValue", word)
	},
		Entry("OF-7 less than 1 GiB", harness.GiB/2, "at least 1 GiB"),
		Entry("OF-7 no whole GiB", harness.GiB+512, "multiple of 1 GiB"),
		Entry("OF-7 no whole block", harness.GiB+1, "block size 512"),
		Entry("OF-7 more than 1023 GiB", 1024*harness.GiB, "less than 1023 GiB"),
	)

	It("OF-12 an attached disk is not deleted", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("held"), f.rack.Project)
		f.attach(ctx, disk.Id, "a")
		err := f.rack.DeleteDisk(ctx, disk.Id)
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(ContainSubstring(`disk cannot be deleted in state "attached"`))
	})
}

// attach attaches a disk by hand until the spec ends.
func (f *rackFixture) attach(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	Expect(f.rack.AttachDisk(ctx, disk, f.rack.Instance(instance).ID)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) {
		Expect(f.rack.DetachDisk(ctx, disk, f.rack.Instance(instance).ID)).To(Succeed())
	}, NodeTimeout(callTimeout))
}

func describeRackAttachments(f *fixture) {
	It("OF-3 an attachment is answered as attached, at once", func(ctx SpecContext) {
		disk := f.rackDisk(ctx, fresh("attach"), f.rack.Project)
		f.attach(ctx, disk.Id, "a")
		Expect(stateOf(f.disk(ctx, disk.Id))).To(Equal("attached to " + f.rack.Instance("a").ID))
		Expect(f.attached(ctx, "a")).To(ConsistOf(disk.Id))
	})

	It("OF-8 the guest's serial is the first 20 bytes of the name, filled up with NUL",
		func(ctx SpecContext) {
			for name, want := range map[string]string{
				"short-name":                 "short-name\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\n",
				"exactly-twenty-bytes":       "exactly-twenty-bytes\n",
				"a-name-of-more-than-twenty": "a-name-of-more-than-\n",
			} {
				f.attach(ctx, f.rackDisk(ctx, name, f.rack.Project).Id, "a")
				device := f.awaitDevice(ctx, "a", name)
				serial := filepath.Join(f.rack.Instance("a").Guest, "sys/block",
					filepath.Base(device), "device/serial")
				Expect(os.ReadFile(serial)).To(BeEquivalentTo(want))
			}
		})

	It("OF-9 a rack that cannot hot-plug says so in these words", func(ctx SpecContext) {
		f.switched(ctx, "hotplug", false, true)
		disk := f.rackDisk(ctx, fresh("cold"), f.rack.Project)
		err := f.rack.AttachDisk(ctx, disk.Id, f.rack.Instance("a").ID)
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(
			ContainSubstring("cannot attach disk: instance is not fully stopped"))
	})

	It("OF-10 an instance holds no more than its limit", func(ctx SpecContext) {
		f.switched(ctx, "disk_limit", 1, 12)
		f.attach(ctx, f.rackDisk(ctx, fresh("one"), f.rack.Project).Id, "b")
		err := f.rack.AttachDisk(ctx, f.rackDisk(ctx, fresh("two"), f.rack.Project).Id,
			f.rack.Instance("b").ID)
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(ContainSubstring("cannot attach more than 1 disks to instance"))
	})

	It("OF-11 the same attachment again succeeds; one elsewhere, or of another project, does not",
		func(ctx SpecContext) {
			disk := f.rackDisk(ctx, fresh("twice"), f.rack.Project)
			f.attach(ctx, disk.Id, "a")
			Expect(f.rack.AttachDisk(ctx, disk.Id, f.rack.Instance("a").ID)).To(Succeed())
			err := f.rack.AttachDisk(ctx, disk.Id, f.rack.Instance("b").ID)
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			Expect(err.Error()).To(ContainSubstring("disk is attached to another instance"))
			foreign := f.rackDisk(ctx, fresh("foreign"), otherProject)
			err = f.rack.AttachDisk(ctx, foreign.Id, f.rack.Instance("a").ID)
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			Expect(err.Error()).To(
				ContainSubstring("disk must be in the same project as the instance"))
		})
}

func describeRackSnapshots(f *fixture) {
	It("OF-4 a snapshot is ready when it is answered, as large as its disk, and outlives it",
		func(ctx SpecContext) {
			volume := f.volume(ctx)
			snapshot, err := f.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
				Project: oxide.NameOrId(f.rack.Project),
				Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("snapshot")),
					Description: "rules", Disk: oxide.NameOrId(volume.GetVolumeId())}})
			Expect(err).NotTo(HaveOccurred())
			f.snapshotRemovedLater(snapshot.Id)
			Expect(snapshot.State).To(Equal(oxide.SnapshotStateReady))
			Expect(int64(snapshot.Size)).To(Equal(harness.GiB))
			Expect(f.rack.Client.DiskDelete(ctx, oxide.DiskDeleteParams{
				Disk: oxide.NameOrId(volume.GetVolumeId())})).To(Succeed())
			again, err := f.rack.Client.SnapshotView(ctx,
				oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(snapshot.Id)})
			Expect(err).NotTo(HaveOccurred())
			Expect(again.State).To(Equal(oxide.SnapshotStateReady))
		})
}

func describeRackItself(f *fixture) {
	It("OF-13 a client that is newer than the rack is turned away", func(ctx SpecContext) {
		for version, want := range map[string]int{
			"": http.StatusOK, "2026060800.0.0": http.StatusOK,
			"2099010100.0.0": http.StatusBadRequest,
		} {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, f.rack.URL+"/v1/ping", nil)
			Expect(err).NotTo(HaveOccurred())
			if version != "" {
				req.Header.Set("api-version", version)
			}
			req.Close = true // the ledger counts connections
			resp, err := http.DefaultClient.Do(req)
			Expect(err).NotTo(HaveOccurred())
			defer resp.Body.Close()
			Expect(resp.StatusCode).To(Equal(want), "api-version %q", version)
			var body map[string]any
			Expect(json.NewDecoder(resp.Body).Decode(&body)).To(Succeed())
			if want != http.StatusOK {
				Expect(body["message"]).To(
					Equal("server does not support this API version: " + version))
			}
		}
	})

	It("OF-14 a guest finds its instance's ID in its firmware's tables", func(SpecContext) {
		instance := f.rack.Instance("a")
		for file, want := range map[string]string{
			"sys_vendor": "Oxide", "product_name": "OxVM",
			"product_serial": instance.ID, "product_uuid": instance.ID,
		} {
			data, err := os.ReadFile(filepath.Join(instance.Guest, "sys/class/dmi/id", file))
			Expect(err).NotTo(HaveOccurred())
			Expect(string(data)).To(Equal(want+"\n"), file)
		}
	})

	It("OF-15 disks and snapshots count with their whole size, attached or not",
		func(ctx SpecContext) {
			before, err := f.rack.Client.UtilizationView(ctx)
			Expect(err).NotTo(HaveOccurred())
			f.snapshotted(ctx, f.volume(ctx))
			after, err := f.rack.Client.UtilizationView(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(int64(after.Provisioned.Storage - before.Provisioned.Storage)).To(Equal(2 * harness.GiB))
			Expect(after.Capacity).To(Equal(before.Capacity))
		})
}
