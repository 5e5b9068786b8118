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
)

// What the driver relies on in a rack, asked of the rack itself with Oxide's own client. A rule of
// the simulator that is none of a rack's would let a wrong driver pass.
var _ = onStage("B-51 the rules of a rack", sceneOptions{rack: withOtherProject},
	func(s *scene) {
		describeRackDisks(s)
		describeRackAttachments(s)
		describeRackSnapshots(s)
		describeRackItself(s)
	})

// rackCreate makes a disk, and expects the refusal in words when there are some.
func (s *scene) rackCreate(ctx context.Context, name string, size int64, refusal ...string) {
	GinkgoHelper()
	disk, err := s.rack.Client.DiskCreate(ctx, oxide.DiskCreateParams{
		Project: oxide.NameOrId(s.rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "rules",
			Size: oxide.ByteCount(size), DiskBackend: blankBackend()},
	})
	if err == nil {
		DeferCleanup(func(ctx SpecContext) {
			Expect(s.rack.Client.DiskDelete(ctx,
				oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})).To(Succeed())
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

func describeRackDisks(s *scene) {
	It("OF-1 a new disk is answered as creating and is detached at the next look",
		func(ctx SpecContext) {
			disk := s.rackDisk(ctx, fresh("new"), s.rack.Project)
			Expect(stateOf(disk)).To(Equal("creating"))
			Expect(stateOf(s.disk(ctx, disk.Id))).To(Equal("detached"))
			s.rackCreate(ctx, string(disk.Name), gib, "ObjectAlreadyExists", "400")
		})

	It("OF-2 a disk is viewed by UUID without a project, or by name with one",
		func(ctx SpecContext) {
			disk := s.rackDisk(ctx, fresh("view"), s.rack.Project)
			project := oxide.NameOrId(s.rack.Project)
			_, err := s.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Id), Project: project})
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			_, err = s.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Name)})
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			_, err = s.rack.Client.DiskView(ctx,
				oxide.DiskViewParams{Disk: oxide.NameOrId(disk.Name), Project: project})
			Expect(err).NotTo(HaveOccurred())
		})

	It("OF-2 every page with an entry has a next one, and the last page is empty",
		func(ctx SpecContext) {
			s.rackDisk(ctx, fresh("page"), s.rack.Project)
			page, err := s.rack.Client.DiskList(ctx,
				oxide.DiskListParams{Project: oxide.NameOrId(s.rack.Project)})
			Expect(err).NotTo(HaveOccurred())
			Expect(page.Items).To(HaveLen(1))
			Expect(page.NextPage).NotTo(BeEmpty())
			last, err := s.rack.Client.DiskList(ctx,
				oxide.DiskListParams{PageToken: page.NextPage})
			Expect(err).NotTo(HaveOccurred())
			Expect(last.Items).To(BeEmpty())
			Expect(last.NextPage).To(BeEmpty())
		})

	It("OF-5 the states that others see: creating, detached, maintenance, attached",
		func(ctx SpecContext) {
			s.switched(ctx, "create_hold", "300ms", "0s")
			s.switched(ctx, "snapshot_hold", "300ms", "0s")
			name := fresh("states")
			create := inBackground(func() (*oxide.Disk, error) {
				return s.rack.Client.DiskCreate(ctx, oxide.DiskCreateParams{
					Project: oxide.NameOrId(s.rack.Project),
					Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: "states",
						Size: oxide.ByteCount(gib), DiskBackend: blankBackend()},
				})
			})
			s.awaitDisk(ctx, "creating")
			disk := create()
			s.removedLater(disk.Id)
			s.awaitDisk(ctx, "detached")
			snapshot := inBackground(func() (*oxide.Snapshot, error) {
				return s.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
					Project: oxide.NameOrId(s.rack.Project),
					Body: &oxide.SnapshotCreate{Name: oxide.Name(name), Description: "states",
						Disk: oxide.NameOrId(disk.Id)}})
			})
			s.awaitDisk(ctx, "maintenance")
			s.snapshotRemovedLater(snapshot().Id)
			s.attach(ctx, disk.Id, "a")
			s.awaitDisk(ctx, "attached")
		})

	DescribeTable("OF-6 what is no name", func(ctx SpecContext, name, word string) {
		s.rackCreate(ctx, name, gib, "400", word)
	},
		Entry("OF-6 more than 63 characters", strings.Repeat("n", 64), "at most 63"),
		Entry("OF-6 a digit first", "1disk", "must begin with"),
		Entry("OF-6 capitals", "aDisk", "invalid character"),
		Entry("OF-6 a dash last", "disk-", "cannot end with"),
		Entry("OF-6 a UUID", "ae5be1f8-5f0f-4d3c-9a52-2c1f1d4bd20e", "UUID"),
	)

	DescribeTable("OF-7 what is no size", func(ctx SpecContext, size int64, word string) {
		s.rackCreate(ctx, fresh("size"), size, "InvalidValue", word)
	},
		Entry("OF-7 less than 1 GiB", gib/2, "at least 1 GiB"),
		Entry("OF-7 no whole GiB", gib+512, "multiple of 1 GiB"),
		Entry("OF-7 no whole block", gib+1, "block size 512"),
		Entry("OF-7 more than 1023 GiB", 1024*gib, "less than 1023 GiB"),
	)

	It("OF-12 an attached disk is not deleted", func(ctx SpecContext) {
		disk := s.rackDisk(ctx, fresh("held"), s.rack.Project)
		s.attach(ctx, disk.Id, "a")
		err := s.rack.Client.DiskDelete(ctx,
			oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(ContainSubstring(`disk cannot be deleted in state "attached"`))
	})
}

// attach attaches a disk by hand until the spec ends.
func (s *scene) attach(ctx context.Context, disk, instance string) {
	GinkgoHelper()
	Expect(s.tryAttach(ctx, disk, s.rack.Instance(instance).ID)).To(Succeed())
	DeferCleanup(func(ctx SpecContext) {
		_, err := s.rack.Client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: oxide.NameOrId(s.rack.Instance(instance).ID),
			Body:     &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
		Expect(err).NotTo(HaveOccurred())
	}, NodeTimeout(callTimeout))
}

func (s *scene) tryAttach(ctx context.Context, disk, instance string) error {
	_, err := s.rack.Client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func describeRackAttachments(s *scene) {
	It("OF-3 an attachment is answered as attached, at once", func(ctx SpecContext) {
		disk := s.rackDisk(ctx, fresh("attach"), s.rack.Project)
		s.attach(ctx, disk.Id, "a")
		Expect(stateOf(s.disk(ctx, disk.Id))).To(Equal("attached to " + s.rack.Instance("a").ID))
		Expect(s.attached(ctx, "a")).To(ConsistOf(disk.Id))
	})

	It("OF-8 the guest's serial is the first 20 bytes of the name, filled up with NUL",
		func(ctx SpecContext) {
			for name, want := range map[string]string{
				"short-name":                 "short-name\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\n",
				"exactly-twenty-bytes":       "exactly-twenty-bytes\n",
				"a-name-of-more-than-twenty": "a-name-of-more-than-\n",
			} {
				s.attach(ctx, s.rackDisk(ctx, name, s.rack.Project).Id, "a")
				device := s.awaitDevice(ctx, "a", name)
				serial := filepath.Join(s.rack.Instance("a").Guest, "sys/block",
					filepath.Base(device), "device/serial")
				Expect(os.ReadFile(serial)).To(BeEquivalentTo(want))
			}
		})

	It("OF-9 a rack that cannot hot-plug says so in these words", func(ctx SpecContext) {
		s.switched(ctx, "hotplug", false, true)
		disk := s.rackDisk(ctx, fresh("cold"), s.rack.Project)
		err := s.tryAttach(ctx, disk.Id, s.rack.Instance("a").ID)
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(
			ContainSubstring("cannot attach disk: instance is not fully stopped"))
	})

	It("OF-10 an instance holds no more than its limit", func(ctx SpecContext) {
		s.switched(ctx, "disk_limit", 1, 12)
		s.attach(ctx, s.rackDisk(ctx, fresh("one"), s.rack.Project).Id, "b")
		err := s.tryAttach(ctx, s.rackDisk(ctx, fresh("two"), s.rack.Project).Id,
			s.rack.Instance("b").ID)
		Expect(err).To(MatchError(oxide.ErrInvalidRequest))
		Expect(err.Error()).To(ContainSubstring("cannot attach more than 1 disks to instance"))
	})

	It("OF-11 the same attachment again succeeds; one elsewhere, or of another project, does not",
		func(ctx SpecContext) {
			disk := s.rackDisk(ctx, fresh("twice"), s.rack.Project)
			s.attach(ctx, disk.Id, "a")
			Expect(s.tryAttach(ctx, disk.Id, s.rack.Instance("a").ID)).To(Succeed())
			err := s.tryAttach(ctx, disk.Id, s.rack.Instance("b").ID)
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			Expect(err.Error()).To(ContainSubstring("disk is attached to another instance"))
			foreign := s.rackDisk(ctx, fresh("foreign"), otherProject)
			err = s.tryAttach(ctx, foreign.Id, s.rack.Instance("a").ID)
			Expect(err).To(MatchError(oxide.ErrInvalidRequest))
			Expect(err.Error()).To(
				ContainSubstring("disk must be in the same project as the instance"))
		})
}

func describeRackSnapshots(s *scene) {
	It("OF-4 a snapshot is ready when it is answered, as large as its disk, and outlives it",
		func(ctx SpecContext) {
			volume := s.volume(ctx)
			snapshot, err := s.rack.Client.SnapshotCreate(ctx, oxide.SnapshotCreateParams{
				Project: oxide.NameOrId(s.rack.Project),
				Body: &oxide.SnapshotCreate{Name: oxide.Name(fresh("snapshot")),
					Description: "rules", Disk: oxide.NameOrId(volume.GetVolumeId())}})
			Expect(err).NotTo(HaveOccurred())
			s.snapshotRemovedLater(snapshot.Id)
			Expect(snapshot.State).To(Equal(oxide.SnapshotStateReady))
			Expect(int64(snapshot.Size)).To(Equal(gib))
			Expect(s.rack.Client.DiskDelete(ctx, oxide.DiskDeleteParams{
				Disk: oxide.NameOrId(volume.GetVolumeId())})).To(Succeed())
			again, err := s.rack.Client.SnapshotView(ctx,
				oxide.SnapshotViewParams{Snapshot: oxide.NameOrId(snapshot.Id)})
			Expect(err).NotTo(HaveOccurred())
			Expect(again.State).To(Equal(oxide.SnapshotStateReady))
		})
}

func describeRackItself(s *scene) {
	It("OF-13 a client that is newer than the rack is turned away", func(ctx SpecContext) {
		for version, want := range map[string]int{
			"": http.StatusOK, "2026060800.0.0": http.StatusOK,
			"2099010100.0.0": http.StatusBadRequest,
		} {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, s.rack.URL+"/v1/ping", nil)
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
		instance := s.rack.Instance("a")
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
			before, err := s.rack.Client.UtilizationView(ctx)
			Expect(err).NotTo(HaveOccurred())
			s.snapshotted(ctx, s.volume(ctx))
			after, err := s.rack.Client.UtilizationView(ctx)
			Expect(err).NotTo(HaveOccurred())
			Expect(int64(after.Provisioned.Storage - before.Provisioned.Storage)).To(Equal(2 * gib))
			Expect(after.Capacity).To(Equal(before.Capacity))
		})
}
