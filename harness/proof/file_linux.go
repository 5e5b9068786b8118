package proof

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// EachData calls do for each piece of data in a file, in order, and skips holes. A piece has
// at most 1 MiB. It is valid only during the call.
func EachData(path string, do func(at int64, b []byte) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	room := make([]byte, 1<<20)
	var end int64
	for at := int64(0); ; {
		if at >= end {
			start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("find data in %s: %w", path, err)
			}
			if end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE); err != nil {
				return fmt.Errorf("find a hole in %s: %w", path, err)
			}
			at = start
		}
		n, err := f.ReadAt(room[:min(int64(len(room)), end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			return nil // the file became shorter
		}
		if err := do(at, room[:n]); err != nil {
			return err
		}
		at += int64(n)
	}
}

// EachPage calls do for every page of a file that is not zero. It counts zeros, which is faster
// with the race detector than a comparison.
func EachPage(path string, do func(at int64, page []byte) error) error {
	return EachData(path, func(at int64, b []byte) error {
		for i := 0; i < len(b); i += pageBytes {
			page := b[i:min(i+pageBytes, len(b))]
			if bytes.Count(page, []byte{0}) == len(page) {
				continue
			}
			if err := do(at+int64(i), page); err != nil {
				return err
			}
		}
		return nil
	})
}

// digest returns a hash of a file's size and bytes. A hole and zeros have the same hash.
func digest(path string) (sum [sha256.Size]byte, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return sum, err
	}
	hash := sha256.New()
	hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(info.Size())))
	err = EachPage(path, func(at int64, page []byte) error {
		hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)))
		hash.Write(page)
		return nil
	})
	return [sha256.Size]byte(hash.Sum(nil)), err
}

// FileState is the state of a file at one moment. A write through a loop device updates the
// modification time of the backing file.
type FileState struct {
	modified time.Time
	sum      [sha256.Size]byte
}

// ReadFileState reads a file.
func ReadFileState(path string) (FileState, error) {
	info, err := os.Stat(path)
	if err != nil {
		return FileState{}, err
	}
	sum, err := digest(path)
	return FileState{info.ModTime(), sum}, err
}

// Compare returns an error that begins with the name if the file was written to since the state was
// read. It compares the bytes, too, if the file was written to or if bytes is true. It also returns
// the new state.
func (p FileState) Compare(name, path string, bytes bool) (now FileState, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	same := info.ModTime().Equal(p.modified)
	if same && !bytes {
		return p, nil
	}
	now, err = ReadFileState(path)
	if err == nil && !same {
		err = fmt.Errorf("%s was written to at %s", name, now.modified)
	}
	if err == nil && now.sum != p.sum {
		err = fmt.Errorf("%s has other bytes than before", name)
	}
	return now, err
}
