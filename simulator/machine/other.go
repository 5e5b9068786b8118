//go:build !linux

package machine

import (
	"context"
	"errors"
)

var errLinux = errors.New("virtual machines need Linux")

// Host runs no machines here.
type Host struct {
	Type            string
	EndsWithProcess bool
}

// Machine is none.
type Machine struct{ ID string }

// Open returns an error.
func Open(context.Context, string) (*Host, error) { return nil, errLinux }

// Key returns nothing.
func (*Host) Key() string { return "" }

// Start returns an error.
func (*Host) Start(context.Context, string, Guest, []Disk) (*Machine, error) {
	return nil, errLinux
}

// Find finds none.
func Find(context.Context, string, string) (*Machine, error) { return nil, nil }

// Console returns an error.
func Console(string, int64, int64) ([]byte, int64, error) { return nil, 0, errLinux }

// Plug returns an error, like the other changes of a machine.
func (*Machine) Plug(context.Context, Disk) error { return errLinux }

// Unplug returns an error.
func (*Machine) Unplug(context.Context, Disk) error { return errLinux }

// Keep returns an error.
func (*Machine) Keep(context.Context, ...string) error { return errLinux }

// Pause returns an error.
func (*Machine) Pause(context.Context) error { return errLinux }

// Resume returns an error.
func (*Machine) Resume(context.Context) error { return errLinux }

// Reset returns an error.
func (*Machine) Reset(context.Context) error { return errLinux }

// Stop returns an error.
func (*Machine) Stop(context.Context) error { return errLinux }

// Release returns an error.
func (*Machine) Release() error { return errLinux }

// Ended never happens.
func (*Machine) Ended() <-chan struct{} { return nil }

// PoweredOff never happens.
func (*Machine) PoweredOff() bool { return false }

// SSHPort returns 0.
func (*Machine) SSHPort() int { return 0 }
