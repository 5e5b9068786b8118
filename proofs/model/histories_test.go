//go:build linux

package model

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// Histories begin with these texts. released and moved continue deviceInUse.
const (
	inUse = `
		controller 1: create v1, and bring it to pod 1 on a, which writes block 3`
	deviceInUse = `
		controller 1: create v4, and bring it to pod 1 on a, which writes block 2
		pod 1 on a: write and fsync v4 block 3`
	attached = `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a`
	bare = `
		controller 1: CreateVolume v1
		rack: no device
		controller 1: ControllerPublish v1 → node a
		node a: NodeStage v1`
	released = `
		controller 1: take v4 from pod 1 on a`
	moved = released + `
		controller 2: bring v4 to pod 1 on b`
)

func skipCall(o op) manipulation {
	return manipulation{answer: func(_ *History, s Step, real func() (any, error)) (any, error) {
		if s.op == o {
			return nil, nil // learn reads no answer of these ops
		}
		return real()
	}}
}

// pretend makes the calls of an op, but replaces their errors by err.
func pretend(o op, err error) manipulation {
	return manipulation{answer: func(_ *History, s Step, real func() (any, error)) (any, error) {
		r, truth := real()
		if s.op == o {
			return r, err
		}
		return r, truth
	}}
}

// onBacking calls change() after a step, with the file behind the volume's disk.
func onBacking(when string, v int, change func(path string) error) manipulation {
	return after(when, func(h *History) error {
		return change(proof.DiskFile(h.env.Rack, h.orchestrator.volumes[v].GetVolumeId()))
	})
}

// overwritten writes data at an offset of v4's disk after the disk is detached.
func overwritten(offset int64, data ...byte) manipulation {
	return onBacking("controller 1: ControllerUnpublish v4", 4, func(path string) error {
		return proof.WriteAt(path, offset, data...)
	})
}

// manipulations contains false answers and states that the model must notice, each with a history
// and a part of the expected error. There is at least one for each check of the model.
var manipulations = []struct {
	name, steps  string
	manipulation manipulation
	want         string
}{
	{"an unstage that does nothing answers OK", inUse + `
		node a: withdraw v1 from pod 1`,
		skipCall(unstage), `NodeUnstage v1 answered OK, but "v1 staged a" is "yes"`},
	{"a device that a pod has is reported as released", deviceInUse + `
		node a: NodeUnstage v4`,
		pretend(unstage, nil), "answered OK, the model allows [Internal]"},
	{"a device that a process has open is reported as released", deviceInUse + `
		pod 1 on a: keep v4 open
		node a: withdraw v4 from pod 1`,
		pretend(unstage, nil), "answered OK, the model allows [Internal]"},
	{"another volume is unpublished", inUse + deviceInUse + `
		node a: NodeUnpublish v1 from pod 1 at the path of v4`,
		manipulation{answer: func(h *History, s Step, real func() (any, error)) (any, error) {
			if s.op == unpublishAstray {
				return nil, unix.Unmount(h.env.target(s.other, s.node, s.pod), 0)
			}
			return real()
		}}, `"v4 published a/1" is "", the model allows ["yes"]`},
	{"an attach beside a namesake answers OK", `
		controller 1: CreateVolume v1
		administrator: attach a namesake of v1 → node a
		controller 1: ControllerPublish v1 → node a`,
		pretend(attach, nil), "answered OK, the model allows [FailedPrecondition]"},
	{"a namesake is written to", `
		controller 1: CreateVolume v2
		controller 1: ControllerPublish v2 → node a
		controller 1: ControllerUnpublish v2 → node a
		administrator: attach a namesake of v2 → node a
		node a: NodeStage v2`,
		after("node a: NodeStage", func(h *History) error {
			return proof.WriteAt(h.env.namesake(2).path, gib/2, 1)
		}), "-restore was written to"},
	{"an attach without a device answers OK", attached,
		after("controller 1: CreateVolume v1", func(h *History) error {
			h.addFault(context.Background(), noDevice)
			h.world.recordsFirst = false
			return nil
		}), "answered OK, and the node has no device of it"},
	{"a stage without a device answers OK", bare, skipCall(stage),
		"answered OK, the model allows [NotFound]"},
	{"the missing device is not explained", bare,
		pretend(stage, status.Error(codes.NotFound, "DeviceNotFound: wait for it")),
		`without "recorded an attach`},
	{"a detach that does nothing answers OK", deviceInUse + released,
		skipCall(detach), `answered OK, but "v4 holder" is "a"`},
	{"a delete that does nothing answers OK", `
		controller 1: CreateVolume v1
		controller 1: DeleteVolume v1`,
		skipCall(deleteVolume), `DeleteVolume v1 answered OK, but "v1 disk"`},
	{"one of two callers gets the ID of another disk", `
		controller 1: CreateVolume v1 || controller 2: CreateVolume v1`,
		manipulation{answer: func(_ *History, s Step, real func() (any, error)) (any, error) {
			r, err := real()
			if s.ctl == 2 {
				r = &csi.CreateVolumeResponse{
					Volume: &csi.Volume{VolumeId: "00000000-0000-4000-8000-000000000000"}}
			}
			return r, err
		}}, `CreateVolume v1 answered OK, but "v1 disk" is`},
	{"an attach that succeeds answers an error", attached,
		pretend(attach, status.Error(codes.Unavailable, "no idea")),
		"answered Unavailable (no idea), the model allows [OK]"},
	{"a byte flips on the disk", deviceInUse + moved,
		overwritten(3*gib/blocks+100, 'x'), "v4 block 3 contains a damaged"},
	{"an acknowledged block is lost", deviceInUse + moved,
		overwritten(3*gib/blocks, make([]byte, blockSize)...), "v4 block 3 contains zeros"},
	{"a block replaces another one", deviceInUse + moved,
		overwritten(3*gib/blocks, pattern(4, 2, 1)...),
		"v4 block 3 contains a damaged or misplaced copy of v4 block 2"},
	{"an older value comes back", deviceInUse + `
		pod 1 on a: write and fsync v4 block 3` + moved,
		overwritten(3*gib/blocks, pattern(4, 3, 2)...),
		"v4 block 3 contains value 2, the model allows value [3]"},
	{"a disk is formatted again", inUse + `
		controller 1: take v1 from pod 1 on a
		controller 2: bring v1 to pod 1 on b`,
		onBacking("controller 1: ControllerUnpublish v1", 1, func(path string) error {
			id := strings.TrimSuffix(filepath.Base(path), ".img")
			return exec.Command("mke2fs", "-q", "-F", "-t", "ext4", "-U", id, path).Run()
		}), "v1 block 3 contains zeros"},
	{"a disk gets a second loop device", deviceInUse,
		onBacking("node a: NodePublish v4", 4, func(path string) error {
			return exec.Command("losetup", "--find", path).Run()
		}), "v4 has the loop devices"},
	{"an administrator attaches a volume's disk", `
		controller 1: CreateVolume v1`,
		after("controller 1: CreateVolume v1", func(h *History) error {
			return h.env.Rack.AttachDisk(context.Background(), h.orchestrator.volumes[1].GetVolumeId(),
				h.env.Rack.Instance("b").ID)
		}), `"v1 holder" is "b"`},
	{"a device is shown to a second guest", deviceInUse,
		after("node a: NodePublish v4", showInB), `its device is seen by ["a" "b"]`},
	{"a pod gets another volume", inUse + deviceInUse + `
		node a: NodePublish v4 to pod 2`,
		after("node a: NodePublish v4 to pod 2", func(h *History) error {
			to := h.env.target(4, "a", 2)
			if err := unix.Unmount(to, 0); err != nil {
				return err
			}
			from, err := h.env.Rack.Instance("a").Device(h.env.foreign[1].name)
			if err != nil {
				return err
			}
			return unix.Mount(from.Path, to, "", unix.MS_BIND, "")
		}), "not the device of v4"},
	{"a mount covers another one", inUse,
		after("node a: NodePublish v1", func(h *History) error {
			path := h.env.target(1, "a", 1)
			return unix.Mount(path, path, "", unix.MS_BIND, "")
		}), "has 2 mounts"},
	{"a mount is at a path of no volume", inUse,
		after("node a: NodePublish v1", func(h *History) error {
			path := h.env.Nodes["b"].Kubelet("stray")
			return errors.Join(os.MkdirAll(path, 0o750),
				unix.Mount(h.env.staging(1, "a"), path, "", unix.MS_BIND, ""))
		}), "which is no path of a volume"},
	{"a path is not removed", inUse,
		after("node a: NodeUnpublish v1", func(h *History) error {
			return os.Mkdir(h.env.target(1, "a", 1), 0o750)
		}), "still exists"},
	{"a file of forged records is written to", inUse,
		after("pod 1 on a: write and fsync v1", func(h *History) error {
			return proof.WriteAt(filepath.Join(h.env.target(1, "a", 1), "forged-odd"), 5000, 1)
		}), "the bytes of forged-odd, which contains forged records, have changed"},
	{"a bystander is written to", inUse,
		after("node a: NodeStage", func(h *History) error {
			return proof.WriteAt(h.env.Bystanders.File(proof.BlankDisk), gib/2, 1)
		}), "a bystander was written to"},
	{"a foreign disk is written to", inUse,
		after("node a: NodeStage", func(h *History) error {
			return proof.WriteAt(h.env.foreign[0].path, gib/2, 1)
		}), "the foreign disk csi-0123456789abcdef was written to"},
	{"a foreign disk is detached", inUse,
		after("node a: NodeStage", func(h *History) error {
			return h.env.Rack.DetachDisk(context.Background(), h.env.foreign[1].id,
				h.env.Rack.Instance("a").ID)
		}), "the foreign disk database has become"},
	{"a foreign disk is deleted", inUse,
		after("node a: NodeStage", func(h *History) error {
			return h.env.Rack.DeleteDisk(context.Background(), h.env.foreign[0].id)
		}), "the foreign disk csi-0123456789abcdef"},
}

func after(when string, action func(*History) error) manipulation {
	return manipulation{when: when, action: action}
}

func showInB(h *History) error {
	d, err := h.env.Rack.Instance("a").Device(h.world.serials[4])
	if err != nil {
		return err
	}
	from := filepath.Join(h.env.Rack.Instance("a").Guest, "sys/block", d.Name)
	to := filepath.Join(h.env.Rack.Instance("b").Guest, "sys/block/nvme99n1")
	return os.CopyFS(to, os.DirFS(from))
}

func TestTheModelNoticesEachFalseAnswerOrState(t *testing.T) {
	r := newRunner(t, "model-lies")
	noticed := 0
	cases := short.Some(t, 6, manipulations)
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			steps := harness.Need(ParseHistory(c.steps))(t)
			h, err := r.runHistory(t.Context(), t.Name(), r.proof.Seed, &c.manipulation,
				func(h *History) { h.run(t.Context(), steps...) })
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Fatalf("the history ended with %v, want an error with %q:\n%s", err, c.want,
					h.Transcript())
			}
			if err := r.proof.CheckPage(r.page, err.Error(), "make model SEED="); err != nil {
				t.Error(err)
			}
			noticed++
		})
	}
	r.proof.Figure("lies", len(cases), "noticed", noticed)
}
