//go:build !linux

package dataplane

import (
	"errors"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Without Linux a plane has no devices, so it calls few of these functions.

func checkNodes(string) (uint64, error)     { return 0, errors.ErrUnsupported }
func removeMount(string) error              { return errors.ErrUnsupported }
func deviceOf(string) (uint64, error)       { return 0, errors.ErrUnsupported }
func makeNode(string, loopdev.Device) error { return errors.ErrUnsupported }
func isNodeOf(string, loopdev.Device) bool  { return false }
func backs(loopdev.Device, string) bool     { return false }
func mountsIn(string) ([]string, error)     { return nil, nil }
func hurry() (end func())                   { return func() {} }
func shareBlocks(_, _ *os.File) bool        { return false }

func nextData(f *os.File, offset int64) (start, end int64, err error) {
	return nextNonZero(f, offset)
}
