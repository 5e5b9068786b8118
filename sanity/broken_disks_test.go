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

// brokenWire are the racks that break a rule about requests, answers or lists.
var brokenWire = []brokenRack{
	{"A01-no-code", "RackUnknown", codes.Unavailable,
		"A01 whose errors have no code does not let the driver take a volume for deleted",
		func(ctx SpecContext, r *brokenFixture) {
			r.refuses(ctx, func() error { return r.delete(ctx, someUUID) })
		}},
	{"A01-taken-name-is-reused", "EffectUnknown", codes.Unavailable,
		"A01 that answers with the disk that has the name does not get a foreign disk taken for a volume",
		provokeForeignName},
	{"A02-no-time", "RackResponseInvalid", codes.Unavailable,
		"A02 that does not say when a snapshot was taken gets no snapshot reported",
		provokeSnapshot},
	{"A04-cut", "RackResponseInvalid", codes.Unavailable,
		"A04 that cuts names gets no volume reported", provokeLostDisk},
	{"A05-another-disk", "RackResponseInvalid", codes.Unavailable,
		"A05 that shows another disk gets neither of them deleted",
		func(ctx SpecContext, r *brokenFixture) {
			volume, other := r.volume(ctx), r.volume(ctx)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			r.remains(ctx, other, "detached")
		}},
	{"A08-one-size", "EffectUnknown", codes.Unavailable,
		"A08 that makes blocks of 512 bytes gets no volume reported", provokeOtherDisk("")},
	{"A09-first-page-again", "RackResponseInvalid", codes.Unavailable,
		"A09 that answers with the first page again gets no list reported", provokeList},
	{"A09-one-order", "RackResponseInvalid", codes.Unavailable,
		"A09 that lists in the order of names gets no list reported", provokeList},
	{"A10-endless", "RackResponseInvalid", codes.Unavailable,
		"A10 whose lists never end gets none reported", provokeList},
	{"A10-no-items", "RackResponseInvalid", codes.Unavailable,
		"A10 whose last page has no list gets none reported", provokeList},
	{"A15-not-found", "DiskBusy", codes.Aborted,
		"A15 that denies what it shows does not let the driver take a volume for deleted",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			r.switched(ctx, "role", adminapi.RoleViewer, adminapi.RoleCollaborator)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
		}},
}

// brokenDisks are the racks that break a rule about disks or their deletion.
var brokenDisks = []brokenRack{
	{"A19-left-behind", "DiskFaulted", codes.Aborted,
		"A19 that leaves a faulted disk does not get it reported as a volume",
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
		"A22 that makes smaller disks gets no volume reported", provokeOtherDisk("")},
	{"A22-read-only", "EffectUnknown", codes.Unavailable,
		"A22 that makes read-only disks gets no volume reported", provokeOtherDisk("")},
	{"A24-detached", "DiskNotOurs", codes.FailedPrecondition,
		"A24 that renames a disk and keeps it detached does not get it deleted by its old name",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			volume := r.volume(ctx)
			mend := r.breaks(ctx)
			Expect(r.delete(ctx, volume.GetVolumeId())).NotTo(Succeed())
			mend()
			eventually(ctx, func() error { // the deletion is open until its time is over
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
		"A26 that makes local disks with small blocks gets no volume reported",
		provokeOtherDisk("local")},
	{"A27-left-behind", "DiskFaulted", codes.Aborted,
		"A27 that leaves a disk for which it has no space does not get it reported as a volume",
		func(ctx SpecContext, r *brokenFixture) {
			before := r.ids(ctx)
			r.switched(ctx, "full", true, false)
			r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("full"))) })
			r.deleteByHand(ctx, before)
		}},
	{"A43-kept", "DiskBusy", codes.Aborted,
		"A43 that keeps a disk with snapshots does not let the driver take it for deleted",
		func(ctx SpecContext, r *brokenFixture) {
			volume := r.volume(ctx)
			snapshot := r.snapshotted(ctx, volume)
			r.refuses(ctx, func() error { return r.delete(ctx, volume.GetVolumeId()) })
			r.remains(ctx, volume, "detached")
			Expect(r.snapshotIDs(ctx)).To(ContainElement(snapshot.GetSnapshotId()))
		}},
	{"A68-name-taken", "DiskBusy", codes.Aborted,
		"A68 that keeps the name of a deleted disk gets no volume reported",
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

// provokeLostDisk creates a volume whose disk is created but cannot be found by its name.
func provokeLostDisk(ctx SpecContext, r *brokenFixture) {
	before := r.ids(ctx)
	r.refuses(ctx, func() error { return r.create(ctx, harness.CreateRequest(fresh("lost"))) })
	r.deleteByHand(ctx, before)
}

// provokeOtherDisk creates a volume of a disk type. The rack shows a disk that differs from the
// request. When the rack is in order again, the repeated call finds the disk, so nothing has
// leaked.
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

// provokeList lists volumes whose order by name differs from the order by ID. The rack is broken
// after the driver has listed them in order.
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

// idsByName returns the IDs of the project's disks in the order of their names.
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
