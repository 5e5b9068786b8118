package engine

import (
	"context"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// restore brings records and data plane into the state that a proper end would have left, and
// adds the objects of the config that the directory lacks.
func (r *Simulation) restore(ctx context.Context) error {
	seed := seeder{r}
	err := r.store.Update(func(t *store.Tx) error {
		for _, step := range []func(*store.Tx) error{
			store.Prepare, settleSagas, settleDeleted, settleDisks, settleSnapshots, settleInstances,
			seed.projects,
		} {
			if err := step(t); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("settle the records: %w", err)
	}
	if err := seed.images(ctx); err != nil {
		return err
	}
	if err := r.store.Update(seed.instances); err != nil {
		return err
	}
	return r.reconcilePlane(ctx)
}

// settleDisks undoes creations that were not acknowledged, and ends the maintenance of disks
// whose snapshots are undone (A19).
func settleDisks(tx *store.Tx) error {
	var unsettled []store.Disk
	err := store.Disks.Each(tx, func(d store.Disk) error {
		if d.State.State == store.StateCreating || d.State.State == store.StateMaintenance {
			unsettled = append(unsettled, d)
		}
		return nil
	})
	for _, d := range unsettled {
		if d.State.State == store.StateCreating {
			err = errors.Join(err, store.Disks.Delete(tx, d), tx.AddStorage(-d.Size))
			continue
		}
		d.State.State = store.StateDetached
		err = errors.Join(err, tx.PutDisk(d))
	}
	return err
}

func settleSnapshots(tx *store.Tx) error {
	var unsettled []store.SnapshotRecord
	err := store.Snapshots.Each(tx, func(s store.SnapshotRecord) error {
		if s.State == store.SnapshotCreating {
			unsettled = append(unsettled, s)
		}
		return nil
	})
	for _, s := range unsettled {
		err = errors.Join(err, store.Snapshots.Delete(tx, s), tx.AddStorage(-s.Size))
	}
	return err
}

// settleSagas undoes unfinished creations of instances, together with the disks that were created
// for them.
func settleSagas(tx *store.Tx) error {
	unsettled, err := tx.UnfinishedInstances()
	for _, id := range unsettled {
		err = errors.Join(err, tx.UnwindInstance(id))
	}
	return err
}

// settleInstances ends the transitions of instances.
func settleInstances(tx *store.Tx) error {
	var unsettled []store.Instance
	err := store.Instances.Each(tx, func(i store.Instance) error {
		if settled[i.RunState] != "" {
			unsettled = append(unsettled, i)
		}
		return nil
	})
	for _, i := range unsettled {
		i.SetRunState(settled[i.RunState])
		err = errors.Join(err, store.Instances.Put(tx, i))
	}
	return err
}

// settled is the final state of each transition of an instance.
var settled = map[string]string{
	store.RunStarting: store.RunRunning, store.RunRebooting: store.RunRunning,
	store.RunStopping: store.RunStopped,
}

// reconcilePlane makes the data plane match the records.
func (r *Simulation) reconcilePlane(ctx context.Context) error {
	var attached []dataplane.Device
	var diskIDs, snapshotIDs []string
	var guests []dataplane.Firmware
	sizes := map[string]int64{}
	err := r.store.View(func(tx *store.Tx) error {
		running := map[string]bool{}
		return errors.Join(
			store.Instances.Each(tx, func(i store.Instance) error {
				running[i.ID] = i.HasGuest()
				guests = append(guests, dataplane.Firmware{InstanceID: i.ID, Name: i.Name})
				return nil
			}),
			store.Disks.Each(tx, func(d store.Disk) error {
				diskIDs = append(diskIDs, d.ID)
				sizes[d.ID] = d.Size
				if running[d.State.Instance] {
					attached = append(attached, deviceOf(d, d.State.Instance))
				}
				return nil
			}),
			store.Snapshots.Each(tx, func(sn store.SnapshotRecord) error {
				snapshotIDs = append(snapshotIDs, sn.ID)
				return nil
			}),
		)
	})
	if err != nil {
		return fmt.Errorf("read the records: %w", err)
	}
	for _, g := range guests {
		if err := r.plane.AddGuest(g); err != nil {
			return err
		}
	}
	if err := r.plane.Reconcile(ctx, attached, diskIDs, snapshotIDs); err != nil {
		return err
	}
	for id, size := range sizes {
		if err := r.plane.Trim(id, size); err != nil {
			return fmt.Errorf("bring disk %s to its size: %w", id, err)
		}
	}
	return nil
}
