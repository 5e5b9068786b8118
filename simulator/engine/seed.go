package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// seeder creates the objects of the Config that the directory lacks.
type seeder struct{ *Simulation }

func (r seeder) projectNames() []string {
	if len(r.config.Projects) == 0 {
		return []string{"default"}
	}
	return r.config.Projects
}

func (r seeder) projects(tx *store.Tx) error {
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

func (r seeder) instances(tx *store.Tx) error {
	r.config.Instances = slices.Clone(r.config.Instances)
	for n, spec := range r.config.Instances {
		id, err := r.instance(tx, spec)
		if err != nil {
			return fmt.Errorf("instance %q: %w", spec.Name, err)
		}
		r.config.Instances[n].ID = id
	}
	return nil
}

// instanceID returns the ID of an instance of the Config.
func (r seeder) instanceID(i InstanceSpec) string {
	if i.ID == "" {
		return store.DerivedID("instance", cmp.Or(i.Project, r.projectNames()[0]), i.Name)
	}
	if id, err := uuid.Parse(i.ID); err == nil {
		return id.String()
	}
	return i.ID
}

// instance creates an instance if the directory lacks it, and returns its ID.
func (r seeder) instance(tx *store.Tx, spec InstanceSpec) (id string, err error) {
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

// images imports the images that the directory lacks. It writes the content before the record.
func (r seeder) images(ctx context.Context) error {
	for _, spec := range r.config.Images {
		if err := r.image(ctx, spec); err != nil {
			return fmt.Errorf("image %q: %w", spec.Name, err)
		}
	}
	return nil
}

func (r seeder) image(ctx context.Context, spec ImageSpec) error {
	img, known, err := r.imageRecord(spec)
	if err != nil || known {
		return err
	}
	if err := r.plane.ImportImage(ctx, img.ID, spec.File, img.Size); err != nil {
		return err
	}
	return r.store.Update(func(tx *store.Tx) error { return store.Images.Put(tx, img) })
}

func (r seeder) imageRecord(spec ImageSpec) (img store.Image, known bool, err error) {
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
