package simulator

import (
	"context"
	"fmt"
	"net/http"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

func (s *Server) diskList(r *request) (int, any, error) { return listInProject(s, r, store.Disks) }

func (s *Server) diskView(r *request) (int, any, error) {
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		d, err = lookup(s, r, tx, store.Disks, r.path.Get("disk"))
		return err
	})
	return http.StatusOK, d, err
}

type diskCreate struct {
	name, description string
	size              int64
	backend           string
	source            diskSource
	id                string // of the disk to be; "" is a new one
}

type diskSource struct {
	kind      string
	blockSize int
	id        string
	readOnly  bool
}

// The kinds of source that a distributed disk has. One that imports blocks ends in import_ready
// and stays there: nobody on this path writes blocks through the API, so the bulk-write operations
// are left out (501).
const (
	sourceBlank     = "blank"
	sourceSnapshot  = "snapshot"
	sourceImage     = "image"
	sourceImporting = "importing_blocks"
)

func parseDiskCreate(f *fields) any { return readDiskCreate(f) }

func readDiskCreate(f *fields) diskCreate {
	var c diskCreate
	c.name, c.description = f.identity()
	c.size = f.byteCount("size")
	backend := f.object("disk_backend")
	c.backend = backend.variant(store.TypeLocal, store.TypeDistributed)
	if c.backend == store.TypeLocal {
		c.source.blockSize = localBlockSize
		return c
	}
	source := backend.object("disk_source")
	c.source.kind = source.variant(sourceBlank, sourceSnapshot, sourceImage, sourceImporting)
	switch c.source.kind {
	case sourceBlank, sourceImporting:
		c.source.blockSize = source.blockSize("block_size")
	case sourceSnapshot:
		c.source.id = source.uuid("snapshot_id")
		c.source.readOnly = source.flag("read_only", false)
	case sourceImage:
		c.source.id = source.uuid("image_id")
		c.source.readOnly = source.flag("read_only", false)
	}
	return c
}

const (
	minDiskSize = gibibyte
	// A25: 1023 GiB itself is allowed.
	maxDistributed = 1023 * gibibyte
	// A26: a local disk is a volume on one sled's NVMe drive, with blocks of 4096 bytes.
	localBlockSize = 4096
)

func (s *Server) diskCreate(r *request) (int, any, error) {
	var owner store.Project
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		owner, err = s.queryProject(r, tx)
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	d, err := s.createDisk(r, owner, r.body.(diskCreate))
	if err != nil {
		return 0, nil, err
	}
	return http.StatusCreated, d, nil
}

// createDisk is the rack's saga: the record first, for everybody to see, then the bytes, then the
// state that lets the disk be used. It returns the record as first inserted, so it says creating
// although the disk is detached by then (A22).
func (s *Server) createDisk(r *request, owner store.Project, c diskCreate) (store.Disk, error) {
	d := store.Disk{Identity: store.NewIdentity(orDefault(c.id, uuid.NewString()),
		c.name, c.description)}
	defer s.creating.begin(d.ID)()
	if err := s.makeDisk(owner, c, &d); err != nil {
		return d, err
	}
	r.about(d.Identity)
	s.hold(s.switches.get().CreateHold)
	if r.unwinds() {
		return d, s.unmakeDisk(d, errInternal)
	}
	return s.finishDisk(d, c)
}

// makeDisk makes the record and then the bytes, or neither.
func (s *Server) makeDisk(owner store.Project, c diskCreate, d *store.Disk) error {
	if c.source.id != "" {
		// A source that is being deleted is either gone or stays until it was read.
		defer s.locks.Lock(c.source.id)()
	}
	var from origin
	err := s.store.Update(func(tx *store.Tx) error {
		var err error
		if from, err = s.describeDisk(tx, owner, c, d); err != nil {
			return err
		}
		return s.insertDisk(tx, *d)
	})
	if err != nil {
		return err
	}
	switch {
	case from.unfinished:
		err = errInternal // A59
	case from.file == "":
		err = s.plane.CreateDisk(d.ID, d.Size)
	default:
		err = s.plane.CloneDisk(context.WithoutCancel(s.life), d.ID, from.file, d.Size)
	}
	if err != nil {
		return s.unmakeDisk(*d, err)
	}
	return nil
}

// finishDisk lets the disk be used.
func (s *Server) finishDisk(d store.Disk, c diskCreate) (store.Disk, error) {
	final := d
	final.State.State = store.StateDetached
	if c.source.kind == sourceImporting {
		final.State.State = store.StateImportReady
	}
	if err := s.store.Update(func(tx *store.Tx) error { return tx.PutDisk(final) }); err != nil {
		return d, s.unmakeDisk(d, err)
	}
	if d.ReadOnly {
		return final, nil // A23: nothing is allocated, so it is detached at once
	}
	return d, nil
}

// unmakeDisk takes a half-made disk back.
func (s *Server) unmakeDisk(d store.Disk, cause error) error {
	if err := s.plane.RemoveDisk(d.ID); err != nil {
		return fmt.Errorf("%w; and taking it back: %w", cause, err)
	}
	err := s.store.Update(func(tx *store.Tx) error {
		if err := tx.AddStorage(-d.Size); err != nil {
			return err
		}
		return store.Disks.Delete(tx, d)
	})
	if err != nil {
		return fmt.Errorf("%w; and taking it back: %w", cause, err)
	}
	return cause
}

// origin is what a disk is made from: a file, or nothing. The bytes of a snapshot that is not cut
// yet cannot be had, which the rack notices only when it needs them (A59).
type origin struct {
	file       string
	unfinished bool
}

// describeDisk checks what is asked for, in the rack's order (A28), and completes the record.
func (s *Server) describeDisk(tx *store.Tx, owner store.Project, c diskCreate, d *store.Disk) (origin, error) {
	d.ProjectID, d.Size, d.DiskType = owner.ID, c.size, c.backend
	d.BlockSize, d.ReadOnly = c.source.blockSize, c.source.readOnly
	d.DevicePath, d.State.State = devicePath(c.name), store.StateCreating
	from, err := s.describeSource(tx, c, d)
	if err != nil {
		return origin{}, err
	}
	return from, checkDiskSize(d)
}

func (s *Server) describeSource(tx *store.Tx, c diskCreate, d *store.Disk) (origin, error) {
	switch c.source.kind {
	case sourceSnapshot:
		sn, err := find(tx, store.Snapshots, "", store.Selector{ID: c.source.id})
		if err != nil {
			return origin{}, err
		}
		if sn.ProjectID != d.ProjectID {
			return origin{}, invalidRequest("snapshot does not belong to this project")
		}
		d.SnapshotID, d.BlockSize = &sn.ID, sn.BlockSize
		return origin{s.plane.SnapshotPath(sn.ID), sn.State == store.SnapshotCreating},
			checkSource("snapshot", c, sn.Size)
	case sourceImage:
		img, err := find(tx, store.Images, "", store.Selector{ID: c.source.id})
		if err != nil {
			return origin{}, err
		}
		if img.ProjectID != nil && *img.ProjectID != d.ProjectID {
			return origin{}, invalidRequest("image does not belong to this project")
		}
		d.ImageID, d.BlockSize = &img.ID, img.BlockSize
		return origin{file: s.plane.ImagePath(img.ID)}, checkSource("image", c, img.Size)
	}
	return origin{}, nil
}

func checkSource(kind string, c diskCreate, size int64) error {
	if c.source.readOnly && c.size != size {
		return invalidRequest("read-only disk size %d must be equal to source %s size %d",
			c.size, kind, size)
	}
	if c.size < size {
		return invalidRequest("disk size %d must be greater than or equal to %s size %d",
			c.size, kind, size)
	}
	return nil
}

func checkDiskSize(d *store.Disk) error {
	switch {
	case d.Size%int64(d.BlockSize) != 0:
		return invalidValue("size and block_size",
			"total size must be a multiple of block size %d", d.BlockSize)
	case d.Size < minDiskSize:
		return invalidValue("size", "total size must be at least 1 GiB")
	case d.Size%gibibyte != 0:
		return invalidValue("size", "total size must be a multiple of 1 GiB")
	case d.DiskType == store.TypeDistributed && d.Size > maxDistributed:
		return invalidValue("size", "total size must be less than 1023 GiB")
	}
	return nil
}

// insertDisk accounts the size before it looks at the name, so with the quota exhausted a name
// that is taken is not what the caller hears of (A28).
func (s *Server) insertDisk(tx *store.Tx, d store.Disk) error {
	if err := s.takeStorage(tx, d.Size); err != nil {
		return err
	}
	if store.Disks.Taken(tx, d.ProjectID, d.Name) {
		return alreadyExists("disk", d.Name)
	}
	return tx.PutDisk(d)
}

// takeStorage charges the silo's quota (A29).
func (s *Server) takeStorage(tx *store.Tx, size int64) error {
	used, err := tx.Storage()
	if err != nil {
		return err
	}
	if quota := s.switches.get().QuotaBytes; size > quota-used {
		return insufficientCapacity("Storage Limit Exceeded: Not enough storage to complete " +
			"request. Either remove unneeded disks and snapshots to free up resources or " +
			"contact the rack operator to request a capacity increase.")
	}
	return tx.AddStorage(size)
}

func (s *Server) diskDelete(r *request) (int, any, error) {
	var d store.Disk
	err := s.store.View(func(tx *store.Tx) error {
		var err error
		d, err = lookup(s, r, tx, store.Disks, r.path.Get("disk"))
		return err
	})
	if err != nil {
		return 0, nil, err
	}
	defer s.locks.Lock(d.ID)()
	delay := s.switches.get().FreeDelay
	err = s.store.Update(func(tx *store.Tx) error {
		if d, err = find(tx, store.Disks, "", store.Selector{ID: d.ID}); err != nil {
			return err
		}
		if d.State.State != store.StateDetached && d.State.State != store.StateFaulted {
			return invalidRequest("disk cannot be deleted in state %q", d.State.State)
		}
		if err := store.Disks.Delete(tx, d); err != nil {
			return err
		}
		return release(tx, d.ID, d.Size, delay)
	})
	if err != nil {
		return 0, nil, err
	}
	switch {
	case r.unwinds():
		err = errInternal
	case delay > 0:
		s.freeLater(r, d.ID, s.plane.RemoveDisk, delay)
	default:
		err = s.plane.RemoveDisk(d.ID)
	}
	if err != nil {
		return 0, nil, s.undelete(d, err)
	}
	return http.StatusNoContent, nil, nil
}

// undelete brings a disk back whose deletion failed: faulted, under a name that frees the old
// one, and ready to be deleted again (A24).
func (s *Server) undelete(d store.Disk, cause error) error {
	d.Name, d.State.State = "deleted-"+d.ID, store.StateFaulted
	d.DevicePath = devicePath(d.Name)
	err := s.store.Update(func(tx *store.Tx) error {
		if err := tx.Reclaim(d.ID, d.Size); err != nil {
			return err
		}
		return tx.PutDisk(d)
	})
	if err != nil {
		return fmt.Errorf("%w; and bringing it back: %w", cause, err)
	}
	return cause
}

const (
	gibibyte = 1 << 30
	tebibyte = 1 << 40
)

// devicePath is always this; the guest knows nothing of it (A03).
func devicePath(name string) string { return fmt.Sprintf("/mnt/%s", name) }

// deviceOf is the disk as the guest of its instance shall see it.
func deviceOf(d store.Disk, instanceID string) dataplane.Device {
	return dataplane.Device{
		InstanceID: instanceID, DiskID: d.ID, DiskName: d.Name,
		SizeBytes: d.Size, BlockSize: d.BlockSize, ReadOnly: d.ReadOnly,
	}
}
