//go:build !linux

package loopdev

import (
	"context"
	"errors"
	"fmt"
	"runtime"
)

// Other systems have no loop devices, so Ended and DetachLeft find nothing and succeed.

var errNotLinux = fmt.Errorf("loop devices need Linux, and this is %s: %w", runtime.GOOS,
	errors.ErrUnsupported)

func Available() error                                      { return errNotLinux }
func Attach(context.Context, Config) (Device, error)        { return Device{}, errNotLinux }
func List() ([]Device, error)                               { return nil, errNotLinux }
func DetachBelow(context.Context, string) ([]Device, error) { return nil, errNotLinux }
func (Device) Detach(context.Context) error                 { return errNotLinux }
func (Device) Sync() error                                  { return errNotLinux }
func (Device) Cut() error                                   { return errNotLinux }
func Process() string                                       { return "" }
func Ended(string) (bool, error)                            { return false, nil }
func DetachLeft(context.Context) ([]Device, error)          { return nil, nil }
