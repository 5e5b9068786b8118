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
		return effect{call: callOf(s.ctl.ControllerPublishVolume, harness.PublishRequest(volume, s.up))}
	}},
	{"publish-static", codes.OK, func(s *setup) effect {
		name := s.name("static")
		disk := s.handmade(name, rackProject, harness.BlankBackend())
		return publishEffect(s, name, static(disk), s.down)
	}},
	{"publish-static-again", codes.OK, func(s *setup) effect {
		disk := s.handmade(s.name("static"), rackProject, harness.BlankBackend())
		s.attach(disk.Id, s.down)
		return effect{call: callOf(s.ctl.ControllerPublishVolume,
			harness.PublishRequest(static(disk), s.down))}
	}},
	{"publish-static-beside-its-serial", codes.FailedPrecondition, func(s *setup) effect {
		prefix := s.name("the-same-twenty-bytes")
		one := s.handmade(prefix+"-one", rackProject, harness.BlankBackend())
		other := s.handmade(prefix+"-other", rackProject, harness.BlankBackend())
		s.attach(one.Id, s.down)
		return effect{call: callOf(s.ctl.ControllerPublishVolume,
			harness.PublishRequest(static(other), s.down))}
	}},
	{"publish-beside-its-serial", codes.FailedPrecondition, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		backup := s.handmade(volume.GetVolumeContext()["diskName"]+"-backup", rackProject,
			harness.BlankBackend())
		s.attach(backup.Id, s.down)
		return effect{call: callOf(s.ctl.ControllerPublishVolume, harness.PublishRequest(volume, s.down))}
	}},
	{"publish-elsewhere", codes.FailedPrecondition, func(s *setup) effect {
		volume := s.volume(s.name("publish"))
		s.attach(volume.GetVolumeId(), s.down)
		return effect{call: callOf(s.ctl.ControllerPublishVolume, harness.PublishRequest(volume, s.up))}
	}},
	{"publish-to-a-full-node", codes.ResourceExhausted, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerPublishVolume,
			harness.PublishRequest(s.volume(s.name("publish")), s.full))}
	}},
	{"publish-from-another-project", codes.InvalidArgument, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerPublishVolume,
			harness.PublishRequest(static(s.foreignDisk), s.down))}
	}},
	{"publish-to-nobody", codes.NotFound, func(s *setup) effect {
		return effect{call: callOf(s.ctl.ControllerPublishVolume,
			harness.PublishRequest(s.volume(s.name("publish")), nobody))}
	}},
	{"unpublish", codes.OK, func(s *setup) effect {
		return unpublishEffect(s, s.down, s.down)
	}},
	{"unpublish-from-a-running-node", codes.OK, func(s *setup) effect {
		return unpublishEffect(s, s.up, s.up)
	}},
	{"unpublish-everywhere", codes.OK, func(s *setup) effect {
		return unpublishEffect(s, s.down, "")
	}},
	{"unpublish-again", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("unpublish"))
		return effect{call: unpublish(s, volume.GetVolumeId(), s.down).call}
	}},
	{"unpublish-what-is-elsewhere", codes.OK, func(s *setup) effect {
		volume := s.volume(s.name("unpublish"))
		s.attach(volume.GetVolumeId(), s.down)
		return effect{call: unpublish(s, volume.GetVolumeId(), s.up).call}
	}},
	{"unpublish-a-boot-disk", codes.FailedPrecondition, func(s *setup) effect {
		return effect{call: unpublish(s, s.boot.Id, s.down).call}
	}},
	{"unpublish-nothing", codes.OK, func(s *setup) effect {
		return effect{call: unpublish(s, nobody, s.down).call}
	}},
	{"unpublish-nothing-everywhere", codes.OK, func(s *setup) effect {
		return effect{call: unpublish(s, nobody, "").call}
	}},
}

// publishEffect returns the effect of a call that attaches a detached disk. If the node runs,
// its guest gets a device.
func publishEffect(s *setup, name string, volume *csi.Volume, node string) effect {
	return effect{call: callOf(s.ctl.ControllerPublishVolume, harness.PublishRequest(volume, node)),
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
	name := s.name("unpublish")
	id := s.volume(name).GetVolumeId()
	s.attach(id, from)
	a := unpublish(s, id, node)
	a.apply = func(state *rackState) {
		d := state.Disks[name]
		d.State, d.At = "detached", ""
		state.Disks[name] = d
		if from == s.up {
			delete(state.Devices, serial(d.Name))
		}
	}
	return a
}

func unpublish(s *setup, id, node string) effect {
	return effect{call: callOf(s.ctl.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})}
}

// serial returns the part of a disk's name that a guest sees.
func serial(name string) string { return name[:min(len(name), 20)] }
