//go:build !linux

package flakydisk

import (
	"errors"
	"os"
)

// Server serves disks on Linux. On this system Mount fails, so its methods are never called.
type Server struct{}

func Mount(string) (*Server, error) {
	return nil, errors.New("disks are served by FUSE on Linux only")
}

func (s *Server) Put(string, *Disk) string { return "" }
func (s *Server) Remove(string)            {}
func (s *Server) Close() error             { return nil }

func punch(*os.File, int64, int64) error { return errors.ErrUnsupported }
