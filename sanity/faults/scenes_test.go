package faults_test

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

// act is a call under way: what is called, and what the rack is when it is done.
type act struct {
	call func(context.Context) (proto.Message, error)
	// done changes the world as the call does; nil is not at all.
	done func(*world)
	// halfway is a world that may be there while the call has failed; nil is none.
	halfway func(*world)
}

// scene is a CSI call in a situation. Which operations it needs is observed.
type scene struct {
	name string
	// want is the code without a fault.
	want codes.Code
	set  func(*stage) act
}

// scenes are the calls, with what they do and what they find out.
var scenes = append(append(append([]scene{}, volumeScenes...), attachScenes...), readScenes...)

// calling is a call of the controller with its request.
func calling[Req, Resp any, Message interface {
	*Resp
	proto.Message
}](method func(context.Context, Req, ...grpc.CallOption) (Message, error), req Req,
) func(context.Context) (proto.Message, error) {
	return func(ctx context.Context) (proto.Message, error) { return method(ctx, req) }
}

// creating is an act that makes a disk of 1 GiB, with the blocks of its source.
func creating(s *stage, req *csi.CreateVolumeRequest, from string) act {
	return act{call: calling(s.ctl.CreateVolume, req), done: func(w *world) {
		w.Disks[req.GetName()] = disk{ID: fresh, State: "detached", From: from,
			Size: gib, BlockSize: madeBlocks[from == s.imageID()]}
		w.Storage += gib
	}}
}

// madeBlocks are the blocks of a disk that was made from an image, and of any other.
var madeBlocks = map[bool]int{true: 512, false: 4096}

func (s *stage) imageID() string {
	if s.image == nil {
		return ""
	}
	return s.image.Id
}

// undone is the scene whose call has to take back what it has made.
const undone = "restore-with-other-blocks"

// volumeScenes make and remove volumes and snapshots.
var volumeScenes = []scene{
	{"create", codes.OK, func(s *stage) act {
		return creating(s, createRequest(s.name("create")), "")
	}},
	{"create-again", codes.OK, func(s *stage) act {
		req := createRequest(s.name("again"))
		s.made(req)
		return act{call: calling(s.ctl.CreateVolume, req)}
	}},
	{"create-of-another-size", codes.AlreadyExists, func(s *stage) act {
		name := s.name("size")
		s.volume(name)
		req := createRequest(name)
		req.CapacityRange.RequiredBytes = 2 * gib
		return act{call: calling(s.ctl.CreateVolume, req)}
	}},
	{"create-beyond-the-quota", codes.ResourceExhausted, func(s *stage) act {
		req := createRequest(s.name("quota"))
		req.CapacityRange.RequiredBytes = quota + gib
		return act{call: calling(s.ctl.CreateVolume, req)}
	}},
	{"restore", codes.OK, func(s *stage) act {
		snap := s.snap.GetSnapshotId()
		return creating(s, restoreRequest(s.name("restore"), snap, ""), snap)
	}},
	{"restore-with-blocks", codes.OK, func(s *stage) act {
		snap := s.snap.GetSnapshotId()
		return creating(s, restoreRequest(s.name("blocks"), snap, "4096"), snap)
	}},
	{undone, codes.InvalidArgument, func(s *stage) act {
		// Nobody can tell before the disk is made, which then has to go.
		gone := s.gone.GetSnapshotId()
		a := creating(s, restoreRequest(s.name("undo"), gone, "512"), gone)
		a.halfway, a.done = a.done, nil
		return a
	}},
	{"restore-again-without-the-snapshot", codes.OK, func(s *stage) act {
		snap := s.snapshot(s.name("passing"), s.source.GetVolumeId())
		req := restoreRequest(s.name("orphan"), snap.GetSnapshotId(), "")
		s.made(req)
		s.deleteSnapshot(snap.GetSnapshotId())
		return act{call: calling(s.ctl.CreateVolume, req)}
	}},
	{"restore-from-another-project", codes.InvalidArgument, func(s *stage) act {
		return act{call: calling(s.ctl.CreateVolume,
			restoreRequest(s.name("foreign"), s.foreign.Id, ""))}
	}},
	{"create-from-an-image", codes.OK, func(s *stage) act {
		req := createRequest(s.name("image"))
		req.CapacityRange = nil
		req.Parameters = map[string]string{"imageId": s.image.Id}
		return creating(s, req, s.image.Id)
	}},
	{"delete", codes.OK, func(s *stage) act {
		name := s.name("delete")
		return deleting(s, name, s.volume(name).GetVolumeId())
	}},
	{"delete-attached", codes.FailedPrecondition, func(s *stage) act {
		volume := s.volume(s.name("attached"))
		s.attach(volume.GetVolumeId(), s.down)
		return act{call: calling(s.ctl.DeleteVolume,
			&csi.DeleteVolumeRequest{VolumeId: volume.GetVolumeId()})}
	}},
	{"delete-what-is-not-ours", codes.FailedPrecondition, func(s *stage) act {
		handmade := s.handmade(s.name("not-ours"), rackProject, blank())
		return act{call: calling(s.ctl.DeleteVolume,
			&csi.DeleteVolumeRequest{VolumeId: handmade.Id})}
	}},
	{"delete-again", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: nobody})}
	}},
	{"snapshot", codes.OK, func(s *stage) act {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		return act{call: calling(s.ctl.CreateSnapshot, snapshotRequest(name, source)),
			done: func(w *world) {
				w.Snapshots[name] = snapshot{ID: fresh, Disk: source, State: "ready", Size: gib}
				w.Storage += gib
			}}
	}},
	{"snapshot-again", codes.OK, func(s *stage) act {
		name, source := s.name("snapshot"), s.source.GetVolumeId()
		s.snapshot(name, source)
		return act{call: calling(s.ctl.CreateSnapshot, snapshotRequest(name, source))}
	}},
	{"snapshot-of-a-local-disk", codes.FailedPrecondition, func(s *stage) act {
		return act{call: calling(s.ctl.CreateSnapshot,
			snapshotRequest(s.name("snapshot"), s.local.Id))}
	}},
	{"snapshot-in-another-project", codes.InvalidArgument, func(s *stage) act {
		return act{call: calling(s.ctl.CreateSnapshot,
			snapshotRequest(s.name("snapshot"), s.foreignDisk.Id))}
	}},
	{"snapshot-of-nothing", codes.NotFound, func(s *stage) act {
		return act{call: calling(s.ctl.CreateSnapshot, snapshotRequest(s.name("snapshot"), nobody))}
	}},
	{"delete-snapshot", codes.OK, func(s *stage) act {
		name := s.name("snapshot")
		snap := s.snapshot(name, s.source.GetVolumeId())
		return act{call: calling(s.ctl.DeleteSnapshot,
			&csi.DeleteSnapshotRequest{SnapshotId: snap.GetSnapshotId()}),
			done: func(w *world) {
				delete(w.Snapshots, name)
				w.Storage -= gib
			}}
	}},
	{"delete-snapshot-again", codes.OK, func(s *stage) act {
		return act{call: calling(s.ctl.DeleteSnapshot,
			&csi.DeleteSnapshotRequest{SnapshotId: nobody})}
	}},
}

func deleting(s *stage, name, id string) act {
	return act{call: calling(s.ctl.DeleteVolume, &csi.DeleteVolumeRequest{VolumeId: id}),
		done: func(w *world) {
			delete(w.Disks, name)
			w.Storage -= gib
		}}
}
