package proof

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// RackBystanders are the bystanders of an instance of a rack. An administrator made these
// disks.
type RackBystanders struct {
	*Bystanders
	// ids are the IDs of the disks.
	ids []string
}

// NewRackBystanders creates the disks and attaches them to an instance that runs. The result can be
// closed after an error, too.
func NewRackBystanders(ctx context.Context, rack *harness.Rack, instance string, member Member,
	count *Invariant) (b *RackBystanders, err error) {
	b = &RackBystanders{}
	defer harness.Catch(&err)
	var files [bystanders]string
	for i := range files {
		disk := harness.Got(rack.CreateDisk(ctx, rack.Project,
			fmt.Sprintf("bystander-%s-%d", instance, i), harness.GiB))
		b.ids, files[i] = append(b.ids, disk.Id), DiskFile(rack, disk.Id)
	}
	b.Bystanders = harness.Got(NewBystanders(ctx, rack.Dir+"-bystanders-"+instance, files, member,
		count))
	for _, id := range b.ids {
		harness.Must(rack.AttachDisk(ctx, id, rack.Instance(instance).ID))
	}
	return b, b.Resume(ctx)
}

// DiskFile returns the path of the backing file of a disk.
func DiskFile(rack *harness.Rack, id string) string {
	return filepath.Join(rack.Dir, "sim", "disks", id+".img")
}

// Has reports whether a disk of the rack is a bystander.
func (b *RackBystanders) Has(id string) bool { return slices.Contains(b.ids, id) }

// Resume mounts the first disk after Suspend, as soon as the disk is attached.
func (b *RackBystanders) Resume(ctx context.Context) error {
	return harness.Await(ctx, 20*time.Second, b.Mount)
}

// Environment is a rack with its drivers, and with bystanders in one of its instances. After a
// trial without failures, the next trial uses it again.
type Environment struct {
	*harness.Environment
	Proof *Proof
	// Bystanders are other disks of an instance, which no call may change.
	Bystanders *RackBystanders
}

// StartEnvironment starts a rack. The instance gets bystanders, unless its name is empty.
func (p *Proof) StartEnvironment(ctx context.Context, run *harness.Run,
	options harness.RackOptions, instance string, member Member) (*Environment, error) {
	started, err := run.StartEnvironment(ctx, options)
	env := &Environment{Environment: started, Proof: p, Bystanders: &RackBystanders{}}
	if err == nil && instance != "" {
		env.Bystanders, err = NewRackBystanders(ctx, env.Rack, instance, member, p.Bystanders)
	}
	return env, err
}

// Close compares the bystanders, and stops the drivers and the rack. It returns an error if one of
// them fails or leaves something behind.
func (e *Environment) Close() error {
	return errors.Join(e.Bystanders.Close(), e.Environment.Close())
}

// Abandon kills all processes after a failure, and releases their mounts and devices. The files
// remain until the run ends.
func (e *Environment) Abandon(ctx context.Context) error {
	errs := []error{e.Bystanders.Suspend()}
	for _, plugin := range e.Plugins {
		plugin.Kill()
	}
	e.Rack.Kill()
	errs = append(errs, EndMountsBelow(e.Rack.Dir))
	_, err := loopdev.DetachBelow(ctx, e.Rack.Dir)
	return errors.Join(append(errs, err)...)
}
