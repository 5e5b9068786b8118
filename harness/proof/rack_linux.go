package proof

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
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
	count *Invariant) (*RackBystanders, error) {
	b := &RackBystanders{}
	var files [bystanders]string
	for i := range files {
		disk, err := rack.CreateDisk(ctx, rack.Project, fmt.Sprintf("bystander-%s-%d", instance, i),
			harness.GiB)
		if err != nil {
			return b, err
		}
		b.ids, files[i] = append(b.ids, disk.Id), DiskFile(rack, disk.Id)
	}
	dir := rack.Dir + "-bystanders-" + instance
	var err error
	if b.Bystanders, err = NewBystanders(ctx, dir, files, member, count); err != nil {
		return b, err
	}
	for _, id := range b.ids {
		err = errors.Join(err, rack.AttachDisk(ctx, id, rack.Instance(instance).ID))
	}
	if err != nil {
		return b, err
	}
	return b, b.Resume(ctx)
}

// DiskFile returns the path of the backing file of a disk.
func DiskFile(rack *harness.Rack, id string) string {
	return filepath.Join(rack.Dir, "sim", "disks", id+".img")
}

// Has reports whether a disk of the rack is a bystander.
func (b *RackBystanders) Has(id string) bool { return slices.Contains(b.ids, id) }

// HasFile reports whether a file is the backing file of a bystander.
func (b *RackBystanders) HasFile(path string) bool { return slices.Contains(b.files[:], path) }

// Resume mounts the first disk after Suspend, as soon as the disk is attached.
func (b *RackBystanders) Resume(ctx context.Context) error {
	return harness.Await(ctx, 20*time.Second, b.Mount)
}
