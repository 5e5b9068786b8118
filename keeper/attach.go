package keeper

import (
	"context"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
)

// Anybody may start a stopped instance at any time; the controller of Cluster API's provider does
// it within ten seconds. The attacher tries again only when it is woken, and it may be busy. So the
// keeper attaches the disks itself as soon as the instance is stopped.

// glance is how often the keeper looks at an instance that is stopping. glances is how long it goes
// on looking in one round.
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

// attachDisks attaches the disks for which an instance was stopped. The driver has checked each of
// them in this operation, and the rack refused the attach only because the instance ran. When the
// attacher asks the driver again, the driver finds the disk attached, checks it once more, and
// answers OK. If an attach fails here, the attacher tries it again and reports the error.
//
// attachDisks detaches nothing: a detach that arrives late could undo an attach that was answered
// in between. Right before the attach it checks that the attach is still wanted: nobody would know
// of a disk that is attached after the attacher has detached it.
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

// attachDisk attaches a disk if it is attached to no instance.
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
