//go:build linux

package mount

import (
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
)

// FuzzMountTable checks that parseTable does not panic, that At returns all mounts of a path and no
// others, and that no other mount covers the one that Top returns.
func FuzzMountTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		table, err := parseTable(b)
		if err != nil {
			return
		}
		layers, count := table.At(path), 0
		for _, m := range table {
			if m.Mountpoint == path {
				count++
			}
		}
		if len(layers) != count {
			t.Fatalf("%d mounts at %q, found %d", count, path, len(layers))
		}
		var free []int // those that no other mount covers
		for _, m := range layers {
			if m.Mountpoint != path {
				t.Fatalf("At(%q) has a mount at %q", path, m.Mountpoint)
			}
			covered := false
			for _, other := range layers {
				covered = covered || other.Parent == m.ID && other.ID != m.ID
			}
			if !covered {
				free = append(free, m.ID)
			}
		}
		top := table.Top(path)
		if (top == nil) != (count == 0) {
			t.Fatalf("Top(%q) = %v of %d mounts", path, top, count)
		}
		if len(free) > 0 && !slices.Contains(free, top.ID) {
			t.Fatalf("another mount covers Top(%q)", path)
		}
	})
}

// FuzzAddedMountHidesNone checks that one more line in the mount table hides no mount of a device
// and none at a path.
func FuzzAddedMountHidesNone(f *testing.F) {
	f.Fuzz(func(t *testing.T, b, line []byte, major, minor uint32) {
		before, err := parseTable(b)
		if err != nil {
			return
		}
		after, err := parseTable(slices.Concat(b, []byte("\n"), line, []byte("\n")))
		if err != nil || len(after) < len(before) {
			return // the line split another one
		}
		d := blockdev.Device{Path: "/nowhere/nvme9n1", Major: major, Minor: minor}
		if was, is := len(before.Of(d)), len(after.Of(d)); is < was {
			t.Fatalf("with %q the device has %d mounts, not %d", line, is, was)
		}
		for _, m := range before {
			if after.Top(m.Mountpoint) == nil {
				t.Fatalf("with %q nothing is mounted at %q", line, m.Mountpoint)
			}
			if before.OnlyAt(m.Mountpoint, m) != nil && after.OnlyAt(m.Mountpoint, m) == nil {
				t.Fatalf("with %q the mount at %q is the only one", line, m.Mountpoint)
			}
		}
	})
}
