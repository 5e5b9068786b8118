//go:build !linux

package guest

import (
	"context"
	"errors"
	"os"
)

var errNotLinux = errors.New("volumes are used on Linux: run the agent there")

func openDirect(string) (*os.File, error)   { return nil, errNotLinux }
func newBuffer(int) ([]byte, func(), error) { return nil, nil, errNotLinux }
func deviceNumber(*os.File) (string, error) { return "", errNotLinux }

// FilesystemBytes needs Linux.
func (*Agent) FilesystemBytes(context.Context, string) (int64, error) { return 0, errNotLinux }

// HasMountSetattr returns false.
func HasMountSetattr() bool { return false }

// KernelRelease needs Linux.
func KernelRelease() (string, error) { return "", errNotLinux }

type directory struct {
	path string
	lock *os.File
}

func newDirectory() (*directory, error) { return nil, errNotLinux }

func (*directory) remove() error { return errNotLinux }

// Sweep does nothing, because there are no agents on this system.
func Sweep() {}
