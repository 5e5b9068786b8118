package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// attachScenarios are scenarios that attach or detach.
var attachScenarios = []scenario{
	{"publish", codes.OK, func(s *setup) effect {
		name := s.name("publish")
		return publishEffect(s, name, s.volume(name), s.down)
	}},
	{"publish-to-a-running-node", codes.OK, func(s *setup) effect {
		name := s.name("publish")
		return publishEffect(s, name, s.volume(name), s.up)
	}},
	{"publish-again", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		s.attach(volume.GetVolumeId(), s.up)
		return effect{request: harness.PublishRequest(volume, s.up)}
	}},
	{"publish-again-without-a-device", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		s.recordWithoutDevice(volume.GetVolumeId(), s.up)
		return effect{request: harness.PublishRequest(volume, s.up)} // and the disk is not attached again
	}},
	{"publish-static", codes.OK, func(s *setup) effect {
		name := s.name("static")
		disk := s.handmade(name, rackProject)
		return publishEffect(s, name, static(disk), s.down)
	}},
	{"publish-static-again", codes.OK, func(s *setup) effect {
		disk := s.handmade(s.name("static"), rackProject)
		s.attach(disk.Id, s.down)
		return effect{request: harness.PublishRequest(static(disk), s.down)}
	}},
	{"publish-static-beside-its-serial", codes.FailedPrecondition, func(s *setup) effect {
		prefix := s.name("the-same-twenty-bytes")
		one := s.handmade(prefix+"-one", rackProject)
		other := s.handmade(prefix+"-other", rackProject)
		s.attach(one.Id, s.down)
		return effect{request: harness.PublishRequest(static(other), s.down)}
	}},
	{"publish-beside-its-serial", codes.FailedPrecondition, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		backup := s.handmade(volume.GetVolumeContext()["diskName"]+"-backup", rackProject)
		s.attach(backup.Id, s.down)
		return effect{request: harness.PublishRequest(volume, s.down)}
	}},
	{"publish-elsewhere", codes.FailedPrecondition, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		s.attach(volume.GetVolumeId(), s.down)
		return effect{request: harness.PublishRequest(volume, s.up)}
	}},
	{"publish-to-a-full-node", codes.ResourceExhausted, func(s *setup) effect {
		return effect{request: harness.PublishRequest(s.volume(s.name("publish")), s.full)}
	}},
	{"publish-from-another-project", codes.InvalidArgument, func(s *setup) effect {
		return effect{request: harness.PublishRequest(static(s.foreignDisk), s.down)}
	}},
	{"publish-to-nobody", codes.NotFound, func(s *setup) effect {
		return effect{request: harness.PublishRequest(s.volume(s.name("publish")), nobody)}
	}},
	{"unpublish", codes.OK, func(s *setup) effect { return unpublishEffect(s, s.down, s.down) }},
	{"unpublish-from-a-running-node", codes.OK, func(s *setup) effect {
		return unpublishEffect(s, s.up, s.up)
	}},
	{"unpublish-without-a-device", codes.OK, func(s *setup) effect {
		return unpublishEffectOf(s, s.recordWithoutDevice, s.up, s.up)
	}},
	{"unpublish-everywhere", codes.OK, func(s *setup) effect {
		return unpublishEffect(s, s.down, "")
	}},
	{"unpublish-again", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("unpublish"))
		return effect{request: unpublish(volume.GetVolumeId(), s.down)}
	}},
	{"unpublish-what-is-elsewhere", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("unpublish"))
		s.attach(volume.GetVolumeId(), s.down)
		return effect{request: unpublish(volume.GetVolumeId(), s.up)}
	}},
	{"unpublish-a-boot-disk", codes.FailedPrecondition, func(s *setup) effect {
		return effect{request: unpublish(s.boot.Id, s.down)}
	}},
	{"unpublish-nothing", codes.OK, func(s *setup) effect {
		return effect{request: unpublish(nobody, s.down)}
	}},
	{"unpublish-nothing-everywhere", codes.OK, func(s *setup) effect {
		return effect{request: unpublish(nobody, "")}
	}},
}

// publishEffect returns the effect of a call that attaches a detached disk. A running node gets a
// device.
func publishEffect(s *setup, name string, volume *csi.Volume, node string) effect {
	return effect{request: harness.PublishRequest(volume, node),
		apply: func(state *rackState) {
			d := state.Disks[name]
			d.State, d.At = "attached", node
			state.Disks[name] = d
			if node == s.up {
				state.Devices[serial(d.Name)]++
			}
		}}
}

// unpublishEffect returns the effect of a call that detaches a new volume from the node that
// has it.
func unpublishEffect(s *setup, from, node string) effect {
	return unpublishEffectOf(s, s.attach, from, node)
}

// unpublishEffectOf is unpublishEffect with another function that attaches the volume.
func unpublishEffectOf(s *setup, attach func(disk, instance string), from, node string) effect {
	name := s.name("unpublish")
	id := s.volume(name).GetVolumeId()
	attach(id, from)
	return effect{request: unpublish(id, node), apply: func(state *rackState) {
		d := state.Disks[name]
		d.State, d.At = "detached", ""
		state.Disks[name] = d
		if from == s.up {
			delete(state.Devices, serial(d.Name))
		}
	}}
}

func unpublish(id, node string) *csi.ControllerUnpublishVolumeRequest {
	return &csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node}
}

// serial returns the part of a disk's name that a guest sees.
func serial(name string) string { return name[:min(len(name), 20)] }
