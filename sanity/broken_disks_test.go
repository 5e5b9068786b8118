//go:build linux

package sanity

import (
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	. "github.com/onsi/ginkgo/v2"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

var brokenWire = []brokenRack{
	{"A01-no-code", "RackUnknown", codes.Unavailable,
		"does not take a volume for deleted if errors have no code",
		func(ctx SpecContext, r *brokenFixture) {
			r.refuses(ctx, func() error { return r.delete(ctx, someUUID) })
		}},
	{"A01-taken-name-is-reused", "EffectUnknown", codes.Unavailable,
		"does not take a foreign disk with the same name for a volume", provokeForeignName},
	{"A02-no-time", "RackResponseInvalid", codes.Unavailable,
		"does not report a snapshot without a time", provokeSnapshot},
	{"A04-cut", "RackResponseInvalid", codes.Unavailable,
		"does not report a volume whose disk has a shortened name", provokeLostDisk},
	{"A05-another-disk", "RackResponseInvalid", codes.Unavailable,
		"deletes no disk if the rack answers with another one",
		func(ctx SpecContext, r *brokenFixture) {
			volume, other := r.volume(ctx), r.volume(ctx)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			r.remains(ctx, other, "detached")
		}},
	{"A08-one-size", "EffectUnknown", codes.Unavailable,
		"does not report a volume with blocks of another size", provokeOtherDisk("")},
	{"A09-first-page-again", "RackResponseInvalid", codes.Unavailable,
		"does not report a list whose first page is repeated", provokeList},
	{"A09-one-order", "RackResponseInvalid", codes.Unavailable,
		"does not report a list that is ordered by name", provokeList},
	{"A10-endless", "RackResponseInvalid", codes.Unavailable,
		"does not report a list that never ends", provokeList},
	{"A10-no-items", "RackResponseInvalid", codes.Unavailable,
		"does not report a list whose last page has no items", provokeList},
	{"A15-not-found", "DiskBusy", codes.Aborted,
		"does not take a volume for deleted that its token may not delete",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			r.switched(ctx, "role", adminapi.RoleViewer, adminapi.RoleCollaborator)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
		}},
}

var brokenDisks = []brokenRack{
	{"A19-left-behind", "DiskFaulted", codes.Aborted,
		"does not report a faulted disk as a volume",
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
		"does not report a disk as a volume for which the rack had no space",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			r.switched(ctx, "full", true, false)
			r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("full"))) })
			r.deleteByHand(ctx, before)
		}},
	{"A43-kept", "DiskBusy", codes.Aborted,
		"does not take a disk for deleted that the rack keeps for its snapshot",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			snapshot := r.snapshotted(ctx, volume)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			Expect(r.snapshotIDs(ctx)).To(ContainElement(snapshot.GetSnapshotId()))
		}},
	{"A68-name-taken", "DiskBusy", codes.Aborted,
		"does not report a volume whose name a deleted disk still has",
		func(ctx SpecContext, r *brokenFixture) {
			before, req := r.ids(ctx), harness.CreateRequest(fresh("again"))
			mend := r.breaks(ctx)
			Expect(r.delete(ctx, r.created(ctx, req).GetVolumeId())).To(Succeed())
			mend()
			r.refuses(ctx, func() error { return r.create(ctx, req) })
			Expect(r.ids(ctx)).To(ConsistOf(before))
		}},
}

// provokeForeignName creates a volume whose disk needs a name that somebody else's disk has.
func provokeForeignName(ctx SpecContext, r *brokenFixture) {
	req := harness.CreateRequest(fresh("taken"))
	volume := r.created(ctx, req)
	name := volume.GetVolumeContext()["diskName"]
	Expect(r.delete(ctx, volume.GetVolumeId())).To(Succeed())
	foreign := r.rackDisk(ctx, name, r.rack.Project)
	r.refuses(ctx, func() error { return r.create(ctx, req) })
	now := r.disk(ctx, foreign.Id)
	Expect(now.Description).To(Equal(foreign.Description))
	Expect(stateOf(now)).To(Equal("detached"))
}

// provokeLostDisk creates a volume whose disk exists but cannot be found by its name.
func provokeLostDisk(ctx SpecContext, r *brokenFixture) {
	before := r.ids(ctx)
	r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("lost"))) })
	r.deleteByHand(ctx, before)
}

// provokeOtherDisk creates a volume of a disk type while the rack answers with a disk that differs
// from the request. Without the mutation, the repeated call finds the disk, so nothing has leaked.
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

// provokeList lists volumes whose order by name differs from the order by ID. The mutation begins
// after a first list that succeeds.
func provokeList(ctx SpecContext, r *brokenFixture) {
	list := func() error { return errOf(r.ctl.ListVolumes(ctx, &csi.ListVolumesRequest{})) }
	for inOrder := true; inOrder; {
		r.volume(ctx)
		inOrder = slices.IsSorted(r.idsByName(ctx))
	}
	Expect(list()).To(Succeed())
	r.refuses(ctx, list)
	Expect(list()).To(Succeed())
}

func (f *rackFixture) idsByName(ctx context.Context) []string {
	GinkgoHelper()
	disks := f.disks(ctx)
	slices.SortFunc(disks, func(x, y oxide.Disk) int {
		return strings.Compare(string(x.Name), string(y.Name))
	})
	ids := []string{}
	for _, disk := range disks {
		ids = append(ids, disk.Id)
	}
	return ids
}
