//go:build !linux

package guest

import (
	"context"
	"errors"
	"os"
)

var errNotLinux = errors.New("volumes are used on Linux: run the agent there")

type directory struct {
	path string
	lock *os.File
}

func newDirectory() (*directory, error)  { return nil, errNotLinux }
func (*directory) remove() error         { return errNotLinux }
func newBuffer(int) ([]byte, func())     { panic(errNotLinux) }
func openDirect(Place) (*os.File, error) { return nil, errNotLinux }

func (*Agent) FilesystemBytes(context.Context, string) (int64, error) { return 0, errNotLinux }
func HasMountSetattr() bool                                           { return false }
func KernelRelease() (string, error)                                  { return "", errNotLinux }
func Sweep()                                                          {}
