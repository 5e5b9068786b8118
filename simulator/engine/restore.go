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
func (r *Simulation) restore(ctx context.Context, first ...func(*store.Tx) error) error {
	seed := seeder{r}
	err := r.store.Update(func(t *store.Tx) error {
		for _, step := range append(first, prepare, settleDeleted, settleInstances, seed.network) {
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

func prepare(tx *store.Tx) error {
	var tables []store.Table[store.Resource]
	for _, k := range Kinds {
		tables = append(tables, k.Table())
	}
	return store.Prepare(tx, tables)
}

// resume completes the creations that were open when the last simulator ended, as a rack resumes
// its sagas, and undoes those that cannot be completed (A19). Completing a snapshot completes the
// import that it finalizes (A90). Disks come before the instances that they are created for, and
// before unfinished snapshots, from which no disk can be created (A59).
func (r *Simulation) resume() error {
	var disks []store.Disk
	var snapshots []store.SnapshotRecord
	var instances []store.Instance
	err := r.store.View(func(tx *store.Tx) error {
		return errors.Join(
			openCreations(tx, store.Disks, &disks, func(d store.Disk) bool {
				return d.State.State == store.StateCreating
			}),
			openCreations(tx, store.Snapshots, &snapshots, func(s store.SnapshotRecord) bool {
				return s.State == store.SnapshotCreating
			}),
			openCreations(tx, store.Instances, &instances, func(i store.Instance) bool {
				return i.RunState == store.StateCreating
			}))
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

func openCreations[T any](tx *store.Tx, t store.Table[T], into *[]T, open func(T) bool) error {
	return t.Each(tx, func(record T) error {
		if open(record) {
			*into = append(*into, record)
		}
		return nil
	})
}

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

func (r *Simulation) reconcilePlane(ctx context.Context) error {
	var attached []dataplane.Device
	ids := dataplane.IDs{}
	note := func(kind, id string) { ids[kind] = append(ids[kind], id) }
	var guests []dataplane.Firmware
	sizes := map[string]int64{}
	running := map[string]bool{} // the instances with a guest
	err := r.store.View(func(tx *store.Tx) (err error) {
		if ids[dataplane.Left], err = tx.Left(); err != nil {
			return err
		}
		return errors.Join(
			store.Instances.Each(tx, func(i store.Instance) error {
				if i.HasGuest() {
					running[i.ID] = true
				}
				guests = append(guests, firmwareOf(i))
				return nil
			}),
			store.Disks.Each(tx, func(d store.Disk) error {
				note("disks", d.ID)
				sizes[d.ID] = d.Size
				if running[d.State.Instance] {
					attached = append(attached, deviceOf(d, d.State.Instance))
				}
				return nil
			}),
			store.Snapshots.Each(tx, func(sn store.SnapshotRecord) error {
				note("snapshots", sn.ID)
				return nil
			}),
			store.Images.Each(tx, func(i store.Image) error {
				note("images", i.ID)
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
	return r.trim(sizes)
}

func (r *Simulation) trim(sizes map[string]int64) error {
	for id, size := range sizes {
		if err := r.plane.Trim(id, size); err != nil {
			return fmt.Errorf("bring disk %s to its size: %w", id, err)
		}
	}
	return nil
}

// failed records that instances have failed, because their machines have ended.
func (r *Simulation) failed(ids []string) error {
	return r.store.Update(func(tx *store.Tx) error {
		for _, id := range ids {
			i, err := find(tx, store.Instances, "", store.Selector{ID: id})
			if err != nil {
				return err
			}
			i.SetRunState(store.RunFailed)
			if err := store.Instances.Put(tx, i); err != nil {
				return err
			}
		}
		return nil
	})
}
