package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// restore brings records and data plane to where a proper end would have left them, and adds what
// the config names and the directory lacks.
func (r *Rack) restore(ctx context.Context) error {
	err := r.store.Update(func(t *store.Tx) error {
		for _, step := range []func(*store.Tx) error{
			store.Prepare, settleSagas, settleDeleted, settleDisks, settleSnapshots, settleInstances,
			r.seedProjects,
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
	if err := r.seedImages(ctx); err != nil {
		return err
	}
	if err := r.store.Update(r.seedInstances); err != nil {
		return err
	}
	return r.reconcilePlane(ctx)
}

// settleDisks undoes creations that were not acknowledged, and ends the maintenance of snapshots
// that are undone (A19).
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

// settleSagas undoes the creations of instances, with the disks created for them.
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

// settled is where a transition of an instance ends.
var settled = map[string]string{
	store.RunStarting: store.RunRunning, store.RunRebooting: store.RunRunning,
	store.RunStopping: store.RunStopped,
}

func (r *Rack) projectNames() []string {
	if len(r.config.Projects) == 0 {
		return []string{"default"}
	}
	return r.config.Projects
}

func (r *Rack) seedProjects(tx *store.Tx) error {
	for _, name := range r.projectNames() {
		if problem := store.CheckName(name); problem != "" {
			return fmt.Errorf("project %q: %s", name, problem)
		}
		if store.Projects.Taken(tx, "", name) {
			continue
		}
		p := store.Project{Identity: store.NewIdentity(store.DerivedID("project", name), name,
			"made by the simulator")}
		if err := store.Projects.Put(tx, p); err != nil {
			return err
		}
	}
	return nil
}

func (r *Rack) seedInstances(tx *store.Tx) error {
	r.config.Instances = slices.Clone(r.config.Instances)
	for n, spec := range r.config.Instances {
		id, err := r.seedInstance(tx, spec)
		if err != nil {
			return fmt.Errorf("instance %q: %w", spec.Name, err)
		}
		r.config.Instances[n].ID = id
	}
	return nil
}

// instanceID is the ID of an instance of the Config.
func (r *Rack) instanceID(i InstanceSpec) string {
	if i.ID == "" {
		return store.DerivedID("instance", cmp.Or(i.Project, r.projectNames()[0]), i.Name)
	}
	if id, err := uuid.Parse(i.ID); err == nil {
		return id.String()
	}
	return i.ID
}

// seedInstance makes an instance if the directory lacks it, and returns its ID.
func (r *Rack) seedInstance(tx *store.Tx, spec InstanceSpec) (id string, err error) {
	if problem := store.CheckName(spec.Name); problem != "" {
		return "", errors.New(problem)
	}
	owner := cmp.Or(spec.Project, r.projectNames()[0])
	p, ok, err := store.Projects.ByName(tx, "", owner)
	if err != nil || !ok {
		return "", errors.Join(err, fmt.Errorf("there is no project %q", owner))
	}
	parsed, err := uuid.Parse(r.instanceID(spec))
	if err != nil {
		return "", fmt.Errorf("its ID %q is no UUID", spec.ID)
	}
	existing, ok, err := store.Instances.ByName(tx, p.ID, spec.Name)
	if err != nil {
		return "", err
	}
	if ok {
		if spec.ID != "" && existing.ID != parsed.String() {
			return "", fmt.Errorf("the directory knows it as %s, not as %s", existing.ID, parsed)
		}
		return existing.ID, nil
	}
	other, ok, err := store.Instances.Get(tx, parsed.String())
	if err != nil {
		return "", err
	}
	if ok {
		return "", fmt.Errorf("its ID %s is that of instance %q; give it another one",
			parsed, other.Name)
	}
	i := store.Instance{
		Identity:  store.NewIdentity(parsed.String(), spec.Name, "made by the simulator"),
		ProjectID: p.ID, NCPUs: 2, Memory: 4 * gibibyte, Hostname: spec.Name,
		AutoRestartEnabled: true,
	}
	i.SetRunState(store.RunRunning)
	if spec.Stopped {
		i.SetRunState(store.RunStopped)
	}
	nics, err := newInterfaces(tx, i, []InterfaceCreate{DefaultInterface})
	if err != nil {
		return "", err
	}
	return i.ID, tx.InsertInstance(i, nics, nil)
}

// seedImages imports the images that the directory lacks. The content comes before the record.
func (r *Rack) seedImages(ctx context.Context) error {
	for _, spec := range r.config.Images {
		if err := r.seedImage(ctx, spec); err != nil {
			return fmt.Errorf("image %q: %w", spec.Name, err)
		}
	}
	return nil
}

func (r *Rack) seedImage(ctx context.Context, spec ImageSpec) error {
	img, known, err := r.imageRecord(spec)
	if err != nil || known {
		return err
	}
	if err := r.plane.ImportImage(ctx, img.ID, spec.File, img.Size); err != nil {
		return err
	}
	return r.store.Update(func(tx *store.Tx) error { return store.Images.Put(tx, img) })
}

func (r *Rack) imageRecord(spec ImageSpec) (img store.Image, known bool, err error) {
	if problem := store.CheckName(spec.Name); problem != "" {
		return img, false, errors.New(problem)
	}
	img = store.Image{
		Identity: store.NewIdentity(store.DerivedID("image", spec.Project, spec.Name), spec.Name,
			"made by the simulator"),
		OS: "simulated", Version: "1",
		BlockSize: cmp.Or(spec.BlockSize, 512), Size: spec.SizeBytes,
	}
	if spec.File != "" {
		info, err := os.Stat(spec.File)
		if err != nil {
			return img, false, err
		}
		img.Size = max(img.Size, roundUp(info.Size(), int64(img.BlockSize)))
	}
	if img.Size <= 0 {
		return img, false, errors.New("it needs a size or a file that is not empty")
	}
	err = r.store.View(func(tx *store.Tx) error {
		if spec.Project != "" {
			p, ok, err := store.Projects.ByName(tx, "", spec.Project)
			if err != nil || !ok {
				return errors.Join(err, fmt.Errorf("there is no project %q", spec.Project))
			}
			img.ProjectID = &p.ID
		}
		known = store.Images.Taken(tx, store.Deref(img.ProjectID), spec.Name)
		return nil
	})
	return img, known, err
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }

// reconcilePlane makes the data plane match the records.
func (r *Rack) reconcilePlane(ctx context.Context) error {
	var attached []dataplane.Device
	var diskIDs, snapshotIDs []string
	var guests []dataplane.Guest
	sizes := map[string]int64{}
	err := r.store.View(func(tx *store.Tx) error {
		running := map[string]bool{}
		return errors.Join(
			store.Instances.Each(tx, func(i store.Instance) error {
				running[i.ID] = i.HasGuest()
				guests = append(guests, dataplane.Guest{InstanceID: i.ID, Name: i.Name})
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
