package controller

import (
	"context"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// neighbours are the disks of an instance: the one that is being published, nil when the instance
// does not have it, and the others.
type neighbours struct {
	Own    *oxide.Disk
	Others []oxide.Disk
}

func (c *Service) neighbours(ctx context.Context, a attachment) (neighbours, error) {
	disks, err := c.Rack.InstanceDisks(ctx, a.Instance)
	var n neighbours
	for i := range disks {
		if disks[i].Id == string(a.Disk) {
			n.Own = &disks[i]
		} else {
			n.Others = append(n.Others, disks[i])
		}
	}
	return n, err
}

// differ reports whether other disks are beside the published one than there were before.
func (n neighbours) differ(before neighbours) bool {
	ids := func(disks []oxide.Disk) []string {
		var all []string
		for _, d := range disks {
			all = append(all, d.Id)
		}
		slices.Sort(all)
		return all
	}
	return !slices.Equal(ids(n.Others), ids(before.Others))
}

// twin is a disk whose serial number the guest could not tell from that of a disk with this name.
func (n neighbours) twin(name string) *oxide.Disk {
	for i := range n.Others {
		if volume.Serial(string(n.Others[i].Name)) == volume.Serial(name) {
			return &n.Others[i]
		}
	}
	return nil
}

// lookBefore refuses an attach that would have to be undone. A disk without a context of this
// driver is read first, because the list does not show a disk that is not attached.
func (c *Service) lookBefore(ctx context.Context, a attachment) (neighbours, error) {
	name := a.DiskName
	if !a.named() {
		disk, err := c.Rack.Disk(ctx, a.Disk)
		if err != nil {
			return neighbours{}, err
		}
		if err := c.checkDisk(a, disk); err != nil {
			return neighbours{}, err
		}
		name = string(disk.Name)
	}
	before, err := c.neighbours(ctx, a)
	hopeless := csierr.IsNotFound(err)
	if err == nil {
		err = a.checkTwin(name, before)
		hopeless = err != nil
	}
	if hopeless && a.named() && before.Own == nil {
		// CP-4: a disk that is unknown is told before anything else.
		if _, diskErr := c.Rack.Disk(ctx, a.Disk); diskErr != nil {
			return before, diskErr
		}
	}
	return before, err
}

// lookAfter lists what the instance has once the disk is attached. The attach has been done, so
// every failure brings the caller back.
func (c *Service) lookAfter(ctx context.Context, a attachment, disk *oxide.Disk) (neighbours,
	error) {
	after, err := c.neighbours(ctx, a)
	switch {
	case err != nil:
		return after, comeBack(err)
	case after.Own == nil:
		return after, csierr.New(csierr.DiskBusy, "the disk %s was attached to the instance "+
			"%s and is not among its disks now; repeat the call", disk.Name, a.Instance)
	}
	return after, nil
}

// checkDisk holds the request to what the rack shows of the disk.
func (c *Service) checkDisk(a attachment, disk *oxide.Disk) error {
	if err := a.checkContext(disk); err != nil {
		return err
	}
	if problem := c.useProblem(disk, a.Capability); problem != "" {
		return csierr.New(csierr.UseDiffers, "%s", problem)
	}
	return nil
}

// objection says why a disk that is attached must not be used: it is not the one that the request
// tells of, or the guest cannot tell it from another one.
func (c *Service) objection(a attachment, disk *oxide.Disk, n neighbours) error {
	if err := c.checkDisk(a, disk); err != nil {
		return err
	}
	return a.checkTwin(string(disk.Name), n)
}

func (a attachment) checkTwin(name string, n neighbours) error {
	twin := n.twin(name)
	if twin == nil {
		return nil
	}
	return csierr.New(csierr.SerialTaken, "the names of the disks %s and %s, "+
		"which is attached to the instance %s, begin with the same %d bytes, and the guest would show "+
		"only one of them; detach that one", name, twin.Name, a.Instance, volume.SerialBytes)
}

// undoAttach detaches the disk that this call attached. The caller has to come back unless the disk
// is seen to be detached.
func (c *Service) undoAttach(ctx context.Context, a attachment, disk *oxide.Disk,
	why error) error {
	if _, err := c.detachDisk(ctx, a.Disk, a.Instance); err != nil {
		return csierr.New(csierr.EffectUnknown, "the disk %s, which this call attached to "+
			"the instance %s, is to be detached again (%s), and may still be attached: %s; repeat the "+
			"call", disk.Name, a.Instance, csierr.Message(why), csierr.Message(err))
	}
	return why
}
