package engine

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// DiskCreate has the parameters of a new disk.
type DiskCreate struct {
	Name, Description string
	Size              int64
	Backend           string
	Source            DiskSource
	ID                string // the disk's ID; "" means a new ID
}

// DiskSource describes what a new disk contains.
type DiskSource struct {
	Kind      string
	BlockSize int
	ID        string
	ReadOnly  bool
}

// The kinds of a DiskSource. With SourceImporting the new disk becomes import_ready (A90).
const (
	SourceBlank     = "blank"
	SourceSnapshot  = "snapshot"
	SourceImage     = "image"
	SourceImporting = "importing_blocks"
)

const (
	minDiskSize = gibibyte
	// maxDistributed is the largest allowed size, although the error says "less than" (A25).
	maxDistributed = 1023 * gibibyte
	// maxLocal is the largest size of a local disk: what a drive of 3.2 TB can hold (A26).
	maxLocal = 2900 * gibibyte
	// LocalBlockSize is the block size of a local disk, a volume on one sled's NVMe drive (A26).
	LocalBlockSize = 4096
)

// Disks has the operations on disks.
type Disks struct{ *Simulation }

// Create creates a disk with the parameters of a [DiskCreate].
func (s Disks) Create(call *Call) (store.Disk, error) {
	owner, err := Reading(s.Simulation, func(tx *store.Tx) store.Project {
		return s.project(call, tx)
	})
	if err != nil {
		return store.Disk{}, err
	}
	return s.create(call, owner, call.Body.(DiskCreate))
}

// create runs the rack's saga: it creates the record, creates the bytes, and makes the disk usable.
// Other callers see the disk from the first step on. The result has the state "creating" (A22),
// unless the disk is read-only (A23).
func (s Disks) create(call *Call, owner store.Project, c DiskCreate) (store.Disk, error) {
	d := store.Disk{Identity: store.NewIdentity(cmp.Or(c.ID, uuid.NewString()), c.Name, c.Description)}
	defer s.creating.Lock(d.ID)()
	if err := s.fill(owner, c, &d); err != nil {
		return d, err
	}
	call.Object = d.Identity
	s.hold(call, func(now adminapi.Switches) adminapi.Duration { return now.CreateHold })
	if call.Unwind {
		return d, s.undo(d, errInternal)
	}
	return s.finish(d, c)
}

// fill creates the disk's record and then its bytes. If it fails, it leaves neither.
func (s Disks) fill(owner store.Project, c DiskCreate, d *store.Disk) error {
	if c.Source.ID != "" {
		// Lock the source, so that no call deletes it during the copy.
		defer s.locks.Lock(c.Source.ID)()
	}
	err := s.store.Update(func(tx *store.Tx) {
		s.describe(tx, owner, c, d)
		// A28: the quota is charged before the name is checked, so the quota's error comes first.
		s.chargeStorage(tx, d.Size)
		tx.Check(checkDescription(d.Description))
		tx.Refuse(store.Disks.Taken(tx, d.ProjectID, d.Name), alreadyExists("disk", d.Name))
		tx.PutDisk(*d)
		tx.OpenSaga(d.ID, c)
	})
	if err != nil {
		return err
	}
	return s.fillBytes(*d)
}

// fillBytes creates a disk's bytes, unless they exist. If that fails, it removes the disk.
func (s Disks) fillBytes(d store.Disk) error {
	file := ""
	err := s.store.View(func(tx *store.Tx) {
		switch {
		case d.SnapshotID != nil:
			// A59: the rack notices an unfinished snapshot only when it copies the bytes, and then fails.
			source, _ := store.Snapshots.Get(tx, *d.SnapshotID)
			tx.Refuse(source.State == store.SnapshotCreating, errInternal)
			file = s.plane.Files.SnapshotPath(*d.SnapshotID)
		case d.ImageID != nil:
			file = s.plane.Files.ImagePath(*d.ImageID)
		}
	})
	switch {
	case err != nil:
	case !d.ReadOnly && d.DiskType != store.TypeLocal && s.noSpace(0):
		err = errNoSpace // A26: a local disk gets its space when its instance starts
	case file == "":
		err = s.plane.CreateDisk(d.ID, d.Size)
	default:
		err = s.plane.CloneDisk(context.WithoutCancel(s.ctx), d.ID, file, d.Size)
	}
	if err != nil {
		return s.undo(d, err)
	}
	return nil
}

// resume completes a creation that was unfinished when the simulator ended, or undoes it (A19).
func (s Disks) resume(d store.Disk) error {
	var c DiskCreate
	err := s.store.View(func(tx *store.Tx) { tx.SagaRequest(d.ID, &c) })
	if err != nil {
		return s.undo(d, err)
	}
	if err := s.fillBytes(d); err != nil {
		return err
	}
	_, err = s.finish(d, c)
	return err
}

func (s Disks) finish(d store.Disk, c DiskCreate) (store.Disk, error) {
	final := d
	final.State.State = store.StateDetached
	if c.Source.Kind == SourceImporting {
		final.State.State = store.StateImportReady
	}
	err := s.store.Update(func(tx *store.Tx) {
		tx.PutDisk(final)
		tx.CloseSaga(d.ID)
	})
	if err != nil {
		return d, s.undo(d, err)
	}
	if d.ReadOnly {
		return final, nil // A23: the answer for a read-only disk shows the final state
	}
	return d, nil
}

// undo removes a disk: first its record, so that no restart completes the failed creation.
func (s Disks) undo(d store.Disk, cause error) error {
	err := s.store.Update(func(tx *store.Tx) { tx.UndoDisk(d) })
	if err == nil {
		err = s.plane.RemoveDisk(d.ID)
	}
	return undone(cause, err)
}

func undone(cause, err error) error {
	if err != nil {
		return fmt.Errorf("%w; and undoing it: %w", cause, err)
	}
	return cause
}

// describe checks a disk's parameters in the rack's order (A28), and writes them into its record.
func (s Disks) describe(tx *store.Tx, owner store.Project, c DiskCreate, d *store.Disk) {
	d.ProjectID, d.Size, d.DiskType = owner.ID, c.Size, c.Backend
	d.BlockSize, d.ReadOnly = c.Source.BlockSize, c.Source.ReadOnly
	d.DevicePath, d.State.State = devicePath(c.Name), store.StateCreating
	switch c.Source.Kind {
	case SourceSnapshot:
		sn := byID(tx, store.Snapshots, c.Source.ID)
		tx.Refuse(sn.ProjectID != d.ProjectID, invalidRequest("snapshot does not belong to this project"))
		d.SnapshotID, d.BlockSize = &sn.ID, sn.BlockSize
		checkSource(tx, "snapshot", c, sn.Size)
	case SourceImage:
		img := byID(tx, store.Images, c.Source.ID)
		tx.Refuse(img.ProjectID != nil && *img.ProjectID != d.ProjectID,
			invalidRequest("image does not belong to this project"))
		d.ImageID, d.BlockSize = &img.ID, img.BlockSize
		checkSource(tx, "image", c, img.Size)
	}
	checkDiskSize(tx, d)
}

func checkSource(tx *store.Tx, kind string, c DiskCreate, size int64) {
	tx.Refuse(c.Source.ReadOnly && c.Size != size,
		invalidRequest("read-only disk size %d must be equal to source %s size %d", c.Size, kind, size))
	tx.Refuse(c.Size < size, invalidRequest("disk size %d must be greater than or equal to %s size %d",
		c.Size, kind, size))
}

func checkDiskSize(tx *store.Tx, d *store.Disk) {
	tx.Refuse(d.Size%int64(d.BlockSize) != 0, invalidValue("size and block_size",
		"total size must be a multiple of block size %d", d.BlockSize))
	distributed, local := d.DiskType == store.TypeDistributed, d.DiskType == store.TypeLocal
	tx.Refuse(d.Size < minDiskSize, invalidValue("size", "total size must be at least 1 GiB"))
	tx.Refuse(d.Size%gibibyte != 0, invalidValue("size", "total size must be a multiple of 1 GiB"))
	tx.Refuse(distributed && d.Size > maxDistributed,
		invalidValue("size", "total size must be less than 1023 GiB"))
	tx.Refuse(local && d.Size > 10<<50, invalidValue("size", "requested size over 10 PiB"))
	tx.Refuse(local && d.Size > maxLocal,
		invalidValue("size", "requested size is too large to fit on any physical disk"))
}

// checkDescription applies the limit of the rack's database (A70).
func checkDescription(description string) error { return checkLength(description, 512) }

func checkLength(text string, most int) error {
	if utf8.RuneCountInString(text) > most {
		return errInternal
	}
	return nil
}

// setPublicKey sets a key, unless the key is too long for the rack's database (A70).
func setPublicKey(c *Change, value any) {
	c.record.Fields["public_key"] = value
	c.Check(checkLength(value.(string), 1023))
}

// chargeStorage charges size to the silo's quota. It refuses a call that exceeds the quota (A29).
func (r *Simulation) chargeStorage(tx *store.Tx, size int64) {
	tx.Refuse(size > int64(r.Switches().QuotaBytes)-tx.Storage(),
		insufficientCapacity("Storage Limit Exceeded: Not enough storage to complete "+
			"request. Either remove unneeded disks and snapshots to free up resources or "+
			"contact the rack operator to request a capacity increase."))
	tx.AddStorage(size)
}

// Delete deletes a disk that is detached or faulted (A71).
func (s Disks) Delete(call *Call) error {
	now := s.Switches()
	return remove(s.Simulation, call, store.Disks, func(tx *store.Tx, d store.Disk) {
		tx.Refuse(d.State.State != store.StateDetached && d.State.State != store.StateFaulted,
			invalidRequest("disk cannot be deleted in state %q", d.State.State))
		store.Disks.Delete(tx, d)
		release(tx, d.ID, d.Size, now)
	}, func(d store.Disk) error {
		var err error = errInternal
		if !call.Unwind {
			err = s.free(call, d.ID, d.Size, s.plane.RemoveDisk, now)
		}
		if err != nil {
			return s.undelete(d, err)
		}
		return nil
	})
}

// undelete restores the record of a disk whose deletion failed. The disk becomes faulted and can be
// deleted again. It gets a new name, so that another disk can get the old name (A24).
func (s Disks) undelete(d store.Disk, cause error) error {
	d.Name, d.State.State = "deleted-"+d.ID, store.StateFaulted
	d.DevicePath = devicePath(d.Name)
	err := s.store.Update(func(tx *store.Tx) {
		tx.Reclaim(d.ID, d.Size)
		tx.PutDisk(d)
	})
	return undone(cause, err)
}

const (
	gibibyte = 1 << 30
	tebibyte = 1 << 40
)

// devicePath returns the device_path that a rack reports. Guests do not use this path (A03).
func devicePath(name string) string { return fmt.Sprintf("/mnt/%s", name) }

func deviceOf(d store.Disk, instanceID string) dataplane.Device {
	return dataplane.Device{
		InstanceID: instanceID, DiskID: d.ID, DiskName: d.Name,
		SizeBytes: d.Size, BlockSize: d.BlockSize, ReadOnly: d.ReadOnly,
		Local: d.DiskType == store.TypeLocal,
	}
}

// BulkWrite is one write of an import: bytes, and their offset in the disk.
type BulkWrite struct {
	Offset uint64
	Base64 string
}

// maxChunk is the largest number of bytes in one [BulkWrite] (A90).
const maxChunk = 512 << 10

// StartImport permits the writes of an import. The disk must be import_ready (A90).
func (s Disks) StartImport(call *Call) error {
	return s.moveImport(call, store.StateImportReady, store.StateImporting)
}

// StopImport ends the writes of an import: the disk becomes import_ready again (A90).
func (s Disks) StopImport(call *Call) error {
	return s.moveImport(call, store.StateImporting, store.StateImportReady)
}

func (s Disks) moveImport(call *Call, from, to string) error {
	d, err := s.importing(call)
	if err != nil {
		return err
	}
	defer s.locks.Lock(d.ID)()
	if err := s.plane.Files.FlushDisk(d.ID); err != nil {
		return err
	}
	return s.store.Update(func(tx *store.Tx) {
		moveState(tx, d.ID, from, to, fmt.Sprintf("cannot set disk in state %%s to %q", to))
	})
}

// importing finds the disk of an import. A local disk is refused with a 500, as on a rack (A90).
func (s Disks) importing(call *Call) (store.Disk, error) {
	d, err := view(s.Simulation, call, store.Disks)
	if err == nil && d.DiskType == store.TypeLocal {
		err = errInternal
	}
	return d, err
}

func moveState(tx *store.Tx, id, from, to, refusal string) {
	d := byID(tx, store.Disks, id)
	tx.Refuse(d.State.State != from, invalidRequest(refusal, debugState(d.State)))
	d.State.State = to
	tx.PutDisk(d)
}

// debugState returns a state as the rack's errors show it: ImportReady, Attached(<instance>).
func debugState(state store.DiskState) string {
	var text strings.Builder
	for word := range strings.SplitSeq(state.State, "_") {
		text.WriteString(strings.ToUpper(word[:1]) + word[1:])
	}
	if state.Instance != "" {
		text.WriteString("(" + state.Instance + ")")
	}
	return text.String()
}

// Import writes a [BulkWrite] into a disk. It holds the disk's lock, so nothing is written after
// StopImport has returned.
func (s Disks) Import(call *Call) error {
	w := call.Body.(BulkWrite)
	d, err := s.importing(call)
	if err != nil {
		return err
	}
	defer s.locks.Lock(d.ID)()
	data, invalid := decodeBase64(w.Base64)
	// The rack's Crucible pantry makes these checks, in this order (A90).
	d, err = Reading(s.Simulation, func(tx *store.Tx) store.Disk {
		d := byID(tx, store.Disks, d.ID)
		tx.Refuse(d.State.State != store.StateImporting, invalidRequest("cannot import blocks with a "+
			"bulk write for disk in state %s", debugState(d.State)))
		tx.Check(invalid)
		tx.Refuse(len(data) > maxChunk, invalidRequest("Invalid number of blocks: data len %d over max "+
			"chunk size %d!", len(data), maxChunk))
		tx.Refuse(w.Offset%uint64(d.BlockSize) != 0, invalidRequest("Offset not block aligned"))
		tx.Refuse(len(data)%d.BlockSize != 0, invalidRequest("Data length not block size multiple"))
		tx.Refuse(len(data) > 0 && w.Offset >= uint64(d.Size),
			invalidRequest("Offset past end of extent"))
		return d
	})
	if err != nil || len(data) == 0 {
		return err
	}
	// A90: the rack ignores bytes beyond the end of the disk.
	data = data[:min(int64(len(data)), d.Size-int64(w.Offset))]
	return s.plane.Files.WriteDisk(d.ID, int64(w.Offset), data)
}

// decodeBase64 decodes the bytes of a write, or returns the error of the rack's decoder.
func decodeBase64(text string) ([]byte, error) {
	const refusal = "error base64 decoding data: "
	symbols := strings.TrimRight(text, "=")
	at := strings.IndexFunc(symbols, func(c rune) bool {
		return c > unicode.MaxASCII || !unicode.IsLetter(c) && !unicode.IsDigit(c) && c != '+' && c != '/'
	})
	if at >= 0 {
		return nil, invalidRequest(refusal+"Invalid symbol %d, offset %d.", symbols[at], at)
	}
	data, err := base64.StdEncoding.Strict().DecodeString(text)
	if err != nil {
		return nil, invalidRequest(refusal + "Invalid padding")
	}
	return data, nil
}

// Finalize ends an import, so that the disk can be used. If the body names a snapshot, Finalize
// first takes this snapshot; meanwhile the disk's state is "finalizing". If the snapshot fails, the
// disk is import_ready again (A90).
func (s Disks) Finalize(call *Call) error {
	const refusal = "cannot finalize disk in state DiskState(%s)"
	snapshot := call.Body.(string)
	d, err := s.importing(call)
	switch {
	case err != nil:
		return err
	case d.ReadOnly && snapshot != "":
		return invalidRequest("cannot snapshot read-only disk %s!", d.ID)
	case d.State.State != store.StateImportReady:
		return invalidRequest(refusal, debugState(d.State))
	case snapshot == "":
		return s.store.Update(func(tx *store.Tx) {
			tx.Refuse(call.Unwind, errInternal)
			moveState(tx, d.ID, store.StateImportReady, store.StateDetached, refusal)
		})
	}
	_, err = Snapshots(s).take(call, d, store.NewIdentity(uuid.NewString(), snapshot,
		"snapshot of finalized disk "+d.ID), func(tx *store.Tx) {
		moveState(tx, d.ID, store.StateImportReady, store.StateFinalizing, refusal)
	})
	call.Object = d.Identity
	return err
}

// Attachments has the operations that attach and detach disks.
type Attachments struct{ *Simulation }

// List lists the disks that are attached to an instance.
func (s Attachments) List(call *Call, tx *store.Tx) []store.Disk {
	return tx.DisksOf(lookup(s.Simulation, call, tx, store.Instances).ID)
}

// locked locks the call's instance and disk, and calls work() with them. It looks up a disk's name
// in the instance's project, and a disk's ID in all projects (A30). If the disk is still being
// created, locked first waits for the disk's bytes (A32).
func (s Attachments) locked(call *Call,
	work func(store.Instance, store.Disk) (store.Disk, error)) (d store.Disk, err error) {
	var i store.Instance
	err = s.store.View(func(tx *store.Tx) {
		i = lookup(s.Simulation, call, tx, store.Instances)
		d = find(tx, store.Disks, i.ProjectID, call.Body.(store.Selector))
		call.Object = d.Identity
	})
	if err != nil {
		return d, err
	}
	s.creating.Lock(d.ID)() // A32
	defer s.locks.Lock(i.ID, d.ID)()
	if d, err = work(i, d); err != nil {
		return d, err
	}
	if call.Reread {
		return d, errUnavailable // A67
	}
	return d, nil
}

// Attach attaches a disk, which the body names, to an instance.
func (s Attachments) Attach(call *Call) (store.Disk, error) {
	return s.locked(call, func(i store.Instance, d store.Disk) (store.Disk, error) {
		if d.ProjectID != i.ProjectID {
			return d, invalidRequest("disk must be in the same project as the instance")
		}
		d, err := s.attach(call, i.ID, d.ID)
		var refused *Error
		if errors.As(err, &refused) && s.Switches().Hotplug.Has(adminapi.RefusalsAs500) {
			return d, errInternal
		}
		return d, err
	})
}

// attach checks the rules and records the attachment in one transaction (A31). If the instance has
// a guest, it then plugs the disk into the guest.
func (s Attachments) attach(call *Call, instanceID, diskID string) (store.Disk, error) {
	var i store.Instance
	var d store.Disk
	changed, now := false, s.Switches()
	err := s.store.Update(func(tx *store.Tx) {
		i, d = byID(tx, store.Instances, instanceID), byID(tx, store.Disks, diskID)
		if d.AttachedTo(i.ID) {
			changed = now.Hotplug.Has(adminapi.RecordFirst) // the device may be missing: plug it again
			return                                          // A33: success, even while the instance runs
		}
		s.checkAttach(tx, i, d, now)
		changed = true
		d.State = store.DiskState{State: store.StateAttached, Instance: i.ID}
		tx.PutDisk(d)
	})
	if err != nil || !changed || !i.HasGuest() {
		return d, err
	}
	err = s.plane.Plug(deviceOf(d, i.ID), call.deviceFault(now.DeviceDelay))
	if err != nil && !now.Hotplug.Has(adminapi.RecordFirst) {
		err = errors.Join(err, s.setState(d, store.DiskState{State: store.StateDetached}))
	}
	return d, err
}

func (s Attachments) setState(d store.Disk, state store.DiskState) error {
	d.State = state
	return s.store.Update(func(tx *store.Tx) { tx.PutDisk(d) })
}

// checkAttach checks whether a disk may be attached to an instance that does not have it yet. The
// rack's order is: the disk's state, the VMM, the instance's state, and then the limit (A34).
func (r *Simulation) checkAttach(tx *store.Tx, i store.Instance, d store.Disk,
	now adminapi.Switches) {
	switch d.State.State {
	case store.StateCreating, store.StateDetached:
	case store.StateAttached, "attaching", "detaching":
		tx.Check(invalidRequest("cannot attach disk %q: disk is attached to another instance", d.Name))
	default:
		tx.Check(invalidRequest("cannot attach disk %q: invalid state %s", d.Name, d.State.State))
	}
	tx.Refuse(i.Active() && !now.Hotplug.Attaches(),
		invalidRequest("cannot attach disk: instance is not fully stopped"))
	// A35: a local disk cannot be attached to a running guest, with or without hot-plug.
	tx.Refuse(i.Active() && d.DiskType == store.TypeLocal,
		conflict("cannot attach local storage disk: instance is starting"))
	tx.Refuse(!i.Active() && i.RunState != store.RunStopped && i.RunState != store.StateCreating,
		invalidRequest("cannot attach disk to instance in %s state", i.RunState))
	// During a creation, BootDiskID is not set yet, and checkCreate has already checked the limit.
	limit := r.config.diskLimit(now, i.BootDiskID != nil || i.RunState == store.StateCreating)
	tx.Refuse(len(tx.DisksOf(i.ID)) >= limit,
		invalidRequest("cannot attach more than %d disks to instance", limit))
}

// ejectTime is how long a guest can use a disk after a detach request, with SurpriseRemoval.
const ejectTime = time.Second

// Detach detaches a disk, which the body names, from an instance.
func (s Attachments) Detach(call *Call) (store.Disk, error) {
	return s.locked(call, func(i store.Instance, d store.Disk) (store.Disk, error) {
		now := s.Switches()
		if now.Hotplug.Has(adminapi.SurpriseRemoval) && i.HasGuest() && detachProblem(i, d, now) == nil {
			s.Pause(s.ctx, ejectTime) // the guest can use the disk meanwhile
		}
		return s.detach(i.ID, d.ID)
	})
}

// detach checks the rules and records the detachment in one transaction. Then it removes the device
// from the guest, before the caller gets the response (A31).
func (s Attachments) detach(instanceID, diskID string) (store.Disk, error) {
	var i store.Instance
	var d store.Disk
	changed := false
	err := s.store.Update(func(tx *store.Tx) {
		i, d = byID(tx, store.Instances, instanceID), byID(tx, store.Disks, diskID)
		if d.State.State == store.StateDetached {
			return // A36: success, whichever instance the request names
		}
		tx.Check(detachProblem(i, d, s.Switches()))
		changed = true
		d.State = store.DiskState{State: store.StateDetached}
		tx.PutDisk(d)
	})
	if err != nil || !changed || !i.HasGuest() {
		return d, err
	}
	if err := s.plane.Unplug(i.ID, d.ID); err != nil {
		return d, errors.Join(err, s.setState(d, store.DiskState{State: store.StateAttached,
			Instance: i.ID}))
	}
	return d, nil
}

// detachProblem makes the rack's checks before a detach, in the rack's order (A37).
func detachProblem(i store.Instance, d store.Disk, now adminapi.Switches) error {
	switch {
	case d.AttachedTo(i.ID):
	case d.State.Instance != "":
		return invalidRequest("cannot detach disk %q: disk is attached to another instance", d.Name)
	default:
		return invalidRequest("cannot detach disk %q: invalid state %s", d.Name, d.State.State)
	}
	boot := store.Deref(i.BootDiskID) == d.ID
	switch {
	// A35: a local disk cannot be removed from a running guest.
	case i.Active() && (!now.Hotplug.Detaches() || d.DiskType == store.TypeLocal):
		return invalidRequest("cannot detach disk: instance is not fully stopped")
	case i.Active(), i.RunState == store.StateCreating, i.RunState == store.RunStopped:
		if boot {
			return conflict("boot disk cannot be detached")
		}
		return nil
	case i.RunState == store.RunFailed && !boot:
		return nil
	}
	return invalidRequest("cannot detach disk from instance in %s state", i.RunState)
}
