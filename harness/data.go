package harness

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
)

// pieceStride is the distance between the beginnings of two pieces in a raw volume.
const pieceStride = 64 * MiB

// Data describes the data of a workload in a published volume: numbered pieces of random
// bytes. In a filesystem each piece is a file, and on a device it is a range of its own.
type Data struct {
	Rack *Rack
	// Target is the path at which the volume is published. Raw reports whether the volume is a
	// device.
	Target string
	Raw    bool
	// Seed makes the pieces of one volume differ from those of another.
	Seed uint64
	// PieceBytes is the size of a piece.
	PieceBytes int64
}

// Piece returns the content of a piece. No two pieces have the same content.
func (d Data) Piece(n int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprint(d.Seed, " ", n))
	content := make([]byte, d.PieceBytes)
	_, _ = rand.NewChaCha8(key).Read(content)
	return content
}

// Open opens the file or the device for a piece. It refuses a device that is not a disk of the
// rack.
func (d Data) Open(n, flags int) (*os.File, error) {
	if !d.Raw {
		return os.OpenFile(filepath.Join(d.Target, fmt.Sprint("piece-", n)), flags, 0o640)
	}
	file, err := os.OpenFile(d.Target, flags&^os.O_CREATE, 0)
	if err != nil {
		return nil, err
	}
	err = d.Rack.Owns(file)
	if err == nil {
		_, err = file.Seek(int64(n)*pieceStride, io.SeekStart)
	}
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return file, nil
}

// Write writes a piece. If sync is true, the piece is on the disk when Write returns.
func (d Data) Write(n int, sync bool) error {
	file, err := d.Open(n, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	_, err = file.Write(d.Piece(n))
	if err == nil && sync {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

// Verify reads a piece and returns an error unless every byte is as written.
func (d Data) Verify(n int) error {
	file, err := d.Open(n, os.O_RDONLY)
	if err != nil {
		return err
	}
	defer file.Close()
	content := make([]byte, d.PieceBytes)
	if _, err := io.ReadFull(file, content); err != nil {
		return fmt.Errorf("read piece %d: %w", n, err)
	}
	if !bytes.Equal(content, d.Piece(n)) {
		return fmt.Errorf("piece %d at %s is not what was written", n, d.Target)
	}
	return nil
}
