//go:build !linux

package loopdev

import (
	"context"
	"errors"
	"fmt"
	"runtime"
)

var errNotLinux = fmt.Errorf("loop devices need Linux, and this is %s: %w", runtime.GOOS,
	errors.ErrUnsupported)

// Available reports that there are no loop devices.
func Available() error { return errNotLinux }

// Attach fails.
func Attach(context.Context, Config) (Device, error) { return Device{}, errNotLinux }

// List fails.
func List() ([]Device, error) { return nil, errNotLinux }

// Find fails.
func Find(string) ([]Device, error) { return nil, errNotLinux }

// DetachBelow fails.
func DetachBelow(context.Context, string) ([]Device, error) { return nil, errNotLinux }

// Detach fails.
func (Device) Detach(context.Context) error { return errNotLinux }

// Grow fails.
func (Device) Grow() error { return errNotLinux }

// Sync fails.
func (Device) Sync() error { return errNotLinux }

// Cut fails.
func (Device) Cut() error { return errNotLinux }

// Process returns nothing: no device goes with this process.
func Process() string { return "" }

// DetachLeft finds nothing.
func DetachLeft(context.Context) ([]Device, error) { return nil, nil }
