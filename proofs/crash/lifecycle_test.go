//go:build linux

package crash_test

import (
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/proofs/model"
)

// deviceless is the name of a lifecycle on a rack that records an attach before the instance has
// the device, and then gives it none (docs/hot-plug.md). leastDeviceless is the minimum number of
// its points that are tried.
const (
	deviceless      = "deviceless ext4"
	leastDeviceless = 3
)

// The kinds of lifecycles. A plain one moves a volume from one node to another. A restored one has
// a second, larger volume, which is made from a snapshot. In a shared one the volume is also
// published read-only on node b.
var driverLifecycles = []string{
	"plain ext4", "plain xfs", "plain btrfs", "plain block",
	"restored ext4", "restored xfs", "restored btrfs", "shared block", "shared ext4", deviceless,
}

// rackLifecycles are the lifecycles in which the rack is killed. Snapshots are taken of the volume
// in use and detached, and its instance is stopped and started.
var rackLifecycles = []string{"rack ext4", "rack block"}

// shapes contains the steps of lifecycles. VOL is a volume, SNAP its snapshot, and COPY a volume
// that is made from the snapshot. The steps with a star have points.
var shapes = map[string]string{
	"plain": `
		* controller 1: CreateVolume VOL
		* controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		* node a: NodeGetVolumeStats VOL of pod 1
		* controller 1: take VOL from pod 1 on a
		* controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 1
		* controller 1: take VOL from pod 1 on b
		* controller 1: DeleteVolume VOL`,
	// To publish a device read-only, the driver makes the device itself read-only. After the volume
	// is unpublished, its device must be writable again.
	"shared": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		controller 1: take VOL from pod 1 on a
		controller 1: ControllerPublish VOL → node b
		node b: NodeStage VOL
		* node b: NodePublish VOL to pod 1
		pod 1 on b: write and fsync VOL block 1
		* node b: NodeUnpublish VOL from pod 1
		* node b: NodeUnstage VOL
		controller 1: ControllerUnpublish VOL → node b
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 2
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"restored": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 0
		* controller 1: CreateSnapshot SNAP
		controller 1: take VOL from pod 1 on a
		* controller 1: CreateVolume COPY
		controller 1: ControllerPublish COPY → node a
		* node a: NodeStage COPY
		* node a: NodePublish COPY to pod 1
		pod 1 on a: write and fsync COPY block 1
		controller 1: take COPY from pod 1 on a
		controller 1: DeleteVolume COPY
		controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	"deviceless": `
		controller 1: CreateVolume VOL
		controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 0
		controller 1: take VOL from pod 1 on b
		rack: no device
		* controller 1: ControllerPublish VOL → node a
		* controller 1: ControllerUnpublish VOL → node a
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 1
		controller 1: take VOL from pod 1 on a
		controller 1: DeleteVolume VOL`,
	"rack": `
		* controller 1: CreateVolume VOL
		* controller 1: ControllerPublish VOL → node a
		node a: NodeStage VOL
		node a: NodePublish VOL to pod 1
		pod 1 on a: write and fsync VOL block 0
		* controller 1: CreateSnapshot SNAP
		node a: NodeUnpublish VOL from pod 1
		node a: NodeUnstage VOL
		* controller 1: DeleteSnapshot SNAP
		* stop instance a
		* start instance a
		node a: NodeStage VOL
		node a: NodePublish VOL to pod 1
		pod 1 on a: write and fsync VOL block 1
		node a: NodeUnpublish VOL from pod 1
		node a: NodeUnstage VOL
		* controller 1: ControllerUnpublish VOL → node a
		* controller 1: CreateSnapshot SNAP
		* controller 1: CreateVolume COPY
		controller 1: bring COPY to pod 1 on b
		pod 1 on b: write and fsync COPY block 2
		controller 1: take COPY from pod 1 on b
		* controller 1: DeleteVolume COPY
		* controller 1: DeleteVolume VOL
		* controller 1: DeleteSnapshot SNAP`,
	// The volume is removed from its nodes before this.
	elsewhere: `
		controller 1: bring VOL to pod 1 on b
		pod 1 on b: write and fsync VOL block 1
		controller 1: take VOL from pod 1 on b
		controller 1: bring VOL to pod 1 on a
		pod 1 on a: write and fsync VOL block 2
		controller 1: take VOL from pod 1 on a`,
}

// objects contains the volume, the snapshot and the copy of each access type, as the model names
// them.
var objects = map[string]*strings.Replacer{
	"ext4":  strings.NewReplacer("VOL", "v1", "SNAP", "s1", "COPY", "v5"),
	"xfs":   strings.NewReplacer("VOL", "v2", "SNAP", "s3", "COPY", "v7"),
	"btrfs": strings.NewReplacer("VOL", "v3", "SNAP", "s4", "COPY", "v8"),
	"block": strings.NewReplacer("VOL", "v4", "SNAP", "s2", "COPY", "v6"),
}

// step is a step of a lifecycle. rpc is its call, and on the driver that gets it, or "".
type step struct {
	model.Step
	rpc, on string
	// watched is the process to which the step's points belong, or "" for a step without points.
	watched string
}

// stepsOf returns the steps of a shape for the volume of a kind of lifecycle.
func stepsOf(shape, kind string) ([]step, error) {
	killed, access, _ := strings.Cut(kind, " ")
	all, err := model.ParseHistory(objects[access].Replace(shapes[shape]))
	var steps []step
	for _, s := range all {
		on, rpc, isCall := strings.Cut(s.String(), ": ")
		st := step{Step: s, rpc: on}
		if isCall {
			st.rpc, _, _ = strings.Cut(rpc, " ")
			st.on = strings.TrimPrefix(on, "node ")
		}
		switch {
		case !s.Starred:
		case killed == "rack":
			st.watched = rackProcess
		default:
			st.watched = st.on
		}
		steps = append(steps, st)
	}
	return steps, err
}
