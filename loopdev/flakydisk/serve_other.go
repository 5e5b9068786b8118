//go:build !linux

package flakydisk

import (
	"errors"
	"os"
)

// Server serves disks as files of a directory, on Linux.
type Server struct{}

// Mount returns an error.
func Mount(string) (*Server, error) {
	return nil, errors.New("disks are served by FUSE on Linux only")
}

// Put is never called, because Mount fails.
func (s *Server) Put(string, *Disk) string { return "" }

// Remove is never called, because Mount fails.
func (s *Server) Remove(string) {}

// Close is never called, because Mount fails.
func (s *Server) Close() error { return nil }

func punch(*os.File, int64, int64) error { return errors.ErrUnsupported }
