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

// Available returns an error, because there are no loop devices.
func Available() error { return errNotLinux }

// Attach returns an error.
func Attach(context.Context, Config) (Device, error) { return Device{}, errNotLinux }

// List returns an error.
func List() ([]Device, error) { return nil, errNotLinux }

// DetachBelow returns an error.
func DetachBelow(context.Context, string) ([]Device, error) { return nil, errNotLinux }

// Detach returns an error.
func (Device) Detach(context.Context) error { return errNotLinux }

// Sync returns an error.
func (Device) Sync() error { return errNotLinux }

// Cut returns an error.
func (Device) Cut() error { return errNotLinux }

// Process returns "", because there are no devices that could belong to this process.
func Process() string { return "" }

// Ended returns false.
func Ended(string) (bool, error) { return false, nil }

// DetachLeft finds nothing.
func DetachLeft(context.Context) ([]Device, error) { return nil, nil }
