package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"slices"
	"strings"
	"sync"

	"go.etcd.io/bbolt"
)

// Store is the open file with the records.
type Store struct {
	db *bbolt.DB
	mu sync.Mutex
	// mu guards gone: the IDs whose files were removed. The next Update deletes them from bucketLeft.
	gone []string
}

// ErrInUse means that another simulator serves the directory.
var ErrInUse = errors.New("another simulator serves this directory")

// Open opens the file with the records, or creates it. A volatile store survives a kill of the
// simulator, but not a power cut.
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
			// bbolt can rebuild its list of free pages, so it need not write the list with each change.
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
		// Unlike a rename, a link never replaces a file that another simulator has created meanwhile.
		err = os.Link(temp, path)
	}
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, os.Remove(temp))
}

// Close closes the file.
func (s *Store) Close() error { return s.db.Close() }

// View calls fn with a read-only transaction. It returns the error that fn gave to [Tx.Check].
func (s *Store) View(fn func(*Tx)) error {
	return s.db.View(func(t *bbolt.Tx) error { return (&Tx{t}).Try(fn) })
}

// Update calls fn with a transaction. Its changes are on disk when Update returns, unless the store
// is volatile. If [Tx.Check] ends the transaction, Update changes nothing and returns the error.
func (s *Store) Update(fn func(*Tx)) error {
	s.mu.Lock()
	gone := s.gone
	s.gone = nil
	s.mu.Unlock()
	err := s.db.Update(func(t *bbolt.Tx) error {
		return (&Tx{t}).Try(func(tx *Tx) {
			tx.forget(gone...)
			fn(tx)
		})
	})
	if err != nil {
		s.Gone(gone...)
	}
	return err
}

// Gone records that the files of the objects with these IDs were removed.
func (s *Store) Gone(ids ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.gone = append(s.gone, ids...)
}

// Tx is a transaction. A function with a Tx returns no error: if a read or a write fails, or a rule
// is violated, the function calls Check, which ends the transaction.
type Tx struct{ *bbolt.Tx }

// ended is the panic with which Check ends a transaction.
type ended struct{ error }

// Check ignores nil. With any other error it ends the transaction, and does not return.
func (tx *Tx) Check(err error) {
	if err != nil {
		panic(ended{err})
	}
}

// Refuse ends the transaction with err if when is true.
func (tx *Tx) Refuse(when bool, err error) {
	if when {
		tx.Check(err)
	}
}

// Try calls fn and returns the error with which Check ended fn. The transaction keeps the changes
// that fn made before the error.
func (tx *Tx) Try(fn func(*Tx)) (err error) {
	defer func() {
		switch problem := recover().(type) {
		case nil:
		case ended:
			err = problem.error
		default:
			panic(problem)
		}
	}()
	fn(tx)
	return nil
}

func (tx *Tx) put(bucket []byte, key string, value any) {
	data, err := json.Marshal(value)
	if err == nil {
		err = tx.Bucket(bucket).Put([]byte(key), data)
	}
	tx.Check(err)
}

func (tx *Tx) get(bucket []byte, key string, into any) bool {
	data := tx.Bucket(bucket).Get([]byte(key))
	if data != nil {
		tx.decode(string(bucket), key, data, into)
	}
	return data != nil
}

func (tx *Tx) decode(kind, id string, data []byte, into any) {
	if err := json.Unmarshal(data, into); err != nil {
		tx.Check(fmt.Errorf("read the record of %s %s: %w", kind, id, err))
	}
}

func (tx *Tx) drop(bucket []byte, key string) { tx.Check(tx.Bucket(bucket).Delete([]byte(key))) }

func (tx *Tx) keys(bucket []byte, prefix string) []string {
	if b := tx.Bucket(bucket); b != nil {
		return keysOf(b, prefix)
	}
	return nil
}

func keysOf(b *bbolt.Bucket, prefix string) (rest []string) {
	c := b.Cursor()
	for k, _ := c.Seek([]byte(prefix)); k != nil && strings.HasPrefix(string(k), prefix); {
		rest = append(rest, string(k[len(prefix):]))
		k, _ = c.Next()
	}
	return rest
}

// Clear removes all records and tables. It calls Leave with the IDs of all objects that have files.
func (tx *Tx) Clear() {
	var ids []string
	for _, name := range withFiles {
		ids = append(ids, tx.keys([]byte(name), "")...)
	}
	var names [][]byte
	tx.Check(tx.ForEach(func(name []byte, _ *bbolt.Bucket) error {
		if !bytes.Equal(name, bucketLeft) {
			names = append(names, bytes.Clone(name))
		}
		return nil
	}))
	for _, name := range names {
		tx.Check(tx.DeleteBucket(name))
	}
	tx.Leave(ids...)
}

// withFiles are the tables of objects that have a file or a directory.
var withFiles = []string{"disk", "snapshot", "image", "instance"}

// Leave stores the IDs of objects that have no record, but may have files.
func (tx *Tx) Leave(ids ...string) {
	for _, id := range ids {
		left, err := tx.CreateBucketIfNotExists(bucketLeft)
		tx.Check(err)
		tx.Check(left.Put([]byte(id), nil))
	}
}

// Left returns the IDs that Leave has stored. The rack may remove only the files of these IDs,
// because a file whose ID never had a record is not the rack's.
func (tx *Tx) Left() []string { return tx.keys(bucketLeft, "") }

func (tx *Tx) forget(ids ...string) {
	if tx.Bucket(bucketLeft) != nil {
		for _, id := range ids {
			tx.drop(bucketLeft, id)
		}
	}
}

// Record is a record that a [Table] contains.
type Record interface{ Ident() Identity }

// Table has the records of one kind. A record is found by its ID, or by its parent and name. The
// parent is an ID, such as a project's, or "" for the silo. Lists are sorted by ID or name.
type Table[T Record] struct {
	Name   string
	Parent func(T) string
}

// The tables. The function in each returns the ID of a record's parent.
var (
	Projects  = Table[Project]{"project", func(Project) string { return "" }}
	Disks     = Table[Disk]{"disk", func(d Disk) string { return d.ProjectID }}
	Snapshots = Table[SnapshotRecord]{"snapshot", func(s SnapshotRecord) string { return s.ProjectID }}
	Images    = Table[Image]{"image", func(i Image) string { return Deref(i.ProjectID) }}
	Instances = Table[Instance]{"instance", func(i Instance) string { return i.ProjectID }}
)

// Deref returns the string, or "" for nil.
func Deref(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// key returns a key of an index. It begins with the parent, so a parent's entries are adjacent.
func key(parent, last string) []byte { return []byte(parent + "/" + last) }

func (t Table[T]) bucket(tx *Tx) *bbolt.Bucket { return tx.Bucket([]byte(t.Name)) }
func (t Table[T]) names(tx *Tx) *bbolt.Bucket  { return tx.Bucket([]byte(t.Name + " names")) }
func (t Table[T]) ids(tx *Tx) *bbolt.Bucket    { return tx.Bucket([]byte(t.Name + " ids")) }

// Get returns the record with an ID, and reports whether it exists.
func (t Table[T]) Get(tx *Tx, id string) (record T, ok bool) {
	return record, tx.get([]byte(t.Name), id, &record)
}

// ByName returns the record with a name, and reports whether it exists.
func (t Table[T]) ByName(tx *Tx, parent, name string) (record T, ok bool) {
	if id := t.names(tx).Get(key(parent, name)); id != nil {
		return t.Get(tx, string(id))
	}
	return record, false
}

// Find returns the record with an ID, or with a name in a parent, and reports whether it exists.
func (t Table[T]) Find(tx *Tx, parent string, sel Selector) (T, bool) {
	if sel.ID != "" {
		return t.Get(tx, sel.ID)
	}
	return t.ByName(tx, parent, sel.Name)
}

// Taken reports whether a parent has an object with this name.
func (t Table[T]) Taken(tx *Tx, parent, name string) bool {
	return t.names(tx).Get(key(parent, name)) != nil
}

// maxRecords is the number of records of one kind that a rack can have. The sequence number of a
// table's bucket counts the records.
const maxRecords = 20_000

// FullError means that the table of a kind has maxRecords records.
type FullError struct{ kind string }

func (e *FullError) Error() string {
	return fmt.Sprintf("there are %d objects of the kind %s, and a simulated rack keeps no more: "+
		"delete some", maxRecords, e.kind)
}

// Put adds a record, or replaces the one with the same ID, even if the name or the parent differs.
func (t Table[T]) Put(tx *Tx, record T) {
	ident, parent := record.Ident(), t.Parent(record)
	old, ok := t.Get(tx, ident.ID)
	if ok {
		t.Delete(tx, old)
	}
	count := t.bucket(tx).Sequence()
	if !ok && count >= maxRecords {
		tx.Check(&FullError{t.Name})
	}
	tx.put([]byte(t.Name), ident.ID, record)
	tx.forget(ident.ID)
	tx.Check(errors.Join(
		t.bucket(tx).SetSequence(count+1),
		t.names(tx).Put(key(parent, ident.Name), []byte(ident.ID)),
		t.ids(tx).Put(key(parent, ident.ID), []byte(ident.ID)),
	))
}

// Delete deletes a record. If the table's objects have files, it calls Leave with the ID.
func (t Table[T]) Delete(tx *Tx, record T) {
	ident, parent := record.Ident(), t.Parent(record)
	if slices.Contains(withFiles, t.Name) {
		tx.Leave(ident.ID)
	}
	count := t.bucket(tx).Sequence()
	if count > 0 && t.bucket(tx).Get([]byte(ident.ID)) != nil {
		count--
	}
	tx.Check(errors.Join(
		t.bucket(tx).SetSequence(count),
		t.bucket(tx).Delete([]byte(ident.ID)),
		t.names(tx).Delete(key(parent, ident.Name)),
		t.ids(tx).Delete(key(parent, ident.ID)),
	))
}

// Scan returns up to limit records of a parent, sorted by sortBy, that follow the name or ID *last.
func (t Table[T]) Scan(tx *Tx, parent, sortBy string, last *string, limit int) []T {
	index := t.names(tx)
	if sortBy == ByID {
		index = t.ids(tx)
	}
	keys := keysOf(index, parent+"/")
	if sortBy == ByNameDescending {
		slices.Reverse(keys)
	}
	if last != nil {
		keys = slices.DeleteFunc(keys, func(k string) bool {
			return k == *last || (k < *last) == (sortBy != ByNameDescending)
		})
	}
	records := []T{}
	for _, k := range keys[:min(limit, len(keys))] {
		record, _ := t.Get(tx, string(index.Get(key(parent, k))))
		records = append(records, record)
	}
	return records
}

// All iterates over every record of the table.
func (t Table[T]) All(tx *Tx) iter.Seq[T] { return As[T](tx, t.Name) }

// As decodes every record of a table as T, which has the same JSON keys as the table's type.
func As[T any](tx *Tx, table string) iter.Seq[T] {
	return func(yield func(T) bool) {
		c := tx.Bucket([]byte(table)).Cursor()
		for id, data := c.First(); id != nil; id, data = c.Next() {
			var record T
			tx.decode(table, string(id), data, &record)
			if !yield(record) {
				return
			}
		}
	}
}

var (
	bucketMeta = []byte("meta")
	// bucketAttached has a key for every attachment: the instance's ID and then the disk's ID.
	bucketAttached = []byte("attached")
	// bucketInterfaces has the network interfaces of each instance.
	bucketInterfaces = []byte("interfaces")
	// bucketSagas has the requests for disks and instances whose creation is not complete.
	bucketSagas = []byte("sagas")
	// bucketUnfreed has the sizes of deleted disks and snapshots that the quota still counts.
	bucketUnfreed = []byte("unfreed")
	// bucketLeft has the IDs that Leave has stored.
	bucketLeft = []byte("left")
)

// Prepare creates all missing buckets. The names of the kinds of [Resource] are in tables.
func Prepare(tx *Tx, tables ...string) {
	names := [][]byte{bucketMeta, bucketAttached, bucketInterfaces, bucketSagas, bucketUnfreed,
		bucketLinks}
	tables = append(tables, Projects.Name, Disks.Name, Snapshots.Name, Images.Name, Instances.Name)
	for _, t := range tables {
		names = append(names, []byte(t), []byte(t+" names"), []byte(t+" ids"))
	}
	for _, name := range names {
		_, err := tx.CreateBucketIfNotExists(name)
		tx.Check(err)
	}
}

// PutDisk writes a disk's record, and updates the index of the disks of each instance.
func (tx *Tx) PutDisk(d Disk) {
	if old, ok := Disks.Get(tx, d.ID); ok && old.State.Instance != "" {
		tx.drop(bucketAttached, old.State.Instance+"/"+d.ID)
	}
	if d.State.Instance != "" {
		tx.Check(tx.Bucket(bucketAttached).Put(key(d.State.Instance, d.ID), nil))
	}
	Disks.Put(tx, d)
}

// DisksOf returns the disks that are attached to an instance, sorted by ID.
func (tx *Tx) DisksOf(instanceID string) []Disk {
	attached := []Disk{}
	for _, id := range tx.keys(bucketAttached, instanceID+"/") {
		if d, ok := Disks.Get(tx, id); ok {
			attached = append(attached, d)
		}
	}
	return attached
}

// These are the rack's names for the orders of a list.
const (
	ByName           = "name_ascending"
	ByNameDescending = "name_descending"
	ByID             = "id_ascending"
)

// OtherNames returns the IDs of objects named subject or, if subject is an ID, the object's name.
func (tx *Tx) OtherNames(parent, subject string) []string {
	return slices.Concat(
		aliases(tx, Disks, parent, subject),
		aliases(tx, Instances, parent, subject),
		aliases(tx, Snapshots, parent, subject),
		aliases(tx, Images, parent, subject),
		aliases(tx, Projects, "", subject),
	)
}

func aliases[T Record](tx *Tx, t Table[T], parent, subject string) []string {
	if id := t.names(tx).Get(key(parent, subject)); id != nil {
		return []string{string(id)}
	}
	if object, ok := t.Get(tx, subject); ok {
		return []string{object.Ident().Name}
	}
	return nil
}

const keyStorage = "storage provisioned"

// Storage returns how many bytes of the quota are used.
func (tx *Tx) Storage() (sum int64) {
	tx.get(bucketMeta, keyStorage, &sum)
	return sum
}

// AddStorage changes how many bytes of the quota are used.
func (tx *Tx) AddStorage(delta int64) { tx.put(bucketMeta, keyStorage, tx.Storage()+delta) }

// DeferRelease records that a deleted object uses its share of the quota until ReleaseDeferred.
func (tx *Tx) DeferRelease(id string, size int64) { tx.put(bucketUnfreed, id, size) }

// Reclaim makes the quota count a deleted object again. If DeferRelease was called, the quota still
// counts the object, and Reclaim only cancels the release.
func (tx *Tx) Reclaim(id string, size int64) {
	if tx.Bucket(bucketUnfreed).Get([]byte(id)) == nil {
		tx.AddStorage(size)
	}
	tx.drop(bucketUnfreed, id)
}

// ReleaseDeferred frees the share of the quota that DeferRelease has recorded.
func (tx *Tx) ReleaseDeferred(id string) {
	var size int64
	if !tx.get(bucketUnfreed, id, &size) {
		tx.Check(fmt.Errorf("the quota does not count the deleted object %s", id))
	}
	tx.AddStorage(-size)
	tx.drop(bucketUnfreed, id)
}

// ReleaseDeleted calls ReleaseDeferred for all objects that an earlier simulator has deleted.
func ReleaseDeleted(tx *Tx) {
	for _, id := range tx.keys(bucketUnfreed, "") {
		tx.ReleaseDeferred(id)
	}
}

// OpenSaga records the request of a creation that begins, so that a restart can complete it.
func (tx *Tx) OpenSaga(id string, request any) { tx.put(bucketSagas, id, request) }

// SagaRequest reads the request that OpenSaga has recorded. If there is none, *into stays the same.
func (tx *Tx) SagaRequest(id string, into any) { tx.get(bucketSagas, id, into) }

// CloseSaga deletes the request that OpenSaga has recorded.
func (tx *Tx) CloseSaga(id string) { tx.drop(bucketSagas, id) }

// UndoDisk deletes the record of a disk whose creation failed, and frees its share of the quota.
func (tx *Tx) UndoDisk(d Disk) {
	tx.CloseSaga(d.ID)
	Disks.Delete(tx, d)
	tx.AddStorage(-d.Size)
}

// UndoInstance deletes the records of an instance whose creation failed, and of the disks in made.
func (tx *Tx) UndoInstance(i Instance, made []string) {
	tx.DeleteInstance(i)
	for _, id := range made {
		if d, ok := Disks.Get(tx, id); ok {
			tx.UndoDisk(d)
		}
	}
}
