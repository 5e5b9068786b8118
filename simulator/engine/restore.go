package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// restore brings records and data plane into the state that an orderly end would have left, and
// adds the objects of the config that the directory lacks. It runs the steps in first at the
// beginning of its first transaction.
func (r *Simulation) restore(ctx context.Context, first ...func(*store.Tx)) error {
	seed := seeder{r}
	err := r.store.Update(func(t *store.Tx) {
		for _, step := range append(first, prepare, settleDeleted, settleInstances, seed.network) {
			step(t)
		}
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
	if err := seed.disks(); err != nil {
		return err
	}
	if err := r.reconcilePlane(ctx); err != nil {
		return err
	}
	if err := r.resume(); err != nil {
		return err
	}
	for _, id := range r.boot {
		call := &Call{Context: ctx}
		if _, err := r.Instances.Start(call, Ref{Object: store.Selector{ID: id}}); err != nil {
			r.log.Error("an instance cannot be started", slog.String("instance", id),
				slog.String("error", err.Error()))
		}
	}
	r.boot = nil
	return nil
}

func prepare(tx *store.Tx) {
	var tables []store.Table[store.Resource]
	for _, k := range Kinds {
		tables = append(tables, k.Table())
	}
	store.Prepare(tx, tables)
}

// resume completes the creations that were open when the last simulator ended, as a rack resumes
// its sagas, and undoes those that cannot be completed (A19). Completing a snapshot completes the
// import that it finalizes (A90). Disks come before the instances that they are created for, and
// before unfinished snapshots, from which no disk can be created (A59).
func (r *Simulation) resume() error {
	var disks []store.Disk
	var snapshots []store.SnapshotRecord
	var instances []store.Instance
	err := r.store.View(func(tx *store.Tx) {
		for d := range store.Disks.All(tx) {
			if d.State.State == store.StateCreating {
				disks = append(disks, d)
			}
		}
		for s := range store.Snapshots.All(tx) {
			if s.State == store.SnapshotCreating {
				snapshots = append(snapshots, s)
			}
		}
		for i := range store.Instances.All(tx) {
			if i.RunState == store.StateCreating {
				instances = append(instances, i)
			}
		}
	})
	if err != nil {
		return fmt.Errorf("find the open creations: %w", err)
	}
	completed := func(id string, err error) {
		if err != nil {
			r.log.Error("a creation that a restart resumed has failed", slog.String("object", id),
				slog.String("error", err.Error()))
		}
	}
	for _, d := range disks {
		completed(d.ID, r.Disks.resume(d))
	}
	for _, s := range snapshots {
		_, err := r.Snapshots.fill(&Call{Resumed: true}, s)
		completed(s.ID, err)
	}
	for _, i := range instances {
		completed(i.ID, r.Instances.resume(i))
	}
	return nil
}

func settleInstances(tx *store.Tx) {
	for _, i := range slices.Collect(store.Instances.All(tx)) {
		if settled[i.RunState] != "" {
			i.SetRunState(settled[i.RunState])
			store.Instances.Put(tx, i)
		}
	}
}

// settled is the final state of each transition of an instance.
var settled = map[string]string{
	store.RunStarting: store.RunRunning, store.RunRebooting: store.RunRunning,
	store.RunStopping: store.RunStopped,
}

func (r *Simulation) reconcilePlane(ctx context.Context) error {
	var attached []dataplane.Device
	ids := dataplane.IDs{}
	var guests []dataplane.Firmware
	sizes := map[string]int64{}
	running := map[string]bool{} // the instances with a guest
	err := r.store.View(func(tx *store.Tx) {
		ids[dataplane.Left] = tx.Left()
		for i := range store.Instances.All(tx) {
			if i.HasGuest() {
				running[i.ID] = true
			}
			guests = append(guests, firmwareOf(i))
		}
		for d := range store.Disks.All(tx) {
			ids["disks"] = append(ids["disks"], d.ID)
			sizes[d.ID] = d.Size
			if running[d.State.Instance] {
				attached = append(attached, deviceOf(d, d.State.Instance))
			}
		}
		for s := range store.Snapshots.All(tx) {
			ids["snapshots"] = append(ids["snapshots"], s.ID)
		}
		for i := range store.Images.All(tx) {
			ids["images"] = append(ids["images"], i.ID)
		}
	})
	if err != nil {
		return fmt.Errorf("read the records: %w", err)
	}
	for _, g := range guests {
		if err := r.plane.AddGuest(g); err != nil {
			return err
		}
	}
	gone, again, err := r.plane.Adopt(slices.Sorted(maps.Keys(running)))
	if err != nil {
		return err
	}
	for _, id := range gone {
		attached = slices.DeleteFunc(attached,
			func(d dataplane.Device) bool { return d.InstanceID == id })
	}
	if err := errors.Join(r.plane.Reconcile(ctx, attached, ids), r.failed(gone)); err != nil {
		return err
	}
	r.boot = append(r.boot, again...)
	r.store.Gone(ids[dataplane.Left]...)
	for id, size := range sizes {
		if err := r.plane.Trim(id, size); err != nil {
			return fmt.Errorf("bring disk %s to its size: %w", id, err)
		}
	}
	return nil
}

// failed records that instances have failed, because their machines have ended.
func (r *Simulation) failed(ids []string) error {
	return r.store.Update(func(tx *store.Tx) {
		for _, id := range ids {
			i := byID(tx, store.Instances, id)
			i.SetRunState(store.RunFailed)
			store.Instances.Put(tx, i)
		}
	})
}
