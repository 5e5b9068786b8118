//go:build linux

package model

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
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

// inUse and deviceInUse are histories that bring a filesystem, or a device, to a pod, which
// writes to it. released takes the device away from the node, and moved also brings it to
// another node.
const (
	inUse = `
		controller 1: CreateVolume v1
		controller 1: bring v1 to pod 1 on a
		pod 1 on a: write and fsync v1 block 3`
	deviceInUse = `
		controller 1: CreateVolume v4
		controller 1: bring v4 to pod 1 on a
		pod 1 on a: write and fsync v4 block 2
		pod 1 on a: write and fsync v4 block 3`
	// bare attaches a volume without a device.
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

// skipCall answers OK without making the call. pretend makes the call and answers something
// else.
func skipCall(o op) tamper {
	return tamper{answer: func(_ *history, s step, real func() (reply, error)) (reply, error) {
		if s.op == o {
			return reply{context: map[string]string{}}, nil
		}
		return real()
	}}
}

func pretend(o op, err error) tamper {
	return tamper{answer: func(_ *history, s step, real func() (reply, error)) (reply, error) {
		r, truth := real()
		if s.op == o {
			return r, err
		}
		return r, truth
	}}
}

// onBacking changes the bytes of a volume's disk without the knowledge of driver and rack.
func onBacking(when string, v int, change func(path string) error) tamper {
	return tamper{when: when, action: func(_ context.Context, h *history) error {
		return change(proof.DiskFile(h.env.Rack, h.orchestrator.volumes[v].GetVolumeId()))
	}}
}

// overwrite writes bytes at an offset of a file.
func overwrite(path string, offset int64, data []byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(data, offset)
	return errors.Join(err, file.Close())
}

const detached = "controller 1: ControllerUnpublish v4"

// tamperCases are the faults that the model must notice. Each has a history, the tampering,
// and the error.
var tamperCases = []struct {
	name, steps string
	tamper      tamper
	want        string
}{
	{"an unmount is swallowed", inUse + `
		node a: NodeUnpublish v1 from pod 1
		node a: NodeUnstage v1`,
		skipCall(unstage), `NodeUnstage v1 answered OK, but "v1 staged a" is "yes"`},
	{"the end of a publication is swallowed", inUse + `
		node a: NodeUnpublish v1 from pod 1`,
		skipCall(unpublish), `answered OK, but "v1 published a/1" is "yes"`},
	{"a publication is made up", `
		controller 1: CreateVolume v1
		controller 1: bring v1 to pod 1 on a`,
		skipCall(publish), `answered OK, but "v1 published a/1" is ""`},
	{"a stage is made up", `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a
		node a: NodeStage v1`,
		skipCall(stage), `answered OK, but "v1 staged a" is ""`},
	{"a device that a pod has is called released", deviceInUse + `
		node a: NodeUnstage v4`,
		pretend(unstage, nil), "answered OK, the model allows [Internal]"},
	{"a device that a process has open is called released", deviceInUse + `
		pod 1 on a: keep v4 open
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v4`,
		pretend(unstage, nil), "answered OK, the model allows [Internal]"},
	{"another volume's publication is taken down", inUse + deviceInUse + `
		node a: NodeUnpublish v1 from pod 1 at the path of v4`,
		tamper{answer: func(h *history, s step, real func() (reply, error)) (reply, error) {
			if s.op == unpublishAstray {
				return reply{}, unix.Unmount(h.env.target(s.other, s.node, s.pod), 0)
			}
			return real()
		}}, `"v4 published a/1" is "", the model says ["yes"]`},
	{"a refused attach is called done", deviceInUse + `
		controller 1: ControllerPublish v4 → node b`,
		pretend(attach, nil), "answered OK, the model allows [FailedPrecondition]"},
	{"an attach beside a namesake is called done", `
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
		tamper{when: "node a: NodeStage", action: func(_ context.Context, h *history) error {
			return overwrite(h.namesake(2).path, gib/2, []byte{1})
		}}, "-restore was written to"},
	{"an attach that has left no device is called done", `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a`,
		tamper{when: "controller 1: CreateVolume v1", action: func(ctx context.Context,
			h *history) error {
			_, err := h.addFault(ctx, noDevice)
			h.world.recordsFirst = false
			return err
		}}, "answered OK, and the node has no device of it"},
	{"a volume without a device is called staged", bare, skipCall(stage),
		"answered OK, the model allows [NotFound]"},
	{"a volume without a device is not explained", bare,
		pretend(stage, status.Error(codes.NotFound, "DeviceNotFound: wait for it")),
		`without "recorded an attach`},
	{"an attach is made up", `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a`,
		skipCall(attach), `answered OK, but "v1 holder" is ""`},
	{"a detach is swallowed", deviceInUse + released,
		skipCall(detach), `answered OK, but "v4 holder" is "a"`},
	{"a delete is swallowed", `
		controller 1: CreateVolume v1
		controller 1: DeleteVolume v1`,
		skipCall(deleteVolume), `DeleteVolume v1 answered OK, but "v1 disk"`},
	{"a create answers with another's ID", `
		controller 1: CreateVolume v1`,
		tamper{answer: func(_ *history, s step, real func() (reply, error)) (reply, error) {
			r, err := real()
			r.volume = &csi.Volume{VolumeId: "00000000-0000-4000-8000-000000000000"}
			return r, err
		}}, `CreateVolume v1 answered OK, but "v1 disk" is`},
	{"one of two callers is given another disk", `
		controller 1: CreateVolume v1 || controller 2: CreateVolume v1`,
		tamper{answer: func(_ *history, s step, real func() (reply, error)) (reply, error) {
			r, err := real()
			if s.ctl == 2 {
				r.volume = &csi.Volume{VolumeId: "00000000-0000-4000-8000-000000000000"}
			}
			return r, err
		}}, `CreateVolume v1 answered OK, but "v1 disk" is`},
	{"an error has the wrong code", `
		controller 1: CreateVolume v1
		controller 1: DeleteVolume v1
		controller 1: ControllerPublish v1 → node a`,
		pretend(attach, status.Error(codes.Internal, "no idea")),
		"answered Internal (no idea), the model allows [NotFound]"},
	{"what is done is called failed", `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a`,
		pretend(attach, status.Error(codes.Unavailable, "no idea")),
		"answered Unavailable (no idea), the model allows [OK]"},
	{"a byte flips on the disk", deviceInUse + moved,
		onBacking(detached, 4, func(path string) error {
			return overwrite(path, 3*gib/blocks+100, []byte{'x'})
		}), "v4 block 3 holds a damaged"},
	{"an acknowledged block is lost", deviceInUse + moved,
		onBacking(detached, 4, func(path string) error {
			return overwrite(path, 3*gib/blocks, make([]byte, blockSize))
		}), "v4 block 3 holds zeros"},
	{"a block is where another should be", deviceInUse + moved,
		onBacking(detached, 4, func(path string) error {
			return overwrite(path, 3*gib/blocks, pattern(4, 2, 1))
		}), "v4 block 3 holds a damaged or misplaced copy of v4 block 2"},
	{"an older value comes back", deviceInUse + `
		pod 1 on a: write and fsync v4 block 3` + moved,
		onBacking(detached, 4, func(path string) error {
			return overwrite(path, 3*gib/blocks, pattern(4, 3, 2))
		}), "v4 block 3 holds value 2, the model says value [3]"},
	{"a disk is formatted anew", inUse + `
		controller 1: take v1 from pod 1 on a
		controller 2: bring v1 to pod 1 on b`,
		onBacking("controller 1: ControllerUnpublish v1", 1, func(path string) error {
			id := strings.TrimSuffix(filepath.Base(path), ".img")
			return exec.Command("mke2fs", "-q", "-F", "-t", "ext4", "-U", id, path).Run()
		}), "v1 block 3 holds zeros"},
	{"a second device reaches a disk", deviceInUse,
		onBacking("node a: NodePublish v4", 4, func(path string) error {
			return exec.Command("losetup", "--find", path).Run()
		}), "the bytes of v4 are reached through"},
	{"a disk is attached behind the orchestrator's back", `
		controller 1: CreateVolume v1`,
		rackAction("controller 1: CreateVolume v1", 1, "b", true), `"v1 holder" is "b"`},
	{"a disk is detached behind the orchestrator's back", inUse,
		rackAction("pod 1 on a", 1, "a", false), `"v1 holder" is "", the model says ["a"]`},
	{"a device shows in a second guest", deviceInUse,
		tamper{when: "node a: NodePublish v4", action: showInB}, `its device is seen by ["a" "b"]`},
	{"a neighbour is unmounted, too", inUse + `
		node a: NodePublish v1 to pod 2
		node a: NodeUnpublish v1 from pod 2`,
		mountAction("node a: NodeUnpublish v1", func(h *history) error {
			return unix.Unmount(h.env.target(1, "a", 1), 0)
		}), `"v1 published a/1" is "", the model says ["yes"]`},
	{"a pod gets another volume", inUse + deviceInUse + `
		node a: NodePublish v4 to pod 2`,
		mountAction("node a: NodePublish v4 to pod 2", func(h *history) error {
			from, to := h.env.target(4, "a", 1), h.env.target(4, "a", 2)
			if err := unix.Unmount(to, 0); err != nil {
				return err
			}
			from, err := otherDevice(h, from)
			if err != nil {
				return err
			}
			return unix.Mount(from, to, "", unix.MS_BIND, "")
		}), "is mounted, not that of v4"},
	{"a mount lies upon another", inUse,
		mountAction("node a: NodePublish v1", func(h *history) error {
			path := h.env.target(1, "a", 1)
			return unix.Mount(path, path, "", unix.MS_BIND, "")
		}), "2 mounts lie upon each other"},
	{"a mount lies where nobody asked for it", inUse,
		mountAction("node a: NodePublish v1", func(h *history) error {
			path := h.env.nodes["b"].Kubelet("stray")
			return errors.Join(os.MkdirAll(path, 0o750),
				unix.Mount(h.env.staging(1, "a"), path, "", unix.MS_BIND, ""))
		}), "nobody asked for the mount"},
	{"a path is left behind", inUse,
		mountAction("node a: NodeUnpublish v1", func(h *history) error {
			return os.Mkdir(h.env.target(1, "a", 1), 0o750)
		}), "is still there"},
	{"a file of forged records is written to", inUse,
		tamper{when: "pod 1 on a: write and fsync v1", action: func(_ context.Context, h *history) error {
			return overwrite(filepath.Join(h.env.target(1, "a", 1), "forged-odd"), 5000, []byte{1})
		}}, "forged-odd, which holds forged records, has other bytes"},
	{"a bystander is written to", inUse,
		tamper{when: "node a: NodeStage", action: func(_ context.Context, h *history) error {
			return overwrite(h.env.Bystanders.File(proof.BlankDisk), gib/2, []byte{1})
		}}, "a bystander was written to"},
	{"a foreign disk is written to", inUse,
		tamper{when: "node a: NodeStage", action: func(_ context.Context, h *history) error {
			return overwrite(h.env.foreign[0].path, gib/2, []byte{1})
		}}, "the foreign disk csi-0123456789abcdef was written to"},
	{"a foreign disk is detached", inUse,
		tamper{when: "node a: NodeStage", action: func(ctx context.Context, h *history) error {
			return h.env.detachDisk(ctx, h.env.foreign[1].id, "a")
		}}, "the foreign disk database has become"},
	{"a foreign disk is deleted", inUse,
		tamper{when: "node a: NodeStage", action: func(ctx context.Context, h *history) error {
			return h.env.Rack.DeleteDisk(ctx, h.env.foreign[0].id)
		}}, "the foreign disk csi-0123456789abcdef"},
}

// rackAction attaches or detaches a volume's disk without the driver.
func rackAction(when string, v int, n string, on bool) tamper {
	return tamper{when: when, action: func(ctx context.Context, h *history) error {
		disk, instance := h.orchestrator.volumes[v].GetVolumeId(), h.env.Rack.Instance(n).ID
		if on {
			return h.env.Rack.AttachDisk(ctx, disk, instance)
		}
		return h.env.Rack.DetachDisk(ctx, disk, instance)
	}}
}

func mountAction(when string, action func(*history) error) tamper {
	return tamper{when: when, action: func(_ context.Context, h *history) error { return action(h) }}
}

func (env *environment) detachDisk(ctx context.Context, disk, node string) error {
	return env.Rack.DetachDisk(ctx, disk, env.Rack.Instance(node).ID)
}

// fakeDevice is the name of a device that appears in a guest in which it must not be.
const fakeDevice = "nvme99n1"

// showInB shows v4's device in the guest of b, too.
func showInB(_ context.Context, h *history) error {
	for _, d := range h.env.mustDevices("a") {
		if d.Serial != h.serials[4] {
			continue
		}
		from := filepath.Join(h.env.Rack.Instance("a").Guest, "sys/block", d.Name)
		to := filepath.Join(h.env.Rack.Instance("b").Guest, "sys/block", fakeDevice)
		return os.CopyFS(to, os.DirFS(from))
	}
	return errors.New("a has no device of v4")
}

func (env *environment) mustDevices(n string) []harness.GuestDevice {
	devices, err := env.Rack.Instance(n).Devices()
	if err != nil {
		panic(err) // the guest's directory exists as long as the rack
	}
	return devices
}

// otherDevice returns the node of a device in a's guest that is not the one at path.
func otherDevice(h *history, path string) (string, error) {
	for _, d := range h.env.mustDevices("a") {
		if d.Serial != h.serials[4] {
			return filepath.Join(h.env.Rack.Instance("a").Guest, "dev", d.Name), nil
		}
	}
	return "", fmt.Errorf("a has no device but the one at %s", path)
}

// TestTheModelNoticesEveryTampering tests the model itself, because a test that cannot fail
// proves nothing.
func TestTheModelNoticesEveryTampering(t *testing.T) {
	r := newRunner(t, "model-lies")
	noticed := 0
	cases := short.Some(t, 6, tamperCases)
	for _, u := range cases {
		t.Run(u.name, func(t *testing.T) {
			h, err := r.replay(t, tampers{u.tamper}, u.steps)
			if err == nil || !strings.Contains(err.Error(), u.want) {
				t.Fatalf("the history ended with %v, want an error with %q:\n%s", err, u.want,
					h.transcript())
			}
			if err := r.proof.CheckPage(r.page, err.Error(), "make model SEED="); err != nil {
				t.Error(err)
			}
			noticed++
		})
	}
	r.proof.Figure("lies", len(cases), "noticed", noticed)
}

// tampers change answers, or the state without the orchestrator's knowledge, to test the model
// itself.
type tampers []tamper

// tamper is one change. A nil function changes nothing.
type tamper struct {
	// answer replaces a call. real makes the original call.
	answer func(h *history, s step, real func() (reply, error)) (reply, error)
	// action runs after the step whose line begins with when, before the state is observed.
	when   string
	action func(ctx context.Context, h *history) error
}

func (l tampers) call(ctx context.Context, h *history, s step) (reply, error) {
	real := func() (reply, error) { return h.call(ctx, s) }
	i := slices.IndexFunc(l, func(one tamper) bool { return one.answer != nil })
	if i < 0 {
		return real()
	}
	return l[i].answer(h, s, real)
}

func (l tampers) apply(ctx context.Context, h *history) error {
	for _, one := range l {
		if one.action != nil && len(h.lines) > 0 &&
			strings.HasPrefix(h.lines[len(h.lines)-1], one.when) {
			if err := one.action(ctx, h); err != nil {
				return err
			}
		}
	}
	return nil
}
