//go:build !linux

package namespace

import "errors"

// Enter needs Linux.
func Enter() error { return errors.New("mount namespaces need Linux: run it there") }

// LeaveVolumes needs Linux.
func LeaveVolumes() error { return errors.New("mount namespaces need Linux: run it there") }
