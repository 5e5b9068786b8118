package mount

import (
	"slices"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
)

// FuzzMountTable holds that a table of any content is read or refused, that the mounts at a path
// are those that the table has there, all of them, and that the one seen has no other on top.
func FuzzMountTable(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, path string) {
		table, err := parseTable(b)
		if err != nil {
			return
		}
		layers, there := table.At(path), 0
		for _, m := range table {
			if m.Mountpoint == path {
				there++
			}
		}
		if len(layers) != there {
			t.Fatalf("%d mounts at %q, found %d", there, path, len(layers))
		}
		var free []int // those that no other lies on
		for _, m := range layers {
			if m.Mountpoint != path {
				t.Fatalf("at(%q) has one at %q", path, m.Mountpoint)
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
		if (top == nil) != (there == 0) {
			t.Fatalf("top(%q) = %v of %d", path, top, there)
		}
		if len(free) > 0 && !slices.Contains(free, top.ID) {
			t.Fatalf("top(%q) has another mount on top", path)
		}
	})
}

// FuzzHeldStaysHeld holds that one more line in the mount table never makes a volume free that was
// held, nor a path empty that was not.
func FuzzHeldStaysHeld(f *testing.F) {
	f.Fuzz(func(t *testing.T, b, line []byte, major, minor uint32) {
		before, err := parseTable(b)
		if err != nil {
			return
		}
		after, err := parseTable(slices.Concat(b, []byte("\n"), line, []byte("\n")))
		if err != nil || len(after) < len(before) {
			return // the line tore another one apart
		}
		d := blockdev.Device{Path: "/nowhere/nvme9n1", Major: major, Minor: minor}
		if was, is := len(before.Of(d)), len(after.Of(d)); is < was {
			t.Fatalf("with %q the device has %d mounts, not %d", line, is, was)
		}
		for _, m := range before {
			if after.Top(m.Mountpoint) == nil {
				t.Fatalf("with %q nothing is mounted at %q", line, m.Mountpoint)
			}
			if before.OnlyAt(m.Mountpoint, m, d) != nil && after.OnlyAt(m.Mountpoint, m, d) == nil {
				t.Fatalf("with %q the mount at %q is the only one", line, m.Mountpoint)
			}
		}
	})
}
