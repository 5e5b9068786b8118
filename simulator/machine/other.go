//go:build !linux

package machine

import (
	"context"
	"errors"
)

// errLinux is the error of functions that start or change virtual machines, which need Linux.
var errLinux = errors.New("virtual machines need Linux")

type Host struct {
	Type            string
	EndsWithProcess bool
}

type Machine struct{ ID string }

func Open(context.Context, string) (*Host, error)            { return nil, errLinux }
func Find(context.Context, string, string) (*Machine, error) { return nil, nil }
func Console(string, int64, int64) ([]byte, int64, error)    { return nil, 0, errLinux }
func (*Host) Key() string                                    { return "" }
func (*Machine) Plug(context.Context, Disk) error            { return errLinux }
func (*Machine) Unplug(context.Context, Disk) error          { return errLinux }
func (*Machine) Keep(context.Context, ...string) error       { return errLinux }
func (*Machine) Pause(context.Context) error                 { return errLinux }
func (*Machine) Resume(context.Context) error                { return errLinux }
func (*Machine) Reset(context.Context) error                 { return errLinux }
func (*Machine) Stop(context.Context) error                  { return errLinux }
func (*Machine) Release() error                              { return errLinux }
func (*Machine) Ended() <-chan struct{}                      { return nil }
func (*Machine) PoweredOff() bool                            { return false }
func (*Machine) SSHPort() int                                { return 0 }
func (*Host) Start(context.Context, string, Guest, []Disk) (*Machine, error) {
	return nil, errLinux
}
