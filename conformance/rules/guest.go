package rules

import (
	"os"
	"path/filepath"
)

// Dir is a directory of this machine.
type Dir string

// ReadFile reads a file in the directory.
func (d Dir) ReadFile(name string) ([]byte, error) {
	return os.ReadFile(filepath.Join(string(d), name))
}

// ReadDir lists the names in one of its directories.
func (d Dir) ReadDir(name string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(string(d), name))
	names := make([]string, len(entries))
	for i, entry := range entries {
		names[i] = entry.Name()
	}
	return names, err
}
