package proof

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

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
				return fmt.Errorf("look for data in %s: %w", path, err)
			}
			if end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE); err != nil {
				return fmt.Errorf("look for a hole in %s: %w", path, err)
			}
			at = start
		}
		n, err := f.ReadAt(room[:min(int64(len(room)), end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			return nil // it became shorter
		}
		if err := do(at, room[:n]); err != nil {
			return err
		}
		at += int64(n)
	}
}

// digest returns a hash of a file's size and bytes. A hole and zeros have the same hash.
func digest(path string) (sum [sha256.Size]byte, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return sum, err
	}
	var zeros [pageBytes]byte
	hash := sha256.New()
	hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(info.Size())))
	err = EachData(path, func(at int64, b []byte) error {
		for i := 0; i < len(b); i += pageBytes {
			page := b[i:min(i+pageBytes, len(b))]
			if bytes.Equal(page, zeros[:len(page)]) {
				continue
			}
			hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)+uint64(i)))
			hash.Write(page)
		}
		return nil
	})
	return [sha256.Size]byte(hash.Sum(nil)), err
}
