package faults_test

import (
	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
)

// attachScenes attach and detach.
var attachScenes = []scene{
	{"publish", codes.OK, func(s *stage) act {
		name := s.name("publish")
		return publishing(s, name, s.volume(name), s.down)
	}},
	{"publish-to-a-running-node", codes.OK, func(s *stage) act {
		name := s.name("publish")
		return publishing(s, name, s.volume(name), s.up)
	}},
	{"publish-again", codes.OK, func(s *stage) act {
		volume := s.volume(s.name("publish"))
		s.attach(volume.GetVolumeId(), s.up)
		return act{call: calling(s.ctl.ControllerPublishVolume, publishRequest(volume, s.up))}
	}},
	{"publish-static", codes.OK, func(s *stage) act {
		name := s.name("static")
		disk := s.handmade(name, rackProject, blank())
		return publishing(s, name, static(disk), s.down)
	}},
	{"publish-static-again", codes.OK, func(s *stage) act {
		disk := s.handmade(s.name("static"), rackProject, blank())
		s.attach(disk.Id, s.down)
		return act{call: calling(s.ctl.ControllerPublishVolume,
			publishRequest(static(disk), s.down))}
	}},
	{"publish-static-beside-its-serial", codes.FailedPrecondition, func(s *stage) act {
		prefix := s.name("the-same-twenty-bytes")
		one := s.handmade(prefix+"-one", rackProject, blank())
		other := s.handmade(prefix+"-other", rackProject, blank())
		s.attach(one.Id, s.down)
		return act{call: calling(s.ctl.ControllerPublishVolume,
			publishRequest(static(other), s.down))}
	}},
	{"publish-beside-its-serial", codes.FailedPrecondition, func(s *stage) act {
		volume := s.volume(s.name("publish"))
		backup := s.handmade(volume.GetVolumeContext()["diskName"]+"-backup", rackProject, blank())
		s.attach(backup.Id, s.down)
		return act{call: calling(s.ctl.ControllerPublishVolume, publishRequest(volume, s.down))}
	}},
	{"publish-elsewhere", codes.FailedPrecondition, func(s *stage) act {
		volume := s.volume(s.name("publish"))
		s.attach(volume.GetVolumeId(), s.down)
		return act{call: calling(s.ctl.ControllerPublishVolume, publishRequest(volume, s.up))}
	}},
	{"publish-to-a-full-node", codes.ResourceExhausted, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerPublishVolume,
			publishRequest(s.volume(s.name("publish")), s.full))}
	}},
	{"publish-from-another-project", codes.InvalidArgument, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerPublishVolume,
			publishRequest(static(s.foreignDisk), s.down))}
	}},
	{"publish-to-nobody", codes.NotFound, func(s *stage) act {
		return act{call: calling(s.ctl.ControllerPublishVolume,
			publishRequest(s.volume(s.name("publish")), nobody))}
	}},
	{"unpublish", codes.OK, func(s *stage) act {
		return unpublishing(s, s.down, s.down)
	}},
	{"unpublish-from-a-running-node", codes.OK, func(s *stage) act {
		return unpublishing(s, s.up, s.up)
	}},
	{"unpublish-everywhere", codes.OK, func(s *stage) act {
		return unpublishing(s, s.down, "")
	}},
	{"unpublish-again", codes.OK, func(s *stage) act {
		volume := s.volume(s.name("unpublish"))
		return act{call: unpublish(s, volume.GetVolumeId(), s.down).call}
	}},
	{"unpublish-what-is-elsewhere", codes.OK, func(s *stage) act {
		volume := s.volume(s.name("unpublish"))
		s.attach(volume.GetVolumeId(), s.down)
		return act{call: unpublish(s, volume.GetVolumeId(), s.up).call}
	}},
	{"unpublish-a-boot-disk", codes.FailedPrecondition, func(s *stage) act {
		return act{call: unpublish(s, s.boot.Id, s.down).call}
	}},
	{"unpublish-nothing", codes.OK, func(s *stage) act {
		return act{call: unpublish(s, nobody, s.down).call}
	}},
	{"unpublish-nothing-everywhere", codes.OK, func(s *stage) act {
		return act{call: unpublish(s, nobody, "").call}
	}},
}

// publishing is an act that attaches a detached disk; a node that runs then sees a device.
func publishing(s *stage, name string, volume *csi.Volume, node string) act {
	return act{call: calling(s.ctl.ControllerPublishVolume, publishRequest(volume, node)),
		done: func(w *world) {
			d := w.Disks[name]
			d.State, d.At = "attached", node
			w.Disks[name] = d
			if node == s.up {
				w.Devices[serial(d.Name)]++
			}
		}}
}

// unpublishing is an act that detaches a new volume from where it is.
func unpublishing(s *stage, from, node string) act {
	name := s.name("unpublish")
	id := s.volume(name).GetVolumeId()
	s.attach(id, from)
	a := unpublish(s, id, node)
	a.done = func(w *world) {
		d := w.Disks[name]
		d.State, d.At = "detached", ""
		w.Disks[name] = d
		if from == s.up {
			delete(w.Devices, serial(d.Name))
		}
	}
	return a
}

func unpublish(s *stage, id, node string) act {
	return act{call: calling(s.ctl.ControllerUnpublishVolume,
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})}
}

// serial is what a guest sees of a disk's name.
func serial(name string) string { return name[:min(len(name), 20)] }
