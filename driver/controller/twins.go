package controller

import (
	"context"
	"slices"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// neighbours are the disks of an instance: the one that is being published, nil if the instance
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

// differ reports whether the other disks of the instance have changed.
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

// twin returns a disk that the guest would show with the same serial number as a disk with this
// name, or nil.
func (n neighbours) twin(name string) *oxide.Disk {
	for i := range n.Others {
		if volume.Serial(string(n.Others[i].Name)) == volume.Serial(name) {
			return &n.Others[i]
		}
	}
	return nil
}

// checkBeforeAttach refuses an attach that would have to be undone, or of a disk that another
// instance has.
func (a attachment) checkBeforeAttach(disk *oxide.Disk, before neighbours) error {
	if err := a.checkAttached(disk, before); err != nil {
		return err
	}
	if at := rack.InstanceOf(disk); at != "" && at != string(a.Instance) {
		return a.stateProblem(disk)
	}
	return nil
}

// listAfterAttach lists the instance's disks after the attach. The attach is done, so every error
// is retryable.
func (c *Service) listAfterAttach(ctx context.Context, a attachment, disk *oxide.Disk) (neighbours,
	error) {
	after, err := c.neighbours(ctx, a)
	switch {
	case err != nil:
		return after, retryLater(err)
	case after.Own == nil:
		return after, csierr.New(csierr.DiskBusy, "the disk %s was attached to the instance %s, but is "+
			"not among its disks; repeat the call", disk.Name, a.Instance)
	}
	return after, nil
}

// checkDisk compares the request with the disk.
func (a attachment) checkDisk(disk *oxide.Disk) error {
	if err := a.checkContext(disk); err != nil {
		return err
	}
	if problem := useProblem(disk, a.Capability); problem != "" {
		return csierr.New(csierr.UseDiffers, "%s", problem)
	}
	return nil
}

// checkAttached returns why a disk must not be attached, or not be used: it is not the one that the
// request describes, or the guest cannot distinguish it from another one.
func (a attachment) checkAttached(disk *oxide.Disk, n neighbours) error {
	if err := a.checkDisk(disk); err != nil {
		return err
	}
	return a.checkTwin(string(disk.Name), n)
}

func (a attachment) checkTwin(name string, n neighbours) error {
	twin := n.twin(name)
	if twin == nil {
		return nil
	}
	return csierr.New(csierr.SerialTaken, "the names of the disks %s and %s, which is attached to "+
		"the instance %s, begin with the same %d bytes, so the guest would show only one of them; "+
		"detach that one", name, twin.Name, a.Instance, volume.SerialBytes)
}

// undoAttach detaches the disk that this call attached. Its error is retryable unless the disk is
// verified to be detached.
func (c *Service) undoAttach(ctx context.Context, a attachment, disk *oxide.Disk,
	why error) error {
	if _, err := c.detachDisk(ctx, a.Disk, a.Instance, false); err != nil {
		return csierr.New(csierr.EffectUnknown, "the disk %s, which this call attached to the instance "+
			"%s, has to be detached again (%s), but may still be attached: %s; repeat the "+
			"call", disk.Name, a.Instance, csierr.Message(why), csierr.Message(err))
	}
	return why
}
