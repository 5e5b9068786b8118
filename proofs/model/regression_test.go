//go:build linux

package model

import (
	"context"
	"fmt"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// regressions contains histories that once failed, or that are rarely generated, in the form in
// which a failed run prints them. The answers may be left out.
var regressions = []struct{ name, steps string }{
	{"a device that a pod has is not released after the node's driver was killed", `
		controller 1: CreateVolume v4
		controller 1: bring v4 to pod 1 on a
		kill -9 node a
		node a: NodeUnstage v4
		pod 1 on a: write and fsync v4 block 1
		pod 1 on a: put a loop device over v4
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v4
		kill -9 node a
		node a: NodeUnstage v4
		pod 1 on a: close v4
		node a: NodeUnstage v4`},
	{"the rack is killed, and stopped, while volumes are in use", `
		controller 1: CreateVolume v3
		controller 1: bring v3 to pod 1 on a
		pod 1 on a: write and fsync v3 block 1
		controller 1: CreateVolume v4
		controller 1: bring v4 to pod 1 on a
		pod 1 on a: write and fsync v4 block 1
		kill -9 the rack's simulator
		pod 1 on a: write and fsync v3 block 2
		pod 1 on a: write and fsync v4 block 2
		node a: NodeUnpublish v3 from pod 1
		node a: NodeUnstage v3
		start the rack's simulator
		node a: NodeStage v3
		node a: NodePublish v3 to pod 1
		pod 1 on a: write and fsync v3 block 3
		terminate and start the rack's simulator
		node a: NodeUnpublish v3 from pod 1
		node a: NodeUnstage v3
		controller 1: bring v3 to pod 1 on a
		pod 1 on a: write and fsync v3 block 0
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v4
		controller 1: bring v4 to pod 1 on a
		pod 1 on a: write and fsync v4 block 0`},
	{"a disk is detached while it is mounted, and attached to the same node again", `
		controller 1: CreateVolume v2
		controller 1: bring v2 to pod 1 on a
		pod 1 on a: write and fsync v2 block 1
		controller 2: ControllerUnpublish v2 → node a
		controller 2: ControllerPublish v2 → node a
		node a: NodePublish v2 to pod 2
		node a: NodeStage v2
		node a: NodeUnpublish v2 from pod 1
		node a: NodeStage v2
		node a: NodePublish v2 to pod 1
		pod 1 on a: write and fsync v2 block 3`},
	{"a device gets another number while a pod has it, and another disk gets the old number", `
		controller 1: CreateVolume v4
		controller 1: bring v4 to pod 1 on a
		pod 1 on a: write and fsync v4 block 1
		controller 1: CreateVolume v1
		controller 1: ControllerUnpublish v4 → node a
		controller 1: bring v1 to pod 1 on a
		controller 1: ControllerPublish v4 → node a
		node a: NodePublish v4 to pod 2
		node a: NodeUnstage v4
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v1`},
	{"a frozen filesystem can be unstaged, and no other call thaws it", `
		controller 1: CreateVolume v1
		controller 1: CreateVolume v2
		controller 1: CreateVolume v3
		controller 1: ControllerPublish v1 → node a
		controller 1: ControllerPublish v2 → node a
		controller 1: ControllerPublish v3 → node a
		node a: NodeStage v1
		node a: NodePublish v1 to pod 1
		node a: NodePublish v1 to pod 2
		pod 1 on a: write v1 block 1
		pod 1 on a: freeze v1
		node a: NodeGetVolumeStats v1 of pod 1
		node a: NodeUnpublish v1 from pod 1
		node a: NodeUnstage v1
		node a: NodeStage v1
		controller 1: CreateSnapshot s1
		node a: NodeUnpublish v1 from pod 2
		kill -9 node a
		node a: NodeUnstage v1
		node a: NodeStage v2
		node a: NodePublish v2 to pod 1
		pod 1 on a: write v2 block 1
		pod 1 on a: freeze v2
		node a: NodeUnpublish v2 from pod 1
		node a: NodeUnstage v2, killed after 3ms
		node a: NodeUnstage v2
		node a: NodeStage v3
		node a: NodePublish v3 to pod 1
		pod 1 on a: write v3 block 1
		pod 1 on a: freeze v3
		controller 2: ControllerUnpublish v3 → node a
		controller 2: bring v3 to pod 1 on b
		pod 1 on b: freeze v3
		stop instance b
		start instance b
		node b: NodeStage v3`},
	{"refused calls change nothing", `
		controller 1: CreateVolume v4
		controller 1: ControllerPublish v4 → node a
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a
		node a: NodeStage v4
		node a: NodePublish v4 to pod 1
		pod 1 on a: write and fsync v4 block 0
		pod 1 on a: keep v4 open
		node a: NodeStage v4 as another filesystem
		node a: NodeStage v4 with the disk of v1
		node a: NodePublish v4 to pod 2 as the other access type
		kill -9 node a
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v4
		node a: NodeStage v4 as another filesystem
		node a: NodeUnstage v4
		pod 1 on a: close v4
		node a: NodeStage v1
		node a: NodePublish v1 to pod 1
		node a: NodePublish v4 to pod 1
		node a: NodeStage v1 with the disk of v4
		node a: NodePublish v1 to pod 2 as the other access type
		node a: NodeUnpublish v4 from pod 1 at the path of v1
		node a: NodeUnpublish v1 from pod 1 at the path of v4
		node a: NodeUnstage v4 at the path of v1
		node a: NodeUnpublish v4 from pod 1
		node a: NodeUnstage v4 at the path of v1
		node a: NodeUnstage v4`},
	{"a namesake is not used, and does not disturb a volume in use", `
		controller 1: CreateVolume v1
		controller 1: ControllerPublish v1 → node a
		administrator: attach a namesake of v1 → node a
		node a: NodeStage v1
		node a: NodePublish v1 to pod 1
		pod 1 on a: write and fsync v1 block 2
		controller 2: ControllerPublish v1 → node a
		stop instance a
		start instance a
		node a: NodeStage v1
		node a: NodeUnstage v1
		controller 1: ControllerUnpublish v1 → node a
		stop instance a
		start instance a
		node a: NodeStage v1
		controller 1: ControllerPublish v1 → node a
		controller 1: bring v1 to pod 1 on b
		pod 1 on b: write and fsync v1 block 1
		controller 1: take v1 from pod 1 on b
		administrator: delete the namesake of v1
		controller 1: bring v1 to pod 1 on a
		administrator: attach a namesake of v1 → node a
		stop instance a
		start instance a
		administrator: delete the namesake of v1
		node a: NodeStage v1`},
}

func TestEarlierFailuresDoNotHappenAgain(t *testing.T) {
	runner := newRunner(t, "model-regressions")
	for _, past := range short.Some(t, 3, regressions) {
		t.Run(past.name, func(t *testing.T) {
			if h, err := runner.replay(t, nil, past.steps); err != nil {
				t.Errorf("%v\n%s", err, h.Transcript())
			}
		})
	}
}

// A device's name does not identify a disk. The mount table shows only the name of a btrfs's
// device, as it was at the time of the mount, and no usable number.
func TestADeadMountIsNotTakenForANewDeviceOfThatName(t *testing.T) {
	runner := newRunner(t, "model-regressions")
	h, err := runner.replay(t, nil, `
		controller 1: CreateVolume v3
		controller 1: bring v3 to pod 1 on a
		pod 1 on a: write and fsync v3 block 1`, func(h *History) error {
		if err := h.plugUntilNamedAsBefore(t.Context()); err != nil {
			return err
		}
		return h.runSteps(t.Context(), []Step{
			{op: publish, vol: 3, node: "a", pod: 1},
			{op: stage, vol: 3, node: "a"},
			{op: unpublish, vol: 3, node: "a", pod: 1},
			{op: publish, vol: 3, node: "a", pod: 1},
		})
	})
	if err != nil {
		t.Errorf("%v\n%s", err, h.Transcript())
	}
}

// plugUntilNamedAsBefore detaches v3 from node a and attaches it again, repeatedly, until its
// device has the same name as before.
func (h *History) plugUntilNamedAsBefore(ctx context.Context) error {
	nameOf := func() string {
		device, _ := h.env.Rack.Instance("a").Device(h.serials[3]) // it may be detached
		return device.Name
	}
	before := nameOf()
	for range 300 {
		err := h.runSteps(ctx, []Step{{op: detach, ctl: 1, vol: 3, node: "a"},
			{op: attach, ctl: 1, vol: 3, node: "a"}})
		if err != nil || nameOf() == before {
			return err
		}
	}
	return fmt.Errorf("v3's device was never %s again", before)
}
