package controller

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/rack"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// ControllerPublishVolume attaches the volume's disk to the node's instance. A disk that is already
// attached to this instance is a success.
func (c *Service) ControllerPublishVolume(ctx context.Context,
	req *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	a, err := c.parsePublish(req)
	if err != nil {
		return nil, err
	}
	disk, err := a.attach(ctx)
	if err != nil {
		return nil, c.changes.unlessOpen(a.attached(), err)
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext(disk)}, nil
}

// attachment names a disk and the instance that a call attaches it to, or detaches it from.
type attachment struct {
	*Service
	Disk, Instance oxide.NameOrId
	// These fields are set for a publish only.
	DiskName   string // from volume_context, empty for most static volumes
	ContextID  string // the disk's id in volume_context
	Capability *csi.VolumeCapability
}

func (c *Service) parsePublish(req *csi.ControllerPublishVolumeRequest) (attachment, error) {
	switch {
	case req.GetVolumeId() == "":
		return attachment{}, volumeIDMissing()
	case req.GetNodeId() == "":
		return attachment{}, csierr.New(csierr.FieldMissing, "node_id is missing")
	}
	if err := volume.CheckCapability(req.GetVolumeCapability()); err != nil {
		return attachment{}, err
	}
	if req.GetReadonly() {
		return attachment{}, csierr.New(csierr.ReadOnlyUnsupported, "readonly is not supported when a "+
			"disk is attached; let the node mount the volume read-only")
	}
	disk, ok := rack.ID(req.GetVolumeId())
	if !ok {
		return attachment{}, rack.VolumeNotFound(req.GetVolumeId())
	}
	instance, ok := rack.ID(req.GetNodeId())
	if !ok {
		return attachment{}, rack.InstanceNotFound(req.GetNodeId())
	}
	return attachment{Service: c, Disk: disk, Instance: instance,
		DiskName:  req.GetVolumeContext()[volume.CtxDiskName],
		ContextID: req.GetVolumeContext()[volume.CtxDiskID], Capability: req.GetVolumeCapability()}, nil
}

func (a attachment) attached() change {
	return change{event: flight.DiskAttached, id: string(a.Disk), instance: string(a.Instance)}
}

func (a attachment) detached() change {
	return change{event: flight.DiskDetached, id: string(a.Disk), instance: string(a.Instance),
		noted: flight.Fields{Instance: string(a.Instance)}}
}

func (a attachment) has(disk *oxide.Disk) bool {
	return rack.InstanceOf(disk) == string(a.Instance)
}

// attach attaches the disk. It lists the instance's disks before and after: if the names of two
// disks begin with the same 20 bytes, the guest shows only one of them (CP-12). The first list
// avoids a useless attach. The second finds a disk that was attached meanwhile: if two calls attach
// two such disks at once, the call that lists last finds both, so at most one call returns OK. If
// the second list causes an error, the disk stays attached until the CO unpublishes it, because an
// earlier call may have attached it. (A rack accepts an attach of an attached disk.)
//
// Right before the attach it reads the disk, and requests nothing if another instance has the disk.
// A rack refuses such a request (A34), but a faulty rack could take the disk from a running
// workload. If another instance gets the disk after the read, only the rack can refuse.
func (a attachment) attach(ctx context.Context) (*oxide.Disk, error) {
	if _, err := a.changes.await(ctx, a.detached()); err != nil {
		return nil, err
	}
	before, err := a.neighbours(ctx)
	if own := before.Own; err == nil && own != nil && a.has(own) &&
		own.State.State() == oxide.DiskStateStateAttached {
		a.attached().confirm(ctx, flight.Fields{Disk: string(own.Name)})
		return own, a.check(own, before)
	}
	if err != nil && !csierr.IsNotFound(err) {
		return nil, err
	}
	// CP-4: if neither the disk nor the instance exists, the error names the disk.
	look := rack.Looking()
	found, lookErr := a.Rack.Disk(ctx, a.Disk)
	switch {
	case lookErr != nil:
		return nil, lookErr
	case err != nil:
		return nil, err
	}
	if err := a.check(found, before); err != nil {
		return nil, err
	}
	if rack.InstanceOf(found) != "" && !a.has(found) {
		return nil, a.stateProblem(found)
	}
	disk, err := a.requestAttach(ctx, look, before, nil)
	if err != nil {
		return nil, err
	}
	a.attached().confirm(ctx, flight.Fields{Disk: string(disk.Name)})
	// The disk is attached now, so every error must be retryable.
	after, err := a.neighbours(ctx)
	switch {
	case err != nil:
		return nil, retryLater(err)
	case after.Own == nil:
		return nil, csierr.New(csierr.DiskBusy, "the disk %s was attached to the instance %s, but is "+
			"not among its disks; repeat the call", rack.DiskText(disk), a.Instance)
	}
	if why := a.check(disk, after); why != nil {
		e := csierr.From(why, csierr.Internal)
		return nil, csierr.Coded(codes.Aborted, e.Reason, "%w; until then this disk stays attached", e)
	}
	return disk, nil
}

// requestAttach attaches the disk and returns it. The parameter refused is the rack's first refusal
// during this call, or nil. The cause of a refusal may be gone when the driver reads the disk and
// the instance. So requestAttach asks the rack twice before it returns InstanceMustBeStopped.
func (a attachment) requestAttach(ctx context.Context, look rack.Look, before neighbours,
	refused error) (disk *oxide.Disk, err error) {
	const doing = "attach disk"
	record, err := a.request(ctx, doing, look, a.attached(), func(ctx context.Context) (err error) {
		disk, err = a.Rack.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
			Instance: a.Instance,
			Body:     &oxide.DiskPath{Disk: a.Disk},
		})
		if err != nil {
			return err
		}
		return a.checkAnswer(doing, disk)
	})
	answered := err == nil
	switch {
	case answered:
	case rack.NotFound(err), rack.Refused(err):
		look = rack.Looking()
		disk, err = a.explainRefusedAttach(ctx, before, err)
		if csierr.Has(err, csierr.InstanceMustBeStopped) && refused == nil {
			return a.requestAttach(ctx, look, before, err)
		}
	case csierr.ReasonOf(err) == "" || csierr.Has(err, csierr.LookTooOld):
		err = rack.Error(ctx, doing, err)
	default:
		disk, err = a.resolveAttach(ctx, before, err)
	}
	if err != nil {
		return nil, err
	}
	disk, err = a.awaitAttached(ctx, disk)
	if err == nil && answered {
		record.End(nil, flight.Fields{Disk: string(disk.Name)})
	}
	return disk, retryLater(err)
}

func (a attachment) checkAnswer(doing string, disk *oxide.Disk) error {
	switch err := rack.ValidateDisk(doing, disk); {
	case err != nil:
		return err
	case disk.Id != string(a.Disk):
		return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", a.Disk, disk.Id)
	}
	return a.checkPlace(doing, disk)
}

func (a attachment) checkPlace(doing string, disk *oxide.Disk) error {
	state := disk.State.State()
	if !a.has(disk) || state == oxide.DiskStateStateDetaching {
		return rack.InvalidResponse(doing, "the disk %s is %s %s, not attached to the instance %s",
			rack.DiskText(disk), state, rack.InstanceOf(disk), a.Instance)
	}
	return nil
}

func (a attachment) awaitAttached(ctx context.Context, disk *oxide.Disk) (*oxide.Disk, error) {
	disk, err := awaitDisk(ctx, a.Rack, disk, oxide.DiskStateStateAttaching)
	switch {
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateAttaching:
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still attaching the disk %s; "+
			"repeat the call", rack.DiskText(disk))
	}
	return disk, a.checkPlace("attach disk", disk)
}

// resolveAttach finds out whether the rack made an attach that it did not clearly answer. If so, it
// returns the disk, and the driver does not attach again: a second attach could disturb a device
// that the instance has. If the instance lacks the device, the node service returns DeviceNotFound.
func (a attachment) resolveAttach(ctx context.Context, before neighbours, why error) (*oxide.Disk,
	error) {
	disk, err := a.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return nil, err
	case err != nil:
		return nil, retryLater(err)
	case disk.State.State() == oxide.DiskStateStateDetached:
		if len(before.Others) >= a.maxDisks() {
			e := csierr.From(why, csierr.RackError)
			why = e.WithText(fmt.Sprintf("%s; the instance %s has %d disks, the boot disk included, and "+
				"the rack allows %d: if it cannot say so, detach one of them", e.Error(), a.Instance,
				len(before.Others), a.maxDisks()))
		}
		return nil, retryLater(why)
	}
	return disk, a.stateProblem(disk)
}

// explainRefusedAttach derives the reason of the refusal from the disk's state or, if that allows
// an attach, from the instance. If the disk is already attached to a.Instance, it returns the disk.
// If the instance's disks differ from those in the parameter before, the error is retryable.
func (a attachment) explainRefusedAttach(ctx context.Context, before neighbours, why error) (
	*oxide.Disk, error) {
	disk, err := a.Rack.Disk(ctx, a.Disk)
	if err != nil {
		return nil, err
	}
	if disk.State.State() != oxide.DiskStateStateDetached {
		return disk, a.stateProblem(disk)
	}
	instance, err := a.Rack.Instance(ctx, a.Instance)
	if err != nil {
		return nil, err
	}
	if disk.ProjectId != instance.ProjectId {
		return nil, csierr.New(csierr.OtherProject, "the disk %s and the instance %s "+
			"are in different projects", rack.DiskText(disk), rack.InstanceText(instance))
	}
	now, err := a.neighbours(ctx)
	switch {
	case err != nil:
		return nil, err
	case len(now.Others) >= a.maxDisks():
		return nil, csierr.New(csierr.InstanceFull, "the instance %s has %d disks, the boot disk "+
			"included, and the rack allows %d", rack.InstanceText(instance), len(now.Others), a.maxDisks())
	case now.differ(before):
		return nil, csierr.New(csierr.OperationPending, "the rack did not attach the disk %s, and the "+
			"disks of the instance %s changed meanwhile; repeat the call", rack.DiskText(disk),
			rack.InstanceText(instance))
	}
	return nil, instanceRefusal("attach", disk, instance, why)
}

// stateProblem returns why a disk that is not detached cannot be attached. It returns nil if the
// disk is attached to a.Instance, or is being attached to it.
func (a attachment) stateProblem(disk *oxide.Disk) error {
	switch state := disk.State.State(); {
	case state == oxide.DiskStateStateDetaching:
		// The disk is being detached, from this instance or from another one (CP-13).
		return diskBusy(disk)
	case rack.InstanceOf(disk) != "" && !a.has(disk):
		return csierr.New(csierr.DiskAttachedElsewhere, "the disk %s is %s at the instance %s; "+
			"unpublish it from that node first", rack.DiskText(disk), state, rack.InstanceOf(disk))
	case state == oxide.DiskStateStateAttached, state == oxide.DiskStateStateAttaching:
		return nil
	case state == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	}
	return diskBusy(disk)
}

// check returns why the disk must not be attached or used.
func (a attachment) check(disk *oxide.Disk, n neighbours) error {
	switch {
	case a.DiskName != "" && a.DiskName != string(disk.Name):
		return csierr.New(csierr.FieldInvalid, "volume_context: %s is %.80q, but the disk's name is %s; "+
			"correct the volume's attributes", volume.CtxDiskName, a.DiskName, disk.Name)
	case a.ContextID != "" && a.ContextID != disk.Id:
		return csierr.New(csierr.FieldInvalid, "volume_context: %s is %.80q, but the volume is the disk "+
			"%s; correct the volume's attributes", volume.CtxDiskID, a.ContextID, disk.Id)
	}
	if problem := useProblem(disk, a.Capability); problem != "" {
		return csierr.New(csierr.UseDiffers, "%s", problem)
	}
	twin := n.twin(string(disk.Name))
	if twin == nil {
		return nil
	}
	return csierr.New(csierr.SerialTaken, "the names of the disks %s and %s, which is attached to "+
		"the instance %s, begin with the same %d bytes, so the guest would show only one of them; "+
		"detach that one", rack.DiskText(disk), rack.DiskText(twin), a.Instance, volume.SerialBytes)
}

// neighbours contains the disks of an instance. Own is the disk to publish, or nil.
type neighbours struct {
	Own    *oxide.Disk
	Others []oxide.Disk
}

func (a attachment) neighbours(ctx context.Context) (neighbours, error) {
	disks, err := a.Rack.InstanceDisks(ctx, a.Instance)
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

func (n neighbours) differ(before neighbours) bool {
	ids := func(disks []oxide.Disk) map[string]bool {
		all := map[string]bool{}
		for _, d := range disks {
			all[d.Id] = true
		}
		return all
	}
	return !maps.Equal(ids(n.Others), ids(before.Others))
}

// twin returns another disk whose name begins with the same 20 bytes as name, or nil.
func (n neighbours) twin(name string) *oxide.Disk {
	for i := range n.Others {
		if volume.Serial(string(n.Others[i].Name)) == volume.Serial(name) {
			return &n.Others[i]
		}
	}
	return nil
}

// activeStates are the states in which an instance has a running virtual machine.
var activeStates = []oxide.InstanceState{
	oxide.InstanceStateStarting, oxide.InstanceStateRunning, oxide.InstanceStateStopping,
	oxide.InstanceStateRebooting, oxide.InstanceStateMigrating,
}

// instanceRefusal returns the error for an attach or detach that the instance's state forbids
// (CP-10, CU-7). The driver never stops an instance, because it does not own the workloads in it.
func instanceRefusal(verb string, disk *oxide.Disk, instance *oxide.Instance, why error) error {
	words := "no explanation"
	var answer *oxide.HTTPError
	if errors.As(why, &answer) {
		words = rack.AnswerText(answer)
	}
	if slices.Contains(activeStates, instance.RunState) {
		cause := "this rack has no hot-plug"
		if verb == "detach" {
			// Some racks attach disks to a running instance but detach them only while it is stopped.
			cause = "this rack detaches no disk from a running instance, whether or not it attaches them"
		}
		if disk.DiskType == oxide.DiskTypeLocal {
			// Even with hot-plug, a rack attaches no local disk to a running instance.
			cause = "a local disk is only attached and detached while the instance is stopped"
		}
		return csierr.New(csierr.InstanceMustBeStopped, "the instance %s is %s and must be stopped to "+
			"%s a disk: %s; see https://github.com/oxidecomputer/oxide-csi-plugin#limits (the rack says: "+
			"%s; if that is about the disk, the disk was busy, and a repeated call succeeds)",
			rack.InstanceText(instance), instance.RunState, verb, cause, words)
	}
	return csierr.New(csierr.InstanceState, "the rack does not %s a disk while the instance %s is %s "+
		"(it says: %s)", verb, rack.InstanceText(instance), instance.RunState, words)
}

// ControllerUnpublishVolume detaches the volume's disk from the node's instance. Without a node in
// the request, it detaches the disk from the instance that has it. If there is nothing to detach,
// it succeeds. It returns an error if it cannot verify that the disk is detached.
func (c *Service) ControllerUnpublishVolume(ctx context.Context,
	req *csi.ControllerUnpublishVolumeRequest) (*csi.ControllerUnpublishVolumeResponse, error) {
	if req.GetVolumeId() == "" {
		return nil, volumeIDMissing()
	}
	disk, isDisk := rack.ID(req.GetVolumeId())
	instance, isInstance := rack.ID(req.GetNodeId())
	// All ids of disks and instances are UUIDs, so nothing with another id can be attached.
	if !isDisk || (req.GetNodeId() != "" && !isInstance) {
		return &csi.ControllerUnpublishVolumeResponse{}, nil
	}
	a := attachment{Service: c, Disk: disk, Instance: instance}
	for {
		if err := a.lookAndDetach(ctx); err != nil {
			return nil, c.changes.unlessOpen(a.detached(), err)
		}
		late, err := a.changes.await(ctx, a.attached())
		if err != nil {
			return nil, err
		}
		if !late {
			return &csi.ControllerUnpublishVolumeResponse{}, nil
		}
	}
}

// lookAndDetach reads the disk and detaches it. If a.Instance is set but does not have the disk, it
// requests no detach. A rack ignores such a detach (A37), but a faulty rack could take the disk
// from a running workload. If the disk moves after the read, only the rack can refuse.
func (a attachment) lookAndDetach(ctx context.Context) error {
	look := rack.Looking()
	disk, err := a.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return err
	case a.Instance == "":
		actual := a
		actual.Instance = oxide.NameOrId(rack.InstanceOf(disk))
		return actual.detachEverywhere(ctx, look, disk)
	case !a.has(disk):
		return a.confirmDetached(ctx, disk)
	}
	_, err = a.detach(ctx, look, nil)
	return err
}

// detachEverywhere detaches the disk from a.Instance and verifies that afterwards no instance has
// it. An empty a.Instance means that no instance had the disk when the caller read it.
func (a attachment) detachEverywhere(ctx context.Context, look rack.Look, disk *oxide.Disk) error {
	var err error
	if a.Instance != "" {
		disk, err = a.detach(ctx, look, nil)
	}
	switch {
	case disk == nil || err != nil:
		return err
	case rack.InstanceOf(disk) != "":
		// Meanwhile another call has attached the disk to another instance.
		return diskBusy(disk)
	case slices.Contains(statesWithoutInstance, disk.State.State()):
		return nil
	case disk.State.State() == oxide.DiskStateStateFaulted:
		return diskFaulted(disk)
	}
	return diskBusy(disk)
}

// detach detaches the disk and verifies that the instance no longer has it. It returns the disk as
// last read, or nil if the disk is gone. requestAttach explains the parameter refused.
func (a attachment) detach(ctx context.Context, look rack.Look, refused error) (disk *oxide.Disk,
	err error) {
	const doing = "detach disk"
	record, err := a.request(ctx, doing, look, a.detached(), func(ctx context.Context) (err error) {
		disk, err = a.Rack.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
			Instance: a.Instance,
			Body:     &oxide.DiskPath{Disk: a.Disk},
		})
		switch {
		case err != nil:
			return err
		case disk.Id != string(a.Disk):
			return rack.InvalidResponse(doing, "asked for the disk %s and got %.80q", a.Disk, disk.Id)
		case a.has(disk) && disk.State.State() != oxide.DiskStateStateDetaching:
			return rack.InvalidResponse(doing, "the disk %s is still %s", rack.DiskText(disk),
				disk.State.State())
		}
		return rack.ValidateDisk(doing, disk)
	})
	switch {
	case rack.NotFound(err), rack.Refused(err):
		look = rack.Looking()
		disk, err = a.explainRefusedDetach(ctx, err)
		if csierr.Has(err, csierr.InstanceMustBeStopped) && refused == nil {
			return a.detach(ctx, look, err)
		}
		return disk, err
	case err != nil:
		return nil, rack.Error(ctx, doing, err)
	}
	disk, err = awaitDisk(ctx, a.Rack, disk, oxide.DiskStateStateDetaching)
	switch {
	case csierr.IsNotFound(err):
		return nil, a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return nil, err
	case disk.State.State() == oxide.DiskStateStateDetaching:
		return nil, csierr.New(csierr.DeadlineExceeded, "the rack is still detaching the disk %s; "+
			"repeat the call", rack.DiskText(disk))
	case a.has(disk):
		return nil, rack.InvalidResponse(doing, "the disk %s is still %s", rack.DiskText(disk),
			disk.State.State())
	}
	if err = a.checkDetached(ctx, disk); err == nil {
		record.End(nil, flight.Fields{Disk: string(disk.Name)})
	}
	return disk, err
}

// confirmDetached calls checkDetached, and on success records that an earlier detach was made.
func (a attachment) confirmDetached(ctx context.Context, disk *oxide.Disk) error {
	err := a.checkDetached(ctx, disk)
	if err == nil {
		a.detached().confirm(ctx, flight.Fields{Disk: string(disk.Name)})
	}
	return err
}

// statesWithoutInstance are the states of disks that are attached to no instance. An attached disk
// must become detached before it can enter any other of these states.
var statesWithoutInstance = []oxide.DiskStateState{
	oxide.DiskStateStateDetached, oxide.DiskStateStateCreating, oxide.DiskStateStateMaintenance,
	oxide.DiskStateStateImportReady, oxide.DiskStateStateImportingFromUrl,
	oxide.DiskStateStateImportingFromBulkWrites, oxide.DiskStateStateFinalizing,
	oxide.DiskStateStateDestroyed,
}

// checkDetached verifies that a.Instance does not have the disk. Call it only if the disk's state
// does not name a.Instance. If the state is faulted or unknown, the instance's disks decide.
func (a attachment) checkDetached(ctx context.Context, disk *oxide.Disk) error {
	if rack.InstanceOf(disk) != "" || slices.Contains(statesWithoutInstance, disk.State.State()) {
		return nil
	}
	disks, err := a.Rack.InstanceDisks(ctx, a.Instance)
	switch {
	case csierr.IsNotFound(err):
		// The instance is deleted, or this token may not read the project. Gone finds out which.
		return a.Rack.Gone(ctx, func() error {
			_, err := a.Rack.InstanceDisks(ctx, a.Instance)
			return err
		})
	case err != nil:
		return err
	case slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == disk.Id }):
		return csierr.New(csierr.DiskFaulted, "the disk %s is %s and still among those of the instance "+
			"%s, so it is not known to be detached; stop the instance, or ask the rack's "+
			"operator", rack.DiskText(disk), disk.State.State(), a.Instance)
	}
	return nil
}

// explainRefusedDetach returns the reason of the refusal, or no error if a.Instance lacks the disk.
func (a attachment) explainRefusedDetach(ctx context.Context, why error) (*oxide.Disk, error) {
	disk, err := a.Rack.Disk(ctx, a.Disk)
	switch {
	case csierr.IsNotFound(err):
		return nil, a.Rack.DiskGone(ctx, a.Disk)
	case err != nil:
		return nil, err
	case !a.has(disk):
		return disk, a.confirmDetached(ctx, disk)
	case disk.State.State() != oxide.DiskStateStateAttached:
		return nil, diskBusy(disk)
	}
	instance, err := a.Rack.Instance(ctx, a.Instance)
	switch {
	case csierr.IsNotFound(err):
		return nil, csierr.New(csierr.InstanceNotFound, "the rack reports that the disk %s is attached "+
			"to the instance %s, and that there is no such instance; the disk is not known to be detached",
			rack.DiskText(disk), a.Instance)
	case err != nil:
		return nil, err
	case instance.BootDiskId == disk.Id:
		return nil, csierr.New(csierr.BootDisk, "the disk %s is the boot disk of the instance %s, "+
			"which the rack does not detach; set another boot disk first",
			rack.DiskText(disk), rack.InstanceText(instance))
	}
	return nil, instanceRefusal("detach", disk, instance, fmt.Errorf("detach disk: %w", why))
}
