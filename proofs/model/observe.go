//go:build linux

package model

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// joint is the state of the rack, the kernel and the guests at one moment.
type joint struct {
	facts facts
	// disks are the rack's disks by ID. It is nil while the API does not answer.
	disks map[string]adminapi.Disk
	// serials contains the serial of each volume's device, which is the name of its disk.
	serials map[int]string
	// devices contains the devices that each node's guest sees. mounts contains the mounts below
	// the rack's directory, by path.
	devices map[string][]harness.GuestDevice
	mounts  map[string][]*mountinfo.Info
	// shown contains, by "v1 a", the volumes for which the guest shows a namesake's device.
	shown map[string]bool
	// loops contains the loop devices of each file.
	loops map[string][]string
}

// observe reads the whole state. While the rack is down, observe derives the rack's state from the
// last known one and the later answers.
func (h *History) observe(ctx context.Context, calls []ended) (*joint, error) {
	j := &joint{facts: facts{}, serials: h.serials, shown: map[string]bool{}}
	if h.world.rackDown {
		j.facts = h.remembered(calls)
	} else if err := h.env.observeRack(ctx, j); err != nil {
		return nil, fmt.Errorf("observe the rack: %w", err)
	}
	if err := h.env.observeNodes(j); err != nil {
		return nil, fmt.Errorf("observe the nodes: %w", err)
	}
	return j, nil
}

// remembered returns the last known facts of the rack, with the effects of the calls.
func (h *History) remembered(calls []ended) facts {
	f := maps.Clone(h.world.seen)
	for _, c := range calls {
		if c.how != succeeded || c.op.onNode() {
			continue
		}
		for _, e := range c.effects {
			if f[e.field] = e.value; e.value == anyID {
				f[e.field] = c.id
			}
		}
	}
	maps.DeleteFunc(f, func(f field, _ string) bool {
		return strings.Contains(string(f), " staged ") || strings.Contains(string(f), " published ")
	})
	return f
}

func (env *Environment) observeRack(ctx context.Context, j *joint) error {
	state, err := env.Rack.Admin.State(ctx)
	if err != nil {
		return err
	}
	j.disks = map[string]adminapi.Disk{}
	for _, d := range state.Disks {
		j.disks[d.ID] = d
		v := slices.Index(volumeNames, harness.NameIn(d.Description))
		switch {
		case v < 0 && env.Bystanders.Has(d.ID):
			continue
		case v < 0 && !slices.ContainsFunc(env.foreign, func(f *foreignDisk) bool {
			return f.id == d.ID
		}):
			return fmt.Errorf("the disk %s (%s) belongs to no volume", d.Name, d.Description)
		case v < 0:
			continue
		case j.facts[diskField(v)] != "":
			return fmt.Errorf("v%d has two disks, %s and %s", v, j.facts[diskField(v)], d.ID)
		}
		j.serials[v] = d.Name
		j.facts[diskField(v)], j.facts[holderField(v)] = d.ID, env.nodeOf(d.State.Instance)
		if d.SnapshotID != nil {
			j.facts[sourceField(v)] = *d.SnapshotID
		}
	}
	for _, sn := range state.Snapshots {
		n := slices.Index(snapshotNames, harness.NameIn(sn.Description))
		if n < 0 || j.facts[snapField(n)] != "" {
			return fmt.Errorf("the snapshot %s (%s) is unknown or one of two", sn.ID, sn.Description)
		}
		j.facts[snapField(n)], j.facts[snapSourceField(n)] = sn.ID, sn.DiskID
	}
	return nil
}

// volumeNames and snapshotNames contain the orchestrator's names by number. Number 0 is not
// used.
var (
	volumeNames   = namesOf("v", len(kinds))
	snapshotNames = namesOf("s", len(snapOf))
)

func namesOf(kind string, n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = name(kind, i)
	}
	return names
}

// nodeOf returns the node that has the instance with that ID.
func (env *Environment) nodeOf(instance string) string {
	for _, n := range nodes {
		if env.Rack.Instance(n).ID == instance {
			return n
		}
	}
	return instance
}

func (env *Environment) observeNodes(j *joint) error {
	j.devices, j.mounts = map[string][]harness.GuestDevice{}, map[string][]*mountinfo.Info{}
	for _, n := range nodes {
		var err error
		if j.devices[n], err = env.Rack.Instance(n).Devices(); err != nil {
			return err
		}
	}
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(env.Rack.Dir))
	if err != nil {
		return err
	}
	for _, info := range infos {
		j.mounts[info.Mountpoint] = append(j.mounts[info.Mountpoint], info)
	}
	for v := range kinds {
		for _, n := range nodes {
			if v > 0 && len(j.mounts[env.staging(v, n)]) > 0 {
				j.facts[stagedField(v, n)] = yes
			}
			for _, p := range pods {
				if v > 0 && len(j.mounts[env.target(v, n, p)]) > 0 {
					j.facts[publishedField(v, n, p)] = yes
				}
			}
		}
	}
	j.loops, err = livingLoops(filepath.Join(env.Rack.Dir, "sim"))
	j.leaveNamesakes(env.foreign)
	return err
}

// leaveNamesakes removes the namesakes' devices from devices, and records them in shown.
func (j *joint) leaveNamesakes(foreign []*foreignDisk) {
	for _, d := range foreign {
		if d.of == 0 {
			continue
		}
		for n := range j.devices {
			j.devices[n] = slices.DeleteFunc(j.devices[n], func(g harness.GuestDevice) bool {
				its := slices.ContainsFunc(j.loops[d.path], func(loop string) bool {
					return g.Number == numberOf(loop)
				})
				j.shown[at(d.of, n)] = j.shown[at(d.of, n)] || its
				return its
			})
		}
	}
}

// numberOf returns the number of a loop device in the form of harness.GuestDevice, or "" if the
// device is gone.
func numberOf(loop string) string {
	text, err := os.ReadFile(filepath.Join("/sys/block", loop, "dev"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// livingLoops returns the loop devices of the files below a directory. It leaves out a device that
// is cut off from its file, which exists until its last user closes it.
func livingLoops(dir string) (map[string][]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	loops := map[string][]string{}
	for _, file := range files {
		backing, err1 := os.ReadFile(file)
		offset, err2 := os.ReadFile(filepath.Join(filepath.Dir(file), "offset"))
		path := strings.TrimSpace(string(backing))
		if err1 != nil || err2 != nil || !strings.HasPrefix(path, dir+"/") ||
			strings.TrimSpace(string(offset)) != "0" {
			continue
		}
		loops[path] = append(loops[path], strings.Split(file, "/")[3])
	}
	return loops, nil
}

// device returns the device with the volume's serial in the node's guest.
func (j *joint) device(v int, n string) (harness.GuestDevice, bool) {
	i := slices.IndexFunc(j.devices[n], func(d harness.GuestDevice) bool {
		return d.Serial != "" && d.Serial == j.serials[v]
	})
	if i < 0 {
		return harness.GuestDevice{}, false
	}
	return j.devices[n][i], true
}
