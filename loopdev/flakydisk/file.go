package flakydisk

import "os"

// File is a [Store] that keeps the content in a file.
type File struct{ *os.File }

// OpenFile opens an existing file as a store.
func OpenFile(path string) (File, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	return File{f}, err
}

// Zero sets a range to zero, which then takes no space in the file.
func (f File) Zero(offset, n int64) error { return punch(f.File, offset, n) }

// Flush makes all earlier writes durable.
func (f File) Flush() error { return f.Sync() }

// Size returns the size in bytes, or 0 if the file cannot be inspected.
func (f File) Size() int64 {
	st, err := f.Stat()
	if err != nil {
		return 0
	}
	return st.Size()
}

// Resize changes the size.
func (f File) Resize(sizeBytes int64) error { return f.Truncate(sizeBytes) }
