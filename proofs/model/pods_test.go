//go:build linux

package model

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
)

// place opens the file that contains a block, and returns the offset of the block: in a file of the
// filesystem, or in the device, from its first bytes to its last ones.
func place(path string, v, block, flags int) (*os.File, int64, error) {
	if !kinds[v].block() {
		file, err := os.OpenFile(filepath.Join(path, "blocks"), flags, 0o640)
		return file, int64(block) * blockSize, err
	}
	file, err := os.OpenFile(path, flags&^os.O_CREATE, 0)
	offset := int64(block) * gib / blocks
	if block == blocks-1 {
		offset = gib - blockSize
	}
	return file, offset, err
}

// put writes a block as a pod does.
func put(path string, v, block int, value uint64, synced bool) error {
	file, offset, err := place(path, v, block, os.O_WRONLY|os.O_CREATE)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(pattern(v, block, value), offset)
	if err == nil && synced {
		err = file.Sync()
	}
	err = errors.Join(err, file.Close())
	if err != nil || !synced || kinds[v].block() {
		return err
	}
	// The file may be new, so the directory with its name must be synced, too.
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// contents reads all blocks. A block that was never written reads as zeros.
func contents(path string, v int) ([][]byte, error) {
	data := make([][]byte, blocks)
	for b := range data {
		data[b] = make([]byte, blockSize)
		file, offset, err := place(path, v, b, os.O_RDONLY)
		if errors.Is(err, fs.ErrNotExist) && !kinds[v].block() {
			continue
		}
		if err != nil {
			return nil, err
		}
		_, err = file.ReadAt(data[b], offset)
		if closing := file.Close(); err == nil {
			err = closing
		}
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
	}
	return data, nil
}
