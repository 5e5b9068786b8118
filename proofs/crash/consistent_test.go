//go:build linux

package crash_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// consistent returns an error unless the rack's records, its files, the kernel's loop devices
// and the guest views agree. No operation may be in progress.
func (env *environment) consistent(ctx context.Context) error {
	state, err := env.Rack.Admin.State(ctx)
	if err != nil {
		return err
	}
	sim := filepath.Join(env.Rack.Dir, "sim")
	var diskFiles, snapshotFiles, devices, seen []string
	var storage int64
	running := map[string]bool{}
	for _, i := range state.Instances {
		running[i.ID] = i.RunState == "running"
	}
	for _, d := range state.Disks {
		diskFiles = append(diskFiles, d.ID+".img")
		storage += d.Size
		switch {
		case d.State.State != "attached" && d.State.State != "detached":
			return fmt.Errorf("disk %s (%s) stays %s", d.Name, d.ID, d.State.State)
		case running[d.State.Instance]:
			devices = append(devices, d.Name+" on "+filepath.Join(sim, "disks", d.ID+".img"))
			seen = append(seen, d.State.Instance+" sees "+d.Name)
		}
	}
	for _, sn := range state.Snapshots {
		snapshotFiles = append(snapshotFiles, sn.ID+".img")
		storage += sn.Size
		if sn.State != "ready" {
			return fmt.Errorf("snapshot %s stays %s", sn.ID, sn.State)
		}
	}
	if storage != state.StorageBytes {
		return fmt.Errorf("the rack charges %d bytes for disks and snapshots of %d bytes",
			state.StorageBytes, storage)
	}
	var loops []string
	for _, l := range state.LoopDevices {
		loops = append(loops, l.Serial+" on "+l.BackingFile)
	}
	views, err := env.guestViews()
	if err != nil {
		return err
	}
	for _, c := range []struct {
		what      string
		want, got []string
	}{
		{"files of disks", diskFiles, namesIn(filepath.Join(sim, "disks"))},
		{"files of snapshots", snapshotFiles, namesIn(filepath.Join(sim, "snapshots"))},
		{"loop devices", devices, loops},
		{"disks that guests see", seen, views},
	} {
		slices.Sort(c.want)
		slices.Sort(c.got)
		if !slices.Equal(c.want, c.got) {
			return fmt.Errorf("%s: the records say %q, there are %q", c.what, c.want, c.got)
		}
	}
	return nil
}

// guestViews lists the devices in the guest views, each with its instance.
func (env *environment) guestViews() ([]string, error) {
	var views []string
	for _, i := range env.Rack.Instances {
		devices, err := i.Devices()
		if err != nil {
			return nil, err
		}
		var blocks []string
		for _, d := range devices {
			blocks, views = append(blocks, d.Name), append(views, i.ID+" sees "+d.Serial)
		}
		if nodes := namesIn(filepath.Join(i.Guest, "dev")); !slices.Equal(blocks, nodes) {
			return nil, fmt.Errorf("instance %s has the nodes %q for the devices %q", i.ID, nodes, blocks)
		}
		for _, aside := range []string{"aside", "hidden"} {
			if left := namesIn(filepath.Join(i.Guest, aside)); len(left) > 0 {
				return nil, fmt.Errorf("instance %s has %q in %s", i.ID, left, aside)
			}
		}
	}
	return views, nil
}

// namesIn lists a directory. A missing directory is empty.
func namesIn(dir string) []string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}
