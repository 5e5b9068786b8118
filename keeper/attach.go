package keeper

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// A stopped instance may be started by anybody at any time; the controller of Cluster API's
// provider does it within ten seconds. The attacher hears of the stop only when it is woken, and
// may be busy. So the keeper attaches the disks itself, the moment the instance is stopped.

// glance is how often the keeper looks at an instance that is stopping, and glances is for how long
// in one round.
const (
	glance  = 100 * time.Millisecond
	glances = 4 * time.Second
)

// awaitStopped waits while an instance is stopping, and returns its state.
func (k *Keeper) awaitStopped(ctx context.Context, instance string) (oxide.InstanceState, error) {
	for end := time.Now().Add(glances); ; {
		state, err := k.instanceState(ctx, instance)
		if err != nil || state != oxide.InstanceStateStopping || time.Now().After(end) {
			return state, err
		}
		pause(ctx, glance)
	}
}

// attachDisks attaches the disks for which an instance was stopped. The driver has checked each in
// this operation and was refused by the rack only because the instance ran; when the attacher asks
// it again, the driver finds the disk attached, checks it once more, and answers OK. What fails
// here the attacher does, and explains.
//
// It detaches nothing: a detach that arrives late could undo an attach that was answered in
// between. And it looks right before whether the attach is still wanted: of one that comes after
// the attacher has detached, nobody would know.
func (k *Keeper) attachDisks(ctx context.Context, n *node) {
	now, err := k.Kubernetes.StorageV1().VolumeAttachments().List(ctx, metav1.ListOptions{})
	if err != nil {
		k.Log.WarnContext(ctx, "the disks are left to the attacher", "error", err)
		return
	}
	for _, a := range newView(k.now(), nil, nil, now.Items).of(n) {
		c := n.Record.Volumes[a.volume()]
		if !c.Refused || c.Detach || a.DeletionTimestamp != nil {
			continue
		}
		if err := k.attachDisk(ctx, n.Record.Instance, c.Disk); err != nil {
			k.Log.WarnContext(ctx, "a disk is left to the attacher", "volume", a.volume(), "error", err)
		}
	}
}

// attachDisk attaches a disk that no instance has.
func (k *Keeper) attachDisk(ctx context.Context, instance, id string) error {
	disk, err := k.Rack.Disk(ctx, oxide.NameOrId(id))
	if err != nil || disk.State.State() != oxide.DiskStateStateDetached {
		return err
	}
	k.Log.InfoContext(ctx, "attaching the disk", "disk", id, "instance", instance)
	_, err = k.Rack.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(id)}})
	if err != nil {
		return rack.Error(ctx, "attach disk", err)
	}
	return nil
}
