package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"sync"

	"go.etcd.io/bbolt"
)

// Store is the file of the records.
type Store struct {
	db *bbolt.DB
	mu sync.Mutex
	// mu guards gone, the IDs that the next change removes from the list of Leave.
	gone []string
}

// ErrInUse means that another simulator serves the directory.
var ErrInUse = errors.New("another simulator serves this directory")

// Open opens the records' file. It creates the file if it is missing. A volatile store survives a
// kill of the simulator, but not a power cut.
func Open(path string, volatile bool) (*Store, error) {
	if err := createStore(path, volatile); err != nil {
		return nil, fmt.Errorf("make the records in %s: %w", path, err)
	}
	if err := verify(path); err != nil {
		return nil, err
	}
	s := &Store{}
	if err := guarded(path, func() (err error) {
		s.db, err = bbolt.Open(path, 0o600, &bbolt.Options{
			Timeout: lockTimeout,
			// The list of free pages can be rebuilt, so it is not written each time.
			NoFreelistSync: true, FreelistType: bbolt.FreelistMapType, NoSync: volatile,
		})
		return err
	}); err != nil {
		return nil, err
	}
	return s, nil
}

// createStore creates an empty file of records if there is none. It creates the complete file or
// none, because bbolt cannot read a file that a full disk or a kill has truncated.
func createStore(path string, volatile bool) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	temp := path + ".tmp"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	db, err := bbolt.Open(temp, 0o600, &bbolt.Options{NoSync: volatile})
	if err == nil {
		err = db.Close()
	}
	if err == nil {
		// Unlike a rename, a link never replaces a file that another simulator has created in the
		// meantime.
		err = os.Link(temp, path)
	}
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, os.Remove(temp))
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

// View calls fn with a transaction that reads the records.
func (s *Store) View(fn func(*Tx) error) error {
	return s.db.View(func(t *bbolt.Tx) error { return fn(&Tx{t}) })
}

// Update changes the records in one transaction, which is on disk when it returns, unless the
// store is volatile.
func (s *Store) Update(fn func(*Tx) error) error {
	s.mu.Lock()
	gone := s.gone
	s.gone = nil
	s.mu.Unlock()
	err := s.db.Update(func(t *bbolt.Tx) error {
		tx := &Tx{t}
		return errors.Join(tx.forget(gone...), fn(tx))
	})
	if err != nil {
		s.Gone(gone...)
	}
	return err
}

// Gone records that the files of these IDs were removed.
func (s *Store) Gone(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = append(s.gone, ids...)
}

// Tx is a transaction.
type Tx struct{ *bbolt.Tx }

// Clear removes every record and every table. The IDs that had files are Left.
func (tx *Tx) Clear() error {
	var names [][]byte
	var ids []string
	err := tx.ForEach(func(name []byte, b *bbolt.Bucket) error {
		if bytes.Equal(name, bucketLeft) {
			return nil
		}
		names = append(names, bytes.Clone(name))
		if !slices.Contains(withFiles, string(name)) {
			return nil
		}
		return b.ForEach(func(id, _ []byte) error {
			ids = append(ids, string(id))
			return nil
		})
	})
	for _, name := range names {
		err = errors.Join(err, tx.DeleteBucket(name))
	}
	return errors.Join(err, tx.Leave(ids...))
}

// withFiles are the tables whose objects have files, or a directory.
var withFiles = []string{"disk", "snapshot", "image", "instance"}

// Leave records IDs that may have files without a record.
func (tx *Tx) Leave(ids ...string) error {
	if len(ids) == 0 {
		return nil
	}
	left, err := tx.CreateBucketIfNotExists(bucketLeft)
	for _, id := range ids {
		err = errors.Join(err, left.Put([]byte(id), nil))
	}
	return err
}

// Left returns the IDs that may have files without a record. Only such files may be removed,
// because a file whose ID never had a record is not the rack's.
func (tx *Tx) Left() (ids []string, err error) {
	left := tx.Bucket(bucketLeft)
	if left == nil {
		return nil, nil
	}
	return ids, left.ForEach(func(id, _ []byte) error {
		ids = append(ids, string(id))
		return nil
	})
}

// forget removes IDs from the list of Leave.
func (tx *Tx) forget(ids ...string) (err error) {
	if left := tx.Bucket(bucketLeft); left != nil {
		for _, id := range ids {
			err = errors.Join(err, left.Delete([]byte(id)))
		}
	}
	return err
}

// Table is one kind of record. Records are found by ID, by name within their parent (the project,
// or "" for an object of the silo), and in the order of either.
type Table[T any] struct {
	Name   string
	Ident  func(T) Identity
	Parent func(T) string
}

// These are the tables.
var (
	Projects = Table[Project]{"project",
		func(p Project) Identity { return p.Identity }, func(Project) string { return "" }}
	Disks = Table[Disk]{"disk",
		func(d Disk) Identity { return d.Identity }, func(d Disk) string { return d.ProjectID }}
	Snapshots = Table[SnapshotRecord]{"snapshot",
		func(s SnapshotRecord) Identity { return s.Identity },
		func(s SnapshotRecord) string { return s.ProjectID }}
	Images = Table[Image]{"image",
		func(i Image) Identity { return i.Identity },
		func(i Image) string { return Deref(i.ProjectID) }}
	Instances = Table[Instance]{"instance",
		func(i Instance) Identity { return i.Identity },
		func(i Instance) string { return i.ProjectID }}
)

// Deref returns the string, or "" for nil.
func Deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// key returns a key of an index. All entries of a parent are adjacent.
func key(parent, last string) []byte { return []byte(parent + "/" + last) }

func (t Table[T]) bucket(tx *Tx) *bbolt.Bucket { return tx.Bucket([]byte(t.Name)) }
func (t Table[T]) names(tx *Tx) *bbolt.Bucket  { return tx.Bucket([]byte(t.Name + " names")) }
func (t Table[T]) ids(tx *Tx) *bbolt.Bucket    { return tx.Bucket([]byte(t.Name + " ids")) }

func (t Table[T]) create(tx *Tx) error {
	for _, suffix := range []string{"", " names", " ids"} {
		if _, err := tx.CreateBucketIfNotExists([]byte(t.Name + suffix)); err != nil {
			return err
		}
	}
	return nil
}

// Get returns the record with an ID, and reports whether it exists.
func (t Table[T]) Get(tx *Tx, id string) (T, bool, error) {
	var record T
	data := t.bucket(tx).Get([]byte(id))
	if data == nil {
		return record, false, nil
	}
	if err := json.Unmarshal(data, &record); err != nil {
		return record, false, fmt.Errorf("read the record of %s %s: %w", t.Name, id, err)
	}
	return record, true, nil
}

// ByName returns the record with a name, and reports whether it exists.
func (t Table[T]) ByName(tx *Tx, parent, name string) (T, bool, error) {
	id := t.names(tx).Get(key(parent, name))
	if id == nil {
		var none T
		return none, false, nil
	}
	return t.Get(tx, string(id))
}

// Taken reports whether a parent has an object of that name.
func (t Table[T]) Taken(tx *Tx, parent, name string) bool {
	return t.names(tx).Get(key(parent, name)) != nil
}

// maxRecords is the number of records of one kind that a rack can have. The sequence number of a
// table's bucket counts them.
const maxRecords = 20_000

// FullError means that a rack has as many records of a kind as it can have.
type FullError struct{ kind string }

func (e *FullError) Error() string {
	return fmt.Sprintf("there are %d objects of the kind %s, and a simulated rack keeps no more: "+
		"delete some", maxRecords, e.kind)
}

// Put adds the record, or replaces the record with the same ID, also if its name or parent differs.
func (t Table[T]) Put(tx *Tx, record T) error {
	ident, parent := t.Ident(record), t.Parent(record)
	old, ok, err := t.Get(tx, ident.ID)
	if err != nil {
		return err
	}
	if ok {
		if err := t.Delete(tx, old); err != nil {
			return err
		}
	}
	data, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("write the record of %s %s: %w", t.Name, ident.ID, err)
	}
	count := t.bucket(tx).Sequence()
	if !ok && count >= maxRecords {
		return &FullError{t.Name}
	}
	return errors.Join(
		tx.forget(ident.ID),
		t.bucket(tx).SetSequence(count+1),
		t.bucket(tx).Put([]byte(ident.ID), data),
		t.names(tx).Put(key(parent, ident.Name), []byte(ident.ID)),
		t.ids(tx).Put(key(parent, ident.ID), []byte(ident.ID)),
	)
}

// Delete removes a record. If such objects have files, its ID is Left.
func (t Table[T]) Delete(tx *Tx, record T) error {
	ident, parent := t.Ident(record), t.Parent(record)
	var left []string
	if slices.Contains(withFiles, t.Name) {
		left = []string{ident.ID}
	}
	count := t.bucket(tx).Sequence()
	if count > 0 && t.bucket(tx).Get([]byte(ident.ID)) != nil {
		count--
	}
	return errors.Join(
		tx.Leave(left...),
		t.bucket(tx).SetSequence(count),
		t.bucket(tx).Delete([]byte(ident.ID)),
		t.names(tx).Delete(key(parent, ident.Name)),
		t.ids(tx).Delete(key(parent, ident.ID)),
	)
}

// Scan returns up to limit of a parent's records after the name or ID last, in the order of sortBy.
func (t Table[T]) Scan(tx *Tx, parent, sortBy string, last *string, limit int) ([]T, error) {
	index := t.names(tx)
	if sortBy == ByID {
		index = t.ids(tx)
	}
	c := index.Cursor()
	prefix := key(parent, "")
	k, id := first(c, prefix, sortBy == ByNameDescending, last)
	records := []T{}
	for ; k != nil && bytes.HasPrefix(k, prefix) && len(records) < limit; k, id = step(c, sortBy) {
		record, _, err := t.Get(tx, string(id))
		if err != nil {
			return nil, err
		}
		records = append(records, record)
	}
	return records, nil
}

func step(c *bbolt.Cursor, sortBy string) (k, v []byte) {
	if sortBy == ByNameDescending {
		return c.Prev()
	}
	return c.Next()
}

// first moves the cursor to the first entry of a scan.
func first(c *bbolt.Cursor, prefix []byte, descending bool, last *string) (k, v []byte) {
	start := prefix
	if last != nil {
		start = append(bytes.Clone(prefix), *last...)
	}
	if !descending {
		k, v = c.Seek(start)
		if last != nil && bytes.Equal(k, start) {
			k, v = c.Next()
		}
		return k, v
	}
	if last == nil {
		// '0' follows '/', so this is just after the parent's last entry.
		start = append(bytes.Clone(prefix[:len(prefix)-1]), '/'+1)
	}
	if k, _ := c.Seek(start); k == nil {
		return c.Last()
	}
	return c.Prev()
}

// Each calls visit for every record of the table.
func (t Table[T]) Each(tx *Tx, visit func(T) error) error {
	return t.bucket(tx).ForEach(func(id, _ []byte) error {
		record, _, err := t.Get(tx, string(id))
		if err != nil {
			return err
		}
		return visit(record)
	})
}

// EachRaw calls visit for every record of the table as JSON.
func (t Table[T]) EachRaw(tx *Tx, visit func(id string, data []byte) error) error {
	return t.bucket(tx).ForEach(func(id, data []byte) error { return visit(string(id), data) })
}

var (
	bucketMeta = []byte("meta")
	keyStorage = []byte("storage provisioned")
	// bucketAttached has a key for every instance and disk attached to it.
	bucketAttached = []byte("attached")
	// bucketInterfaces has the network interfaces of an instance.
	bucketInterfaces = []byte("interfaces")
	// bucketSagas has the requests of disks and instances that are being created.
	bucketSagas = []byte("sagas")
	// bucketUnfreed has the sizes of deleted disks and snapshots that the quota still counts.
	bucketUnfreed = []byte("unfreed")
	// bucketLeft has the IDs of Leave.
	bucketLeft = []byte("left")
)

// Prepare creates the buckets that an empty store lacks. resources are the tables of resources.
func Prepare(tx *Tx, resources []Table[Resource]) error {
	for _, name := range [][]byte{
		bucketMeta, bucketAttached, bucketInterfaces, bucketSagas, bucketUnfreed, bucketLinks,
	} {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	for _, table := range resources {
		if err := table.create(tx); err != nil {
			return err
		}
	}
	return errors.Join(Projects.create(tx), Disks.create(tx), Snapshots.create(tx),
		Images.create(tx), Instances.create(tx))
}

// PutDisk writes the record, and the index of each instance's disks.
func (tx *Tx) PutDisk(d Disk) error {
	old, ok, err := Disks.Get(tx, d.ID)
	if err != nil {
		return err
	}
	if ok && old.State.Instance != "" {
		if err := tx.Bucket(bucketAttached).Delete(key(old.State.Instance, d.ID)); err != nil {
			return err
		}
	}
	if d.State.Instance != "" {
		if err := tx.Bucket(bucketAttached).Put(key(d.State.Instance, d.ID), nil); err != nil {
			return err
		}
	}
	return Disks.Put(tx, d)
}

// DisksOf reads the disks attached to an instance, in the order of their IDs.
func (tx *Tx) DisksOf(instanceID string) ([]Disk, error) {
	attached := []Disk{}
	prefix := key(instanceID, "")
	c := tx.Bucket(bucketAttached).Cursor()
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		d, ok, err := Disks.Get(tx, string(k[len(prefix):]))
		if err != nil {
			return nil, err
		}
		if ok {
			attached = append(attached, d)
		}
	}
	return attached, nil
}

// These are the orders of a scan, by the rack's names.
const (
	ByName           = "name_ascending"
	ByNameDescending = "name_descending"
	ByID             = "id_ascending"
)

// Project finds a project by ID or name.
func (tx *Tx) Project(sel Selector) (Project, bool, error) {
	if sel.ID != "" {
		return Projects.Get(tx, sel.ID)
	}
	return Projects.ByName(tx, "", sel.Name)
}

// OtherNames returns the names of an ID and the IDs of a name.
func (tx *Tx) OtherNames(parent, subject string) []string {
	return slices.Concat(
		aliases(tx, Disks, parent, subject),
		aliases(tx, Instances, parent, subject),
		aliases(tx, Snapshots, parent, subject),
		aliases(tx, Images, parent, subject),
		aliases(tx, Projects, "", subject),
	)
}

// aliases returns the ID of the object with that name, or the name of the object with that ID.
func aliases[T any](tx *Tx, t Table[T], parent, subject string) []string {
	if id := t.names(tx).Get(key(parent, subject)); id != nil {
		return []string{string(id)}
	}
	if object, ok, err := t.Get(tx, subject); ok && err == nil {
		return []string{t.Ident(object).Name}
	}
	return nil
}
