package store

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"syscall"
	"time"

	"go.etcd.io/bbolt"
	bberrors "go.etcd.io/bbolt/errors"
)

// ErrDamaged means that bbolt cannot read the file, or that the file has no valid records.
var ErrDamaged = errors.New("the rack's records are damaged: put a copy of the file there, or " +
	"start with another directory; nothing was changed")

// verify checks every page of a file of records without changing it. bbolt's own checks do not
// suffice: they run in goroutines of bbolt, where a panic over a damaged page ends the process.
func verify(path string) error {
	if info, err := os.Lstat(path); err != nil {
		return err
	} else if !info.Mode().IsRegular() || info.Size() == 0 {
		return fmt.Errorf("%s is empty, or is not a file: %w", path, ErrDamaged)
	}
	return guarded(path, func() error {
		db, err := bbolt.Open(path, 0o600, &bbolt.Options{Timeout: lockTimeout, ReadOnly: true})
		if err != nil {
			return err
		}
		defer db.Close()
		return db.View(func(tx *bbolt.Tx) error {
			f, err := os.Open(path)
			if err != nil {
				return err
			}
			defer f.Close()
			size := int64(db.Info().PageSize)
			p := pages{f, size, uint64(tx.Size() / size), map[uint64]bool{}}
			return p.walk(uint64(tx.Cursor().Bucket().RootPage()))
		})
	})
}

// lockTimeout is how long to wait for another simulator to end and unlock the file.
const lockTimeout = time.Second

// guarded calls open(). If open() panics or accesses invalid memory, guarded returns an error.
func guarded(path string, open func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if problem := recover(); problem != nil {
			err = fmt.Errorf("%v", problem)
		}
		var system syscall.Errno
		switch {
		case errors.Is(err, bberrors.ErrTimeout):
			err = ErrInUse
		case errors.As(err, &system):
			err = fmt.Errorf("open the records in %s: %w", path, err)
		case err != nil:
			err = fmt.Errorf("open %s: %w: %w", path, err, ErrDamaged)
		}
	}()
	return open()
}

// pages reads a file of records. A page has a header, a table of elements, and the elements' keys
// and values. The method walk checks every number in a page before it uses the number.
type pages struct {
	f    io.ReaderAt
	size int64
	end  uint64 // the number of pages
	seen map[uint64]bool
}

const (
	header  = 16 // bytes of a page's header, and of an element of its table
	branch  = 1
	leaf    = 2
	aBucket = 1
)

func (p *pages) walk(id uint64) error {
	if id >= p.end {
		return fmt.Errorf("page %d is behind the last one", id)
	}
	head := make([]byte, header)
	if _, err := p.f.ReadAt(head, int64(id)*p.size); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	more := uint64(binary.NativeEndian.Uint32(head[12:]))
	if found := binary.NativeEndian.Uint64(head); found != id || id+more >= p.end {
		return fmt.Errorf("page %d says that it is page %d with %d more", id, found, more)
	}
	for i := id; i <= id+more; i++ {
		if i < 2 || p.seen[i] {
			return fmt.Errorf("page %d is used twice", i)
		}
		p.seen[i] = true
	}
	page := make([]byte, int64(1+more)*p.size)
	if _, err := p.f.ReadAt(page, int64(id)*p.size); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	if err := p.elements(page); err != nil {
		return fmt.Errorf("page %d: %w", id, err)
	}
	return nil
}

// elements checks a page's elements. An element of a branch refers to another page. An element of a
// leaf can be a bucket: its value then contains the bucket's page or the page's number.
func (p *pages) elements(page []byte) error {
	kind, count := binary.NativeEndian.Uint16(page[8:]), int(binary.NativeEndian.Uint16(page[10:]))
	if kind != leaf && (kind != branch || count == 0) {
		return fmt.Errorf("it is of the kind %d with %d elements", kind, count)
	}
	var last []byte
	for i := range count {
		if header*(i+2) > len(page) {
			return fmt.Errorf("it has no room for %d elements", count)
		}
		at := page[header*(i+1):]
		number := func(i int) uint64 { return uint64(binary.NativeEndian.Uint32(at[4*i:])) }
		from, keyBytes, valueBytes := number(0), number(1), uint64(0)
		if kind == leaf {
			from, keyBytes, valueBytes = number(1), number(2), number(3)
		}
		if from < uint64(header*(count-i)) || from+keyBytes+valueBytes > uint64(len(at)) {
			return fmt.Errorf("its element %d is not inside it", i)
		}
		key, value := at[from:from+keyBytes], at[from+keyBytes:from+keyBytes+valueBytes]
		if i > 0 && bytes.Compare(last, key) >= 0 {
			return fmt.Errorf("its element %d is not in order", i)
		}
		last = key
		var err error
		switch {
		case kind == branch:
			err = p.walk(binary.NativeEndian.Uint64(at[8:]))
		case number(0)&aBucket == 0:
		case len(value) < header:
			err = errors.New("it has a bucket without a page")
		case binary.NativeEndian.Uint64(value) != 0:
			err = p.walk(binary.NativeEndian.Uint64(value))
		case len(value) < 2*header:
			err = errors.New("it has a bucket without a page")
		default:
			err = p.elements(value[header:])
		}
		if err != nil {
			return err
		}
	}
	return nil
}
