package simulator

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"go.etcd.io/bbolt"
	bberrors "go.etcd.io/bbolt/errors"
)

// store keeps the rack's records in one bbolt file. A change is one transaction and is on disk
// when update returns: nobody reads, and no caller is told, what a power cut could take back.
type store struct{ db *bbolt.DB }

// errInUse says that another simulator serves the directory.
var errInUse = errors.New("another simulator serves this directory")

func openStore(path string) (*store, error) {
	if err := createStore(path); err != nil {
		return nil, fmt.Errorf("make the records in %s: %w", path, err)
	}
	db, err := bbolt.Open(path, 0o600, &bbolt.Options{
		Timeout: time.Second, // for the lock that another simulator may hold
		// The list of free pages can be found again, so it need not be written each time.
		NoFreelistSync: true, FreelistType: bbolt.FreelistMapType,
	})
	if errors.Is(err, bberrors.ErrTimeout) {
		return nil, errInUse
	}
	if err != nil {
		return nil, fmt.Errorf("open the records in %s: %w", path, err)
	}
	return &store{db}, nil
}

// createStore makes an empty file of records where there is none: whole or not at all, as bbolt
// can do nothing with the beginning of one that a full disk or a kill left behind.
func createStore(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	temp := path + ".tmp"
	if err := os.RemoveAll(temp); err != nil {
		return err
	}
	db, err := bbolt.Open(temp, 0o600, nil)
	if err == nil {
		err = db.Close()
	}
	if err == nil {
		// Unlike a rename, this never replaces what another simulator has made meanwhile.
		err = os.Link(temp, path)
	}
	if errors.Is(err, fs.ErrExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(temp))
}

func (s *store) close() error { return s.db.Close() }

func (s *store) view(fn func(*tx) error) error {
	return s.db.View(func(t *bbolt.Tx) error { return fn(&tx{t}) })
}

func (s *store) update(fn func(*tx) error) error {
	return s.db.Update(func(t *bbolt.Tx) error { return fn(&tx{t}) })
}

type tx struct{ *bbolt.Tx }

// table is one kind of record. Records are found by ID, by name within their parent (the project,
// or "" for what belongs to the silo), and in the order of either.
type table[T any] struct {
	name   string
	ident  func(T) identity
	parent func(T) string
}

var (
	projects = table[project]{"project",
		func(p project) identity { return p.identity }, func(project) string { return "" }}
	disks = table[disk]{"disk",
		func(d disk) identity { return d.identity }, func(d disk) string { return d.ProjectID }}
	snapshots = table[snapshotRecord]{"snapshot",
		func(s snapshotRecord) identity { return s.identity },
		func(s snapshotRecord) string { return s.ProjectID }}
	images = table[image]{"image",
		func(i image) identity { return i.identity },
		func(i image) string { return value(i.ProjectID) }}
	instances = table[instance]{"instance",
		func(i instance) identity { return i.identity },
		func(i instance) string { return i.ProjectID }}
)

func value(s *string) string {
	if s == nil {
		return ""
	}
	return *s
}

// key orders an index: all of a parent's entries lie together.
func key(parent, last string) []byte { return []byte(parent + "/" + last) }

func (t table[T]) bucket(tx *tx) *bbolt.Bucket { return tx.Bucket([]byte(t.name)) }
func (t table[T]) names(tx *tx) *bbolt.Bucket  { return tx.Bucket([]byte(t.name + " names")) }
func (t table[T]) ids(tx *tx) *bbolt.Bucket    { return tx.Bucket([]byte(t.name + " ids")) }

func (t table[T]) create(tx *tx) error {
	for _, suffix := range []string{"", " names", " ids"} {
		if _, err := tx.CreateBucketIfNotExists([]byte(t.name + suffix)); err != nil {
			return err
		}
	}
	return nil
}

func (t table[T]) get(tx *tx, id string) (T, bool, error) {
	var record T
	data := t.bucket(tx).Get([]byte(id))
	if data == nil {
		return record, false, nil
	}
	if err := json.Unmarshal(data, &record); err != nil {
		return record, false, fmt.Errorf("read the record of %s %s: %w", t.name, id, err)
	}
	return record, true, nil
}

func (t table[T]) byName(tx *tx, parent, name string) (T, bool, error) {
	id := t.names(tx).Get(key(parent, name))
	if id == nil {
		var none T
		return none, false, nil
	}
	return t.get(tx, string(id))
}

func (t table[T]) taken(tx *tx, parent, name string) bool {
	return t.names(tx).Get(key(parent, name)) != nil
}

// put adds the record, or replaces the one with its ID whatever name that had.
func (t table[T]) put(tx *tx, record T) error {
	ident, parent := t.ident(record), t.parent(record)
	old, ok, err := t.get(tx, ident.ID)
	if err != nil {
		return err
	}
	if ok && t.ident(old).Name != ident.Name {
		if err := t.names(tx).Delete(key(parent, t.ident(old).Name)); err != nil {
			return err
		}
	}
	data, err := json.Marshal(record)
	if err != nil {
		return fmt.Errorf("write the record of %s %s: %w", t.name, ident.ID, err)
	}
	return errors.Join(
		t.bucket(tx).Put([]byte(ident.ID), data),
		t.names(tx).Put(key(parent, ident.Name), []byte(ident.ID)),
		t.ids(tx).Put(key(parent, ident.ID), []byte(ident.ID)),
	)
}

func (t table[T]) delete(tx *tx, record T) error {
	ident, parent := t.ident(record), t.parent(record)
	return errors.Join(
		t.bucket(tx).Delete([]byte(ident.ID)),
		t.names(tx).Delete(key(parent, ident.Name)),
		t.ids(tx).Delete(key(parent, ident.ID)),
	)
}

// scan reads up to limit of a parent's records after (never at) last, in the order of sortBy.
func (t table[T]) scan(tx *tx, parent, sortBy string, last *string, limit int) ([]T, error) {
	index := t.names(tx)
	if sortBy == byID {
		index = t.ids(tx)
	}
	c := index.Cursor()
	prefix := key(parent, "")
	k, id := first(c, prefix, sortBy == byNameDescending, last)
	records := []T{}
	for ; k != nil && bytes.HasPrefix(k, prefix) && len(records) < limit; k, id = step(c, sortBy) {
		record, _, err := t.get(tx, string(id))
		if err != nil {
			return nil, err
		}
		records = append(records, record)
	}
	return records, nil
}

func step(c *bbolt.Cursor, sortBy string) (k, v []byte) {
	if sortBy == byNameDescending {
		return c.Prev()
	}
	return c.Next()
}

// first seeks the first entry of a scan.
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
		// '0' follows '/', so this is just behind the parent's last entry.
		start = append(bytes.Clone(prefix[:len(prefix)-1]), '/'+1)
	}
	if k, _ := c.Seek(start); k == nil {
		return c.Last()
	}
	return c.Prev()
}

// each visits every record of the table.
func (t table[T]) each(tx *tx, visit func(T) error) error {
	return t.bucket(tx).ForEach(func(id, _ []byte) error {
		record, _, err := t.get(tx, string(id))
		if err != nil {
			return err
		}
		return visit(record)
	})
}

var (
	bucketMeta = []byte("meta")
	keyStorage = []byte("storage provisioned")
	// bucketAttached has a key for every instance and disk attached to it.
	bucketAttached = []byte("attached")
	// bucketInterfaces has the network interfaces of an instance.
	bucketInterfaces = []byte("interfaces")
	// bucketSagas has, for an instance that is being created, the IDs of the disks that are
	// created for it.
	bucketSagas = []byte("sagas")
	// bucketUnfreed has the sizes of deleted disks and snapshots that the quota still counts.
	bucketUnfreed = []byte("unfreed")
)

// createBuckets makes what an empty directory lacks.
func createBuckets(tx *tx) error {
	for _, name := range [][]byte{
		bucketMeta, bucketAttached, bucketInterfaces, bucketSagas, bucketUnfreed,
	} {
		if _, err := tx.CreateBucketIfNotExists(name); err != nil {
			return err
		}
	}
	return errors.Join(projects.create(tx), disks.create(tx), snapshots.create(tx),
		images.create(tx), instances.create(tx))
}

// putDisk keeps, beside the record, the index of which instance has which disks.
func (tx *tx) putDisk(d disk) error {
	old, ok, err := disks.get(tx, d.ID)
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
	return disks.put(tx, d)
}

// disksOf reads the disks attached to an instance, in the order of their IDs.
func (tx *tx) disksOf(instanceID string) ([]disk, error) {
	attached := []disk{}
	prefix := key(instanceID, "")
	c := tx.Bucket(bucketAttached).Cursor()
	for k, _ := c.Seek(prefix); bytes.HasPrefix(k, prefix); k, _ = c.Next() {
		d, ok, err := disks.get(tx, string(k[len(prefix):]))
		if err != nil {
			return nil, err
		}
		if ok {
			attached = append(attached, d)
		}
	}
	return attached, nil
}

// storage is the sum of what disks and snapshots take of the quota.
func (tx *tx) storage() (int64, error) {
	var sum int64
	data := tx.Bucket(bucketMeta).Get(keyStorage)
	if data == nil {
		return 0, nil
	}
	if err := json.Unmarshal(data, &sum); err != nil {
		return 0, fmt.Errorf("read the record of provisioned storage: %w", err)
	}
	return sum, nil
}

func (tx *tx) addStorage(delta int64) error {
	sum, err := tx.storage()
	if err != nil {
		return err
	}
	data, err := json.Marshal(sum + delta)
	if err != nil {
		return err
	}
	return tx.Bucket(bucketMeta).Put(keyStorage, data)
}
