package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// restore repairs the records and the data plane in case a simulator was killed, and adds the
// objects of the Config that the directory lacks. Before all this, it calls the functions in first.
func (r *Simulation) restore(ctx context.Context, first ...func(*store.Tx)) error {
	seed := seeder{r}
	err := r.store.Update(func(t *store.Tx) {
		for _, step := range append(first, prepare, store.ReleaseDeleted, settleInstances, seed.network) {
			step(t)
		}
	})
	if err != nil {
		return fmt.Errorf("settle the records: %w", err)
	}
	for _, step := range []func() error{
		func() error { return seed.images(ctx) },
		func() error { return r.store.Update(seed.instances) },
		seed.disks,
		func() error { return r.reconcilePlane(ctx) },
		r.resume,
	} {
		if err := step(); err != nil {
			return err
		}
	}
	for _, id := range r.boot {
		_, err := Instances{r}.Start(&Call{Context: ctx,
			Named: map[string]store.Selector{store.Instances.Name: {ID: id}}})
		r.logFailure("an instance cannot be started", "instance", id, err)
	}
	r.boot = nil
	return nil
}

func prepare(tx *store.Tx) {
	var kinds []string
	for _, k := range Kinds {
		kinds = append(kinds, k.Name)
	}
	store.Prepare(tx, kinds...)
}

// resume completes the creations that an earlier simulator left unfinished, as a rack resumes its
// sagas, and undoes those that it cannot complete (A19). If a snapshot finalizes an import, resume
// completes both (A90). It resumes disks first for two reasons: instances need their disks, and a
// disk from an unfinished snapshot must fail (A59).
func (r *Simulation) resume() error {
	var disks []store.Disk
	var snapshots []store.SnapshotRecord
	var instances []store.Instance
	err := r.store.View(func(tx *store.Tx) {
		disks = slices.Collect(store.Disks.All(tx))
		snapshots = slices.Collect(store.Snapshots.All(tx))
		instances = slices.Collect(store.Instances.All(tx))
	})
	if err != nil {
		return fmt.Errorf("find the open creations: %w", err)
	}
	const failure = "a creation that a restart resumed has failed"
	for _, d := range disks {
		if d.State.State == store.StateCreating {
			r.logFailure(failure, "object", d.ID, Disks{r}.resume(d))
		}
	}
	for _, s := range snapshots {
		if s.State == store.SnapshotCreating {
			_, err := Snapshots{r}.fill(&Call{Resumed: true}, s)
			r.logFailure(failure, "object", s.ID, err)
		}
	}
	for _, i := range instances {
		if i.RunState == store.StateCreating {
			r.logFailure(failure, "object", i.ID, Instances{r}.resume(i))
		}
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
	gone, again, err := r.plane.VMs.Adopt(slices.Sorted(maps.Keys(running)))
	if err != nil {
		return err
	}
	attached = slices.DeleteFunc(attached,
		func(d dataplane.Device) bool { return slices.Contains(gone, d.InstanceID) })
	err = errors.Join(r.plane.Reconcile(ctx, attached, ids),
		r.store.Update(func(tx *store.Tx) { failInstances(tx, gone) }))
	if err != nil {
		return err
	}
	r.boot = append(r.boot, again...)
	r.store.Gone(ids[dataplane.Left]...)
	for id, size := range sizes {
		if err := r.plane.Trim(id, size); err != nil {
			return fmt.Errorf("set the size of disk %s: %w", id, err)
		}
	}
	return nil
}

func failInstances(tx *store.Tx, ids []string) {
	for _, id := range ids {
		i := byID(tx, store.Instances, id)
		i.SetRunState(store.RunFailed)
		store.Instances.Put(tx, i)
	}
}

// seeder creates the objects of the Config that the records lack.
type seeder struct{ *Simulation }

func (r seeder) network(tx *store.Tx) {
	c := &Change{Simulation: r.Simulation, Tx: tx, derive: true}
	for _, name := range r.config.Projects {
		problem := store.CheckName(name)
		tx.Refuse(problem != "", fmt.Errorf("project %q: %s", name, problem))
		if _, ok := configured(tx, name); ok {
			continue
		}
		in := named(name, "made by the simulator", nil)
		in.id = store.DerivedID("project", name)
		c.create(Project, store.Resource{}, in)
	}
	createPools(c)
}

// configured finds a project of the Config, even if a client has renamed the project.
func configured(tx *store.Tx, name string) (store.Project, bool) {
	if p, ok := store.Projects.Get(tx, store.DerivedID("project", name)); ok {
		return p, ok
	}
	return store.Projects.ByName(tx, "", name)
}

// project finds a project of the Config by its name; "" means the first one.
func (r seeder) project(tx *store.Tx, name string) store.Project {
	name = cmp.Or(name, r.config.Projects[0])
	p, ok := configured(tx, name)
	tx.Refuse(!ok, fmt.Errorf("there is no project %q", name))
	return p
}

func (r seeder) instances(tx *store.Tx) {
	r.config.Instances = slices.Clone(r.config.Instances)
	for n, spec := range r.config.Instances {
		err := tx.Try(func(tx *store.Tx) { r.config.Instances[n].ID = r.instance(tx, spec) })
		tx.Refuse(err != nil, fmt.Errorf("instance %q: %w", spec.Name, err))
	}
}

// instance returns the ID of an instance of the Config. It creates the instance if it is missing.
func (r seeder) instance(tx *store.Tx, spec InstanceSpec) string {
	problem := store.CheckName(spec.Name)
	tx.Refuse(problem != "", errors.New(problem))
	p := r.project(tx, spec.Project)
	parsed, err := uuid.Parse(cmp.Or(spec.ID,
		store.DerivedID("instance", cmp.Or(spec.Project, r.config.Projects[0]), spec.Name)))
	tx.Refuse(err != nil, fmt.Errorf("its ID %q is not a UUID", spec.ID))
	if existing, ok := store.Instances.ByName(tx, p.ID, spec.Name); ok {
		tx.Refuse(spec.ID != "" && existing.ID != parsed.String(),
			fmt.Errorf("in the directory it has the ID %s, not %s", existing.ID, parsed))
		return existing.ID
	}
	if other, ok := store.Instances.Get(tx, parsed.String()); ok {
		tx.Check(fmt.Errorf("its ID %s is that of instance %q; give it another one", parsed, other.Name))
	}
	i := store.Instance{
		Identity:  store.NewIdentity(parsed.String(), spec.Name, "made by the simulator"),
		ProjectID: p.ID, NCPUs: 2, Memory: 4 * gibibyte, Hostname: spec.Name,
		AutoRestartEnabled: true,
	}
	i.SetRunState(store.RunRunning)
	if spec.Stopped || r.config.Machines != "" {
		i.SetRunState(store.RunStopped)
	}
	if !spec.Stopped && r.config.Machines != "" {
		r.boot = append(r.boot, i.ID)
	}
	var nics []store.NetworkInterface
	err = tx.Try(func(tx *store.Tx) {
		nics = newInterfaces(tx, i, []InterfaceCreate{DefaultInterface})
		r.attachNAT(tx, i, nics)
	})
	var refused *Error
	if errors.As(err, &refused) && (refused.Status == http.StatusNotFound ||
		refused.Status == http.StatusInsufficientStorage) {
		// A client has removed the network or filled the pool, so the instance gets no interface.
		nics, err = []store.NetworkInterface{}, nil
	}
	tx.Check(err)
	tx.PutInterfaces(i.ID, nics)
	store.Instances.Put(tx, i)
	return i.ID
}

// images imports the images that the records lack. It writes an image's bytes before its record.
func (r seeder) images(ctx context.Context) error {
	for _, spec := range r.config.Images {
		if err := r.image(ctx, spec); err != nil {
			return fmt.Errorf("image %q: %w", spec.Name, err)
		}
	}
	return nil
}

func (r seeder) image(ctx context.Context, spec ImageSpec) error {
	if problem := store.CheckName(spec.Name); problem != "" {
		return errors.New(problem)
	}
	img := store.Image{
		Identity: store.NewIdentity(store.DerivedID("image", spec.Project, spec.Name), spec.Name,
			"made by the simulator"),
		OS: "simulated", Version: "1",
		BlockSize: cmp.Or(spec.BlockSize, 512), Size: spec.SizeBytes,
	}
	if spec.File != "" {
		info, err := os.Stat(spec.File)
		if err != nil {
			return err
		}
		img.Size = max(img.Size, roundUp(info.Size(), int64(img.BlockSize)))
	}
	if img.Size <= 0 {
		return errors.New("it needs a size or a file that is not empty")
	}
	known := false
	err := r.store.Update(func(tx *store.Tx) {
		if spec.Project != "" {
			p := r.project(tx, spec.Project)
			img.ProjectID = &p.ID
		}
		// Look for the ID, too: a client may have promoted or demoted the image since its import.
		_, known = store.Images.Get(tx, img.ID)
		known = known || store.Images.Taken(tx, store.Deref(img.ProjectID), spec.Name)
		if !known {
			tx.Leave(img.ID)
		}
	})
	if err != nil || known {
		return err
	}
	if err := r.plane.ImportImage(ctx, img.ID, spec.File, img.Size); err != nil {
		return err
	}
	return r.store.Update(func(tx *store.Tx) { store.Images.Put(tx, img) })
}

func (r seeder) disks() error {
	for _, spec := range r.config.Disks {
		if err := r.disk(spec); err != nil {
			return fmt.Errorf("disk %q: %w", spec.Name, err)
		}
	}
	return nil
}

func (r seeder) disk(spec DiskSpec) error {
	if problem := store.CheckName(spec.Name); problem != "" {
		return errors.New(problem)
	}
	c := DiskCreate{Name: spec.Name, Description: "made by the simulator", Size: spec.SizeBytes,
		Backend: store.TypeDistributed,
		Source:  DiskSource{Kind: SourceBlank, BlockSize: cmp.Or(spec.BlockSize, 4096)}}
	if !slices.Contains([]int{512, 2048, 4096}, c.Source.BlockSize) {
		return fmt.Errorf("its block size is %d; use 512, 2048 or 4096", spec.BlockSize)
	}
	var owner store.Project
	var to store.Instance
	known := false
	err := r.store.View(func(tx *store.Tx) {
		owner = r.project(tx, spec.Project)
		c.ID = store.DerivedID("disk", owner.ID, spec.Name)
		_, known = store.Disks.Get(tx, c.ID)
		if known = known || store.Disks.Taken(tx, owner.ID, spec.Name); known {
			return
		}
		var ok bool
		to, ok = store.Instances.ByName(tx, owner.ID, spec.Instance)
		tx.Refuse(!ok && spec.Instance != "", fmt.Errorf("project %q has no instance %q",
			cmp.Or(spec.Project, r.config.Projects[0]), spec.Instance))
		if spec.Image == "" {
			return
		}
		img, ok := store.Images.ByName(tx, owner.ID, spec.Image)
		if !ok {
			img, ok = store.Images.ByName(tx, "", spec.Image)
		}
		tx.Refuse(!ok, fmt.Errorf("neither its project nor the silo has an image %q", spec.Image))
		c.Source = DiskSource{Kind: SourceImage, ID: img.ID}
	})
	if err != nil || known {
		return err
	}
	// After a reset the disk has the same ID as before, and bytes may be left under this ID.
	if err := r.plane.RemoveDisk(c.ID); err != nil {
		return err
	}
	made, err := Disks(r).create(&Call{Resumed: true}, owner, c)
	if err != nil || spec.Instance == "" {
		return err
	}
	return r.store.Update(func(tx *store.Tx) {
		now := r.Switches()
		now.Hotplug = adminapi.HotplugFull // permit the attach: the instance has not started yet
		r.checkAttach(tx, to, made, now)
		made.State = store.DiskState{State: store.StateAttached, Instance: to.ID}
		tx.PutDisk(made)
	})
}

func roundUp(n, unit int64) int64 { return (n + unit - 1) / unit * unit }
