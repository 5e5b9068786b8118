//go:build !linux

package namespace

import (
	"errors"
	"syscall"
)

func attr() *syscall.SysProcAttr { return nil }

// LeaveVolumes needs Linux.
func LeaveVolumes() error { return errors.New("mount namespaces need Linux: run it there") }
