package concurrency

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// crowd is how many ask for one name at the same moment.
const crowd = 50

// weather is what the rack does while everybody asks for one name.
type weather struct {
	name    string
	fault   *adminapi.Fault
	hold    string
	restore bool
	// whole lets everybody do the rest of the volume's life too; the long form always does. It also
	// has the weathers that are rare.
	whole, rare bool
	// allowed is what the weather may make of an answer, besides busy.
	allowed answers
}

var unavailable = answers{codes.Unavailable: {"RackUnavailable"}}

func (s *site) weathers(seed uint64) []weather {
	unlucky := func(operation string, f adminapi.Fault) *adminapi.Fault {
		f.Operation, f.Probability, f.Seed = operation, 0.4, seed
		return &f
	}
	throttled := &adminapi.Response{Status: 429, ErrorCode: "TooManyRequests", Message: "slow down"}
	down := &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable", Message: "not now"}
	return []weather{
		{name: "fair", whole: true},
		{name: "restored", restore: true},
		{name: "slow", rare: true, hold: "300ms"},
		{name: "throttled", fault: unlucky("", adminapi.Fault{Phase: adminapi.Before,
			Response: throttled}),
			allowed: unavailable},
		{name: "throttled-restored", rare: true, restore: true, allowed: unavailable,
			fault: unlucky("", adminapi.Fault{Phase: adminapi.Before, Response: throttled})},
		{name: "down", rare: true, fault: unlucky("disk_view", adminapi.Fault{Response: down}),
			allowed: unavailable},
		{name: "answer-lost", allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After, Cut: true})},
		{name: "answer-lost-restored", allowed: unavailable, restore: true, hold: "200ms",
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After, Cut: true})},
		{name: "done-but-failed", rare: true, allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.After,
				Response: &adminapi.Response{Status: 500, ErrorCode: "Internal",
					Message: "Internal Server Error"}})},
		{name: "repeated-by-a-proxy", fault: unlucky("disk_create",
			adminapi.Fault{Phase: adminapi.Twice})},
		{name: "undone", allowed: unavailable,
			fault: unlucky("disk_create", adminapi.Fault{Phase: adminapi.Unwind})},
	}
}

// oneName lets a crowd ask two controllers for one name, in every weather, and then do the rest of
// a volume's life at once too.
func (s *site) oneName(round int) {
	ctx := s.t.Context()
	origin := s.origin(ctx, round)
	for _, w := range s.weathers(s.proof.Seed + uint64(round)) {
		if w.rare && !s.proof.Long() || s.proof.Over() {
			continue
		}
		name := fmt.Sprintf("one-%s-%d", w.name, round)
		volume := s.createdByAll(ctx, name, w, origin.GetSnapshotId())
		if volume == nil {
			continue
		}
		if w.whole || s.proof.Long() {
			s.attachedByAll(ctx, volume)
			s.snapshotByAll(ctx, volume, "snapshot-of-"+name)
			s.deletedByAll(ctx, volume)
		} else {
			s.deleted(ctx, volume.GetVolumeId())
		}
		if s.t.Failed() {
			s.proof.Say("the weather was %s", w.name)
			return
		}
	}
	s.twoSizes(ctx, fmt.Sprintf("two-sizes-%d", round))
	s.bornAndBuried(ctx, fmt.Sprintf("born-and-buried-%d", round))
	s.manyClusters(ctx, fmt.Sprintf("many-clusters-%d", round))
	s.snapshotDeleted(ctx, origin.GetSnapshotId())
	s.deleted(ctx, origin.GetSourceVolumeId())
}

// origin is a snapshot to restore.
func (s *site) origin(ctx context.Context, round int) *csi.Snapshot {
	s.t.Helper()
	name := fmt.Sprintf("origin-%d", round)
	volume, err := s.client(0).CreateVolume(ctx, createRequest(name, gib))
	must(s.t, err)
	snapshot, err := s.client(1).CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
		Name: name, SourceVolumeId: volume.GetVolume().GetVolumeId()})
	must(s.t, err)
	return snapshot.GetSnapshot()
}

// createdByAll has one name created by a crowd at two controllers: each asks until it has an
// answer, all have the same, and the rack has one disk.
func (s *site) createdByAll(ctx context.Context, name string, w weather, origin string,
) *csi.Volume {
	s.setWeather(ctx, w)
	req := createRequest(name, gib)
	if w.restore {
		req.VolumeContentSource = &csi.VolumeContentSource{Type: &csi.VolumeContentSource_Snapshot{
			Snapshot: &csi.VolumeContentSource_SnapshotSource{SnapshotId: origin}}}
	}
	volumes := make([]*csi.Volume, crowd)
	atOnce(crowd, func(caller int) {
		s.converge(ctx, "CreateVolume "+name, busy.and(w.allowed), func(ctx context.Context) error {
			s.tally.creates.Add(1)
			answer, err := s.client(caller).CreateVolume(ctx, req)
			volumes[caller] = answer.GetVolume()
			return err
		})
	})
	s.setFair(ctx)
	s.oneDisk(ctx, name, ids(volumes, (*csi.Volume).GetVolumeId))
	return volumes[0]
}

// oneDisk demands that one name got one id and is one disk.
func (s *site) oneDisk(ctx context.Context, name string, ids []string) {
	disks := s.disksOf(ctx, name)
	s.tally.names.Add(1)
	s.tally.disks.Add(int64(len(disks)))
	s.tally.ids.Add(int64(len(ids)))
	if len(disks) != 1 || len(ids) != 1 || disks[0].Id != ids[0] {
		s.wrong("%s is the disks %v and has the ids %q", name, disks, ids)
	}
}

// ids are the different ids in the answers.
func ids[T any](all []T, id func(T) string) []string {
	var found []string
	for _, one := range all {
		found = append(found, id(one))
	}
	slices.Sort(found)
	return slices.Compact(found)
}

func (s *site) setWeather(ctx context.Context, w weather) {
	s.t.Helper()
	if w.hold != "" {
		must(s.t, s.rack.Admin.Switch(ctx, map[string]any{"create_hold": w.hold}))
	}
	if w.fault != nil {
		_, err := s.rack.Admin.AddFault(ctx, *w.fault)
		must(s.t, err)
	}
}

func (s *site) setFair(ctx context.Context) {
	s.t.Helper()
	must(s.t, s.rack.Admin.ClearFaults(ctx))
	must(s.t, s.rack.Admin.Switch(ctx, map[string]any{"create_hold": "0s"}))
}

// attachedByAll has the volume attached to either instance by a crowd: one instance has it, and
// only who asked for that one was told that it is attached. Then everybody takes it away.
func (s *site) attachedByAll(ctx context.Context, volume *csi.Volume) {
	told := make([]string, crowd)
	atOnce(crowd, func(caller int) {
		node := s.nodes[caller/2%2].instance.ID
		s.tally.attaches.Add(1)
		_, err := s.client(caller).ControllerPublishVolume(ctx, publishRequest(volume, node))
		if s.judge("ControllerPublishVolume", err, attaching) {
			told[caller] = node
		}
	})
	told = slices.DeleteFunc(told, func(node string) bool { return node == "" })
	holders := ids(told, func(node string) string { return node })
	if holder := s.holderOf(ctx, volume.GetVolumeId()); len(holders) != 1 || holders[0] != holder {
		s.wrong("the instance %s has the disk, and %q were told so", holder, holders)
	}
	atOnce(crowd, func(caller int) {
		s.converge(ctx, "ControllerUnpublishVolume", busy, func(ctx context.Context) error {
			_, err := s.client(caller).ControllerUnpublishVolume(ctx,
				&csi.ControllerUnpublishVolumeRequest{VolumeId: volume.GetVolumeId()})
			return err
		})
	})
	if holder := s.holderOf(ctx, volume.GetVolumeId()); holder != "" {
		s.wrong("everybody was told that nobody has the disk, and %s has it", holder)
	}
}

// snapshotByAll takes one snapshot by a crowd, and takes it away by one.
func (s *site) snapshotByAll(ctx context.Context, volume *csi.Volume, name string) {
	taken := make([]*csi.Snapshot, crowd)
	atOnce(crowd, func(caller int) {
		s.converge(ctx, "CreateSnapshot", busy, func(ctx context.Context) error {
			s.tally.snapshots.Add(1)
			answer, err := s.client(caller).CreateSnapshot(ctx, &csi.CreateSnapshotRequest{
				Name: name, SourceVolumeId: volume.GetVolumeId()})
			taken[caller] = answer.GetSnapshot()
			return err
		})
	})
	told := ids(taken, (*csi.Snapshot).GetSnapshotId)
	if listed := s.snapshotsNamed(ctx, name); len(told) != 1 ||
		!slices.Equal(listed, told) {
		s.wrong("the snapshot %s has the ids %q, and the rack has %q", name, told, listed)
	}
	atOnce(crowd, func(caller int) {
		s.converge(ctx, "DeleteSnapshot",
			busy.and(answers{codes.Aborted: {"SnapshotNotReady"}}),
			func(ctx context.Context) error {
				_, err := s.client(caller).DeleteSnapshot(ctx, &csi.DeleteSnapshotRequest{
					SnapshotId: told[0]})
				return err
			})
	})
	if left := s.snapshotsNamed(ctx, name); len(left) > 0 {
		s.wrong("the deleted snapshot %s is there as %q", name, left)
	}
}

// deletedByAll has the volume deleted by a crowd.
func (s *site) deletedByAll(ctx context.Context, volume *csi.Volume) {
	atOnce(crowd, func(caller int) {
		s.converge(ctx, "DeleteVolume", busy, func(ctx context.Context) error {
			s.tally.deletes.Add(1)
			_, err := s.client(caller).DeleteVolume(ctx, &csi.DeleteVolumeRequest{
				VolumeId: volume.GetVolumeId()})
			return err
		})
	})
	disks, err := s.rack.Client.DiskListAllPages(ctx,
		oxide.DiskListParams{Project: oxide.NameOrId(s.rack.Project)})
	if err != nil || slices.ContainsFunc(disks, func(d oxide.Disk) bool {
		return d.Id == volume.GetVolumeId()
	}) {
		s.wrong("everybody was told that the disk %s is gone, but the rack lists it, or: %v",
			volume.GetVolumeId(), err)
	}
}

// twoSizes has one name asked for in two sizes: one of them is made, and who asked for the other
// one is told that the name is taken.
func (s *site) twoSizes(ctx context.Context, name string) {
	taken := answers{codes.AlreadyExists: {"VolumeExists"}}
	var mu sync.Mutex
	told := map[int64][]string{}
	atOnce(crowd, func(caller int) {
		size := int64(1+caller/2%2) * gib
		err := await(ctx, func() error {
			s.tally.creates.Add(1)
			answer, err := s.client(caller).CreateVolume(ctx, exactly(name, size))
			if s.judge("CreateVolume in two sizes", err, busy.and(taken)) {
				mu.Lock()
				defer mu.Unlock()
				told[size] = append(told[size], answer.GetVolume().GetVolumeId())
			}
			if codeOf(err) == codes.AlreadyExists {
				return nil
			}
			return err
		})
		if err != nil {
			s.wrong("CreateVolume in two sizes does not converge: %v", err)
		}
	})
	if len(told) != 1 {
		s.wrong("%s was made in %d sizes: %v", name, len(told), told)
	}
	for _, same := range told {
		id := ids(same, func(id string) string { return id })
		s.oneDisk(ctx, name, id)
		s.deletedByAll(ctx, &csi.Volume{VolumeId: id[0]})
	}
}

// bornAndBuried has one name created and deleted at the same time, over and over: at the end one
// more create gives the one disk there is.
func (s *site) bornAndBuried(ctx context.Context, name string) {
	req := createRequest(name, gib)
	atOnce(crowd, func(caller int) {
		for turn := range 4 {
			s.tally.creates.Add(1)
			answer, err := s.client(caller+turn).CreateVolume(ctx, req)
			if !s.judge("CreateVolume among deletes", err, busy) {
				continue
			}
			s.tally.deletes.Add(1)
			_, err = s.client(caller).DeleteVolume(ctx, &csi.DeleteVolumeRequest{
				VolumeId: answer.GetVolume().GetVolumeId()})
			s.judge("DeleteVolume among creates", err, busy)
		}
	})
	var volume *csi.Volume
	s.converge(ctx, "CreateVolume", busy, func(ctx context.Context) error {
		s.tally.creates.Add(1)
		answer, err := s.client(0).CreateVolume(ctx, req)
		volume = answer.GetVolume()
		return err
	})
	s.oneDisk(ctx, name, []string{volume.GetVolumeId()})
	s.deletedByAll(ctx, volume)
}
