//go:build linux

package sanity

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// brokenRack is a mutation (package broken) that makes the rack break a rule. The driver must then
// refuse a call, or it would lose data, change a foreign object, leak, or repeat calls for ever.
type brokenRack struct {
	mutation string
	// reason is the reason of the driver's error. It is "" if CSI requires OK: then the call must
	// succeed and change nothing.
	reason string
	code   codes.Code
	// sentence completes the spec's name, "on a broken rack the driver ...".
	sentence string
	// provoke() calls r.refuses with the call that must fail, and then checks the disks and data.
	provoke func(ctx SpecContext, r *brokenFixture)
}

type brokenFixture struct {
	*fixture
	broken  brokenRack
	refused int
}

func (r *brokenFixture) breaks(ctx context.Context) (mend func()) {
	GinkgoHelper()
	Expect(r.rack.Admin.Mutate(ctx, r.broken.mutation)).To(Succeed())
	mend = func() {
		GinkgoHelper()
		Expect(r.rack.Admin.Mend(context.WithoutCancel(ctx))).To(Succeed())
	}
	DeferCleanup(mend)
	return mend
}

// refuses() makes a call while the mutation is active, and fails the spec unless the driver refuses
// the call with the expected reason.
func (r *brokenFixture) refuses(ctx context.Context, call func() error) {
	GinkgoHelper()
	mend := r.breaks(ctx)
	err := call()
	mend()
	expectReason(err, r.broken.code, r.broken.reason)
	r.refused++
}

func (f *fixture) create(ctx context.Context, req *csi.CreateVolumeRequest) error {
	return errOf(f.ctl.CreateVolume(ctx, req))
}

func (f *fixture) delete(ctx context.Context, id string) error {
	return errOf(f.ctl.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id}))
}

func (f *fixture) publish(ctx context.Context, volume *csi.Volume, instance string) error {
	return errOf(f.ctl.ControllerPublishVolume(ctx,
		harness.PublishRequest(volume, f.rack.Instance(instance).ID)))
}

func (f *fixture) unpublish(ctx context.Context, volume *csi.Volume, instance string) error {
	return errOf(f.ctl.ControllerUnpublishVolume(ctx,
		harness.UnpublishRequest(volume, f.rack.Instance(instance).ID)))
}

func (f *fixture) remains(ctx context.Context, volume *csi.Volume, state string) {
	GinkgoHelper()
	Expect(stateOf(f.disk(ctx, volume.GetVolumeId()))).To(Equal(state))
}

func (f *fixture) deleteByHand(ctx context.Context, before []string) {
	GinkgoHelper()
	for _, id := range f.ids(ctx) {
		if !slices.Contains(before, id) {
			Expect(f.rack.DeleteDisk(ctx, id)).To(Succeed())
		}
	}
}

// longLateLimit sets the time in which the driver returns EffectUnknown for a change that the rack
// has not answered. It is longer than a call takes, even on a busy machine.
var longLateLimit = harness.PluginOptions{Env: map[string]string{"OXIDE_LATE_LIMIT": "2s"}}

var _ = describeController("on a broken rack the driver", longLateLimit, func(f *fixture) {
	all := slices.Concat(brokenWire, brokenDisks, brokenSnapshots, brokenAttachments)
	r := &brokenFixture{fixture: f}
	for _, broken := range all {
		It(broken.sentence+" ("+broken.mutation[:len("A00")]+")", func(ctx SpecContext) {
			r.broken = broken
			broken.provoke(ctx, r)
		}, NodeTimeout(callTimeout))
	}

	It("is tested with each dangerous mutation and the reason listed for it", func(
		ctx SpecContext) {
		mutations := got(f.rack.Admin.Mutations(ctx))
		listed, known := map[string]string{}, map[string]string{}
		for _, broken := range all {
			known[broken.mutation] = broken.reason
		}
		Expect(known).To(HaveLen(len(all)), "two scenarios have one mutation")
		dangerous := 0
		for _, m := range mutations {
			if m.DriverSays != "" {
				dangerous++
			}
			if _, tried := known[m.Name]; m.DriverSays != "" || tried {
				listed[m.Name] = m.DriverSays
			}
		}
		Expect(known).To(Equal(listed), "the scenarios here and the mutations of the rack")
		Expect(proof.Print(proof.Line("broken-driver", "mutations", dangerous,
			"refused", r.refused))).To(Succeed())
	})
})

var brokenSnapshots = []brokenRack{
	{"A38-faulted", "DiskBusy", codes.Aborted, "does not report a faulted snapshot", provokeSnapshot},
	{"A38-another-disk", "EffectUnknown", codes.Unavailable,
		"does not report a snapshot of another disk", provokeSnapshot},
	{"A59-blank", "SnapshotNotReady", codes.FailedPrecondition,
		"does not restore a snapshot that is not ready", provokeEarlyRestore},
}

var brokenAttachments = []brokenRack{
	{"A17-needs-it-stopped", "InstanceMustBeStopped", codes.FailedPrecondition,
		"leaves the disk detached if the rack refuses to hot-plug", provokeNoAttach},
	{"A31-attach-without-effect", "DiskBusy", codes.Aborted,
		"reports no attachment if the attach had no effect", provokeNoAttach},
	{"A31-detach-without-effect", "RackResponseInvalid", codes.Unavailable,
		"reports no detach if the detach had no effect",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			r.published(ctx, volume, "a")
			r.refuses(ctx, func() error { return r.unpublish(ctx, volume, "a") })
			r.remains(ctx, volume, "attached to "+r.rack.Instance("a").ID)
		}},
	{"A34-takes-it-away", "DiskAttachedElsewhere", codes.FailedPrecondition,
		"does not attach a disk that another instance uses",
		func(ctx SpecContext, r *brokenFixture) {
			p := r.inUse(ctx)
			r.refuses(ctx, func() error { return r.publish(ctx, p.Volume, "b") })
			r.works(ctx, p)
		}},
	{"A37-detaches-elsewhere", "", codes.OK,
		"does not detach a disk that another instance uses",
		func(ctx SpecContext, r *brokenFixture) {
			p := r.inUse(ctx)
			mend := r.breaks(ctx)
			Expect(r.unpublish(ctx, p.Volume, "b")).To(Succeed())
			mend()
			r.works(ctx, p)
		}},
	{"A48-keeps-the-disks", "InstanceNotFound", codes.NotFound,
		"reports no detach if a deleted instance still has the disk", provokeGhost},
	{"A54-serial-of-id", "DeviceNotFound", codes.NotFound,
		"does not use a device with another serial", provokeStage},
	{"A54-twice", "DeviceNotUnique", codes.FailedPrecondition,
		"writes to neither of two devices with the disk's serial (NS-6)", provokeStage},
}

// provokeSnapshot takes a snapshot under the mutation, and the driver must return an error. Without
// the mutation, the repeated call must return the snapshot that was taken.
func provokeSnapshot(ctx SpecContext, r *brokenFixture) {
	req := harness.SnapshotRequest(fresh("snapshot"), r.volume(ctx).GetVolumeId())
	r.refuses(ctx, func() error { return errOf(r.ctl.CreateSnapshot(ctx, req)) })
	resp := expectOK(ctx, r.ctl.CreateSnapshot, req)
	r.snapshotDeletedLater(resp.GetSnapshot().GetSnapshotId())
	Expect(r.snapshotIDs(ctx)).To(ConsistOf(resp.GetSnapshot().GetSnapshotId()))
}

func (f *fixture) snapshotIDs(ctx context.Context) []string {
	GinkgoHelper()
	snapshots := got(f.rack.Client.SnapshotListAllPages(ctx,
		oxide.SnapshotListParams{Project: oxide.NameOrId(f.rack.Project)}))
	ids := []string{}
	for _, snapshot := range snapshots {
		ids = append(ids, snapshot.Id)
	}
	return ids
}

func provokeEarlyRestore(ctx SpecContext, r *brokenFixture) {
	volume := r.volume(ctx)
	before := r.ids(ctx)
	r.switched(ctx, "snapshot_hold", time.Hour.String(), "0s")
	var taken *csi.CreateSnapshotResponse
	var taking errgroup.Group
	taking.Go(func() (err error) {
		taken, err = r.ctl.CreateSnapshot(ctx,
			harness.SnapshotRequest(fresh("held"), volume.GetVolumeId()))
		return err
	})
	var ids []string
	eventually(ctx, func() error {
		if ids = r.snapshotIDs(ctx); len(ids) != 1 {
			return errors.New("there is no snapshot yet")
		}
		return nil
	})
	r.refuses(ctx, func() error {
		return r.create(ctx, harness.FromSnapshot(harness.CreateRequest(fresh("early")), ids[0]))
	})
	Expect(r.ids(ctx)).To(ConsistOf(before))
	Expect(r.rack.Admin.Switch(ctx, map[string]any{"snapshot_hold": "0s"})).To(Succeed())
	Expect(taking.Wait()).To(Succeed())
	r.snapshotDeletedLater(taken.GetSnapshot().GetSnapshotId())
}

func provokeNoAttach(ctx SpecContext, r *brokenFixture) {
	volume := r.volume(ctx)
	r.refuses(ctx, func() error { return r.publish(ctx, volume, "a") })
	r.remains(ctx, volume, "detached")
}

// inUse returns a volume that is mounted on the instance a, and writes to it.
func (r *brokenFixture) inUse(ctx context.Context) *placement {
	GinkgoHelper()
	f := &nodeFixture{fixture: r.fixture}
	p := f.inUse(ctx, r.volume(ctx), f.node(ctx, "a", harness.PluginOptions{}), harness.Mounted(""))
	Expect(p.writeThrough(0)).To(Succeed())
	return p
}

func (r *brokenFixture) works(ctx context.Context, p *placement) {
	GinkgoHelper()
	r.remains(ctx, p.Volume, "attached to "+p.Instance.ID)
	Expect(p.shown()).To(Succeed())
	Expect(p.verify(0)).To(Succeed())
	Expect(p.writeThrough(1)).To(Succeed())
}

// provokeGhost unpublishes a volume from an instance that was deleted while the disk stayed
// attached. Nothing can detach the disk afterwards, so the spec uses a rack of its own.
func provokeGhost(ctx SpecContext, shared *brokenFixture) {
	f := &fixture{}
	f.rack = startRack(ctx, harness.RackOptions{})
	f.ctl = f.controller(ctx, harness.PluginOptions{}).Controller()
	r := &brokenFixture{fixture: f, broken: shared.broken}
	resp := expectOK(ctx, f.ctl.CreateVolume, harness.CreateRequest(fresh("haunted")))
	volume, gone := resp.GetVolume(), f.rack.Instance("b").ID
	Expect(f.publish(ctx, volume, "b")).To(Succeed())
	Expect(f.rack.StopInstance(ctx, gone)).To(Succeed())
	mend := r.breaks(ctx)
	Expect(f.rack.Client.InstanceDelete(ctx, oxide.InstanceDeleteParams{
		Instance: oxide.NameOrId(gone),
	})).To(Succeed())
	mend()
	r.refuses(ctx, func() error { return f.unpublish(ctx, volume, "b") })
	f.remains(ctx, volume, "attached to "+gone)
	shared.refused += r.refused
}

// provokeStage attaches a volume under the mutation, tries to stage it, and detaches it. The driver
// must not format the disk.
func provokeStage(ctx SpecContext, r *brokenFixture) {
	f := &nodeFixture{fixture: r.fixture}
	n := f.node(ctx, "a", harness.PluginOptions{Args: []string{"--device-timeout=500ms"}})
	volume := r.volume(ctx)
	r.refuses(ctx, func() error {
		p := f.attachedTo(ctx, volume, n, harness.Mounted(""))
		err := p.stage(ctx)
		Expect(got(harness.MountsAt(p.Staging))).To(BeEmpty())
		Expect(r.unpublish(ctx, volume, "a")).To(Succeed())
		return err
	})
	p := f.attachedTo(ctx, volume, n, harness.Mounted(""))
	eventually(ctx, p.shown)
	Expect(blank(edges(p.device()))).To(BeTrue(), "the disk was formatted")
}

var brokenWire = []brokenRack{
	{"A01-no-code", "RackUnknown", codes.Unavailable,
		"reports no deletion if the rack's error has no code",
		func(ctx SpecContext, r *brokenFixture) {
			r.refuses(ctx, func() error { return r.delete(ctx, someUUID) })
		}},
	{"A01-taken-name-is-reused", "EffectUnknown", codes.Unavailable,
		"does not use a foreign disk with the volume's name",
		func(ctx SpecContext, r *brokenFixture) {
			req := harness.CreateRequest(fresh("taken"))
			volume := r.created(ctx, req)
			Expect(r.delete(ctx, volume.GetVolumeId())).To(Succeed())
			foreign := got(r.rack.CreateDisk(ctx, r.rack.Project, volume.GetVolumeContext()["diskName"],
				harness.GiB))
			DeferCleanup(func(ctx SpecContext) {
				Expect(r.rack.DeleteDisk(ctx, foreign.Id)).To(Succeed())
			}, NodeTimeout(callTimeout))
			r.refuses(ctx, func() error { return r.create(ctx, req) })
			now := r.disk(ctx, foreign.Id)
			Expect(now.Description).To(Equal(foreign.Description))
			Expect(stateOf(now)).To(Equal("detached"))
		}},
	{"A02-no-time", "RackResponseInvalid", codes.Unavailable,
		"does not report a snapshot without a time", provokeSnapshot},
	{"A04-cut", "RackResponseInvalid", codes.Unavailable,
		"does not report a volume whose disk has a shortened name",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("lost"))) })
			r.deleteByHand(ctx, before)
		}},
	{"A05-another-disk", "RackResponseInvalid", codes.Unavailable,
		"deletes no disk if the rack answers with another disk",
		func(ctx SpecContext, r *brokenFixture) {
			volume, other := r.volume(ctx), r.volume(ctx)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			r.remains(ctx, other, "detached")
		}},
	{"A08-one-size", "EffectUnknown", codes.Unavailable,
		"does not report a volume whose block size is not the requested one", provokeOtherDisk("")},
	{"A09-first-page-again", "RackResponseInvalid", codes.Unavailable,
		"does not report a list whose first page is repeated", provokeList},
	{"A09-one-order", "RackResponseInvalid", codes.Unavailable,
		"does not report a list that is ordered by name", provokeList},
	{"A10-endless", "RackResponseInvalid", codes.Unavailable,
		"does not report a list that never ends", provokeList},
	{"A10-no-items", "RackResponseInvalid", codes.Unavailable,
		"does not report a list whose last page has no items", provokeList},
	{"A15-not-found", "DiskBusy", codes.Aborted,
		"reports no deletion if its token may not delete the disk",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			r.switched(ctx, "role", adminapi.RoleViewer, adminapi.RoleCollaborator)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
		}},
}

var brokenDisks = []brokenRack{
	{"A19-left-behind", "DiskFaulted", codes.Aborted, "does not report a faulted disk as a volume",
		func(ctx SpecContext, r *brokenFixture) {
			before, req := r.ids(ctx), harness.CreateRequest(fresh("halfway"))
			r.fault(ctx, adminapi.Fault{Operation: "disk_create", Times: 1, Phase: adminapi.Unwind})
			mend := r.breaks(ctx)
			expectReason(r.create(ctx, req), codes.Aborted, "DiskFaulted")
			mend()
			r.refuses(ctx, func() error { return r.create(ctx, req) })
			r.deleteByHand(ctx, before)
		}},
	{"A22-smaller", "EffectUnknown", codes.Unavailable,
		"does not report a volume whose disk is too small", provokeOtherDisk("")},
	{"A22-read-only", "EffectUnknown", codes.Unavailable,
		"does not report a volume whose disk is read-only", provokeOtherDisk("")},
	{"A24-detached", "DiskNotOurs", codes.FailedPrecondition,
		"does not delete a disk that the rack has renamed",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			volume := r.volume(ctx)
			mend := r.breaks(ctx)
			Expect(r.delete(ctx, volume.GetVolumeId())).NotTo(Succeed())
			mend()
			eventually(ctx, func() error { // the effect of the deletion stays unknown for some time
				err := r.delete(ctx, volume.GetVolumeId())
				if harness.ReasonOf(status.Convert(err)) == "EffectUnknown" {
					return err
				}
				return nil
			})
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			r.deleteByHand(ctx, before)
		}},
	{"A26-small-blocks", "EffectUnknown", codes.Unavailable,
		"does not report a local volume with small blocks", provokeOtherDisk("local")},
	{"A27-left-behind", "DiskFaulted", codes.Aborted,
		"does not report a volume for which the rack had no space",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			r.switched(ctx, "full", true, false)
			r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("full"))) })
			r.deleteByHand(ctx, before)
		}},
	{"A43-kept", "DiskBusy", codes.Aborted,
		"reports no deletion if the rack keeps the disk for its snapshot",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			snapshot := r.snapshotted(ctx, volume)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			Expect(r.snapshotIDs(ctx)).To(ContainElement(snapshot.GetSnapshotId()))
		}},
	{"A68-name-taken", "DiskBusy", codes.Aborted,
		"reports no volume if the name for its disk still belongs to a deleted disk",
		func(ctx SpecContext, r *brokenFixture) {
			before, req := r.ids(ctx), harness.CreateRequest(fresh("again"))
			mend := r.breaks(ctx)
			Expect(r.delete(ctx, r.created(ctx, req).GetVolumeId())).To(Succeed())
			mend()
			r.refuses(ctx, func() error { return r.create(ctx, req) })
			Expect(r.ids(ctx)).To(ConsistOf(before))
		}},
}

// provokeOtherDisk creates a volume of the given disk type, if any, while the rack answers with a
// disk that differs from the request. Without the mutation, the repeated call must find the disk.
func provokeOtherDisk(diskType string) func(ctx SpecContext, r *brokenFixture) {
	return func(ctx SpecContext, r *brokenFixture) {
		before, req := r.ids(ctx), harness.CreateRequest(fresh("other"))
		if diskType != "" {
			req.Parameters = map[string]string{"diskType": diskType}
		}
		r.refuses(ctx, func() error { return r.create(ctx, req) })
		volume := r.created(ctx, req)
		Expect(r.ids(ctx)).To(ConsistOf(append(before, volume.GetVolumeId())))
	}
}

// provokeList creates volumes until their order by name differs from their order by ID. Then it
// lists them before, during and after the mutation.
func provokeList(ctx SpecContext, r *brokenFixture) {
	list := func() error { return errOf(r.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})) }
	for inOrder := true; inOrder; {
		r.volume(ctx)
		disks := r.disks(ctx)
		slices.SortFunc(disks, func(x, y oxide.Disk) int {
			return strings.Compare(string(x.Name), string(y.Name))
		})
		inOrder = slices.IsSortedFunc(disks, func(x, y oxide.Disk) int {
			return strings.Compare(x.Id, y.Id)
		})
	}
	Expect(list()).To(Succeed())
	r.refuses(ctx, list)
	Expect(list()).To(Succeed())
}
