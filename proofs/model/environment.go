//go:build linux

package model

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	gib = harness.GiB
	// patience limits every wait. A wait that succeeds is usually much shorter.
	patience = time.Minute
)

// Environment has a rack, two controllers, and a node driver in each of the rack's three instances.
// The rack has an administrator's disks, too. Histories share an environment until one fails.
type Environment struct {
	*proof.Environment
	Controllers  []*harness.Plugin
	Nodes        map[string]*harness.Plugin
	foreign      []*foreignDisk
	bystandersAt string
	stopped      map[string]bool
}

// NewEnvironment starts a rack and its drivers. The environment is never nil, and must be closed.
func NewEnvironment(ctx context.Context, run *harness.Run, p *proof.Proof, bystandersAt string,
	member proof.Member, node harness.PluginOptions) (env *Environment, err error) {
	started, err := p.StartEnvironment(ctx, run, harness.RackOptions{Instances: nodes}, bystandersAt,
		member)
	env = &Environment{Environment: started, bystandersAt: bystandersAt, stopped: map[string]bool{}}
	defer harness.Catch(&err)
	harness.Must(err)
	for _, d := range []*foreignDisk{{name: "csi-0123456789abcdef", gib: 1},
		{name: "database", node: "a", gib: 1}, {name: "csi-random", node: "b", gib: 1}} {
		env.makeForeign(ctx, d)
	}
	for range 2 {
		env.Controllers = append(env.Controllers, harness.Got(env.StartPlugin(ctx,
			harness.PluginOptions{Mode: harness.ModeController})))
	}
	env.Nodes = harness.Got(env.StartNodes(ctx, node))
	return env, nil
}

func (env *Environment) staging(v int, n string) string {
	return env.Nodes[n].Kubelet(fmt.Sprintf("v%d", v), "globalmount")
}

func (env *Environment) target(v int, n string, p int) string {
	return env.Nodes[n].Kubelet(fmt.Sprintf("pod-%d", p), fmt.Sprintf("v%d", v))
}

// paths returns a volume's staging path on a node, and its target path for each pod.
func (env *Environment) paths(v int, n string) []string {
	paths := []string{env.staging(v, n)}
	for _, p := range pods {
		paths = append(paths, env.target(v, n, p))
	}
	return paths
}

func (env *Environment) awaitIdle(ctx context.Context, rackDown bool) {
	idle := func(who, handler string, profile []byte) {
		if i := bytes.Index(profile, []byte(handler)); i >= 0 {
			fail("%s: a request is in progress: %.200s", who, profile[i:])
		}
	}
	harness.Must(harness.Await(ctx, patience, func() (err error) {
		defer harness.Catch(&err)
		if !rackDown {
			idle("the rack", "simulator.(*Server).handle+", harness.Got(env.Rack.Admin.Goroutines(ctx)))
		}
		for _, p := range env.Plugins {
			if !env.stopped[p.Instance.Name] {
				idle(p.LogFile, "_Handler+", harness.Got(p.GoroutineProfile(ctx)))
			}
		}
		return nil
	}))
}

func (env *Environment) stopNode(ctx context.Context, n string) {
	if n == env.bystandersAt {
		harness.Must(env.Bystanders.Suspend())
	}
	harness.Must(env.Rack.StopInstance(ctx, env.Rack.Instance(n).ID))
	env.Nodes[n].Kill()
	env.stopped[n] = true
	harness.Must(proof.EndMountsBelow(env.Nodes[n].Kubelet()))
}

func (env *Environment) startNode(ctx context.Context, n string) {
	harness.Must(env.Rack.StartInstance(ctx, env.Rack.Instance(n).ID))
	env.stopped[n] = false
	env.resumeBystanders(ctx)
	harness.Must(env.Nodes[n].Start(ctx))
}

func (env *Environment) resumeBystanders(ctx context.Context) {
	if !env.stopped[env.bystandersAt] {
		harness.Must(env.Bystanders.Resume(ctx))
	}
}

// recordFirst sets whether the rack records an attach before the instance has the device.
func (env *Environment) recordFirst(ctx context.Context, first bool) {
	mode := adminapi.HotplugFull
	if first {
		mode = mode.With(adminapi.RecordFirst)
	}
	harness.Must(env.Rack.Admin.Switch(ctx, map[string]any{"hotplug": mode}))
}

func name(kind string, number any) string { return fmt.Sprint("model-", kind, number) }

// joint is an observed state of the rack, the kernel and the guests.
type joint struct {
	facts facts
	// disks are the rack's disks by ID. It is nil while the API does not answer.
	disks   map[string]adminapi.Disk
	serials map[int]string // the serials of the volumes' devices, shared with the model
	// devices contains the devices that each node's guest sees. mounts contains the mounts below
	// the rack's directory, by path.
	devices map[string][]harness.GuestDevice
	mounts  map[string][]*mountinfo.Info
	// shown has the key "v1 a" if the guest of node "a" shows a foreign disk with v1's serial.
	shown map[string]bool
	// loops maps a file to the names of its loop devices.
	loops map[string][]string
}

// observe reads the whole state. While the rack is down, it derives the rack's state from the last
// observed facts and the answers since then.
func (h *History) observe(ctx context.Context, calls []ended) *joint {
	j := &joint{facts: facts{}, serials: h.world.serials, shown: map[string]bool{}}
	if h.world.rackDown {
		j.facts = h.world.remembered(calls)
	} else {
		h.env.observeRack(ctx, j)
	}
	h.env.observeNodes(j)
	return j
}

func (w *world) remembered(calls []ended) facts {
	f := maps.Clone(w.seen)
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

func (env *Environment) observeRack(ctx context.Context, j *joint) {
	state := harness.Got(env.Rack.Admin.State(ctx))
	j.disks = map[string]adminapi.Disk{}
	for _, d := range state.Disks {
		j.disks[d.ID] = d
		v := numberIn(d.Description, "v")
		if v == 0 {
			if !env.Bystanders.Has(d.ID) && !slices.ContainsFunc(env.foreign,
				func(f *foreignDisk) bool { return f.id == d.ID }) {
				fail("the disk %s (%s) belongs to no volume", d.Name, d.Description)
			}
			continue
		}
		if j.facts[diskField(v)] != "" {
			fail("v%d has two disks, %s and %s", v, j.facts[diskField(v)], d.ID)
		}
		j.serials[v] = d.Name
		j.facts[diskField(v)], j.facts[holderField(v)] = d.ID, env.nodeOf(d.State.Instance)
		if d.SnapshotID != nil {
			j.facts[sourceField(v)] = *d.SnapshotID
		}
	}
	for _, sn := range state.Snapshots {
		n := numberIn(sn.Description, "s")
		if n == 0 || j.facts[snapField(n)] != "" {
			fail("the snapshot %s (%s) is unknown or one of two", sn.ID, sn.Description)
		}
		j.facts[snapField(n)], j.facts[snapSourceField(n)] = sn.ID, sn.DiskID
	}
}

// numberIn returns the number of the volume ("v") or snapshot ("s") with the description, or 0.
func numberIn(description, kind string) int {
	text, is := strings.CutPrefix(harness.NameIn(description), name(kind, ""))
	number, err := strconv.Atoi(text)
	if !is || err != nil {
		return 0
	}
	return number
}

func (env *Environment) nodeOf(instance string) string {
	for _, n := range nodes {
		if env.Rack.Instance(n).ID == instance {
			return n
		}
	}
	return instance
}

func (env *Environment) observeNodes(j *joint) {
	j.devices, j.mounts = map[string][]harness.GuestDevice{}, map[string][]*mountinfo.Info{}
	for _, n := range nodes {
		j.devices[n] = harness.Got(env.Rack.Instance(n).Devices())
	}
	for _, info := range harness.Got(mountinfo.GetMounts(mountinfo.PrefixFilter(env.Rack.Dir))) {
		j.mounts[info.Mountpoint] = append(j.mounts[info.Mountpoint], info)
	}
	for v, n := range everywhere {
		if len(j.mounts[env.staging(v, n)]) > 0 {
			j.facts[stagedField(v, n)] = yes
		}
		for _, p := range pods {
			if len(j.mounts[env.target(v, n, p)]) > 0 {
				j.facts[publishedField(v, n, p)] = yes
			}
		}
	}
	j.loops = livingLoops(filepath.Join(env.Rack.Dir, "sim"))
	j.leaveNamesakes(env.foreign)
}

// leaveNamesakes removes foreign disks with a volume's serial from j.devices, and sets j.shown.
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

// numberOf returns the "major:minor" of a loop device, as harness.GuestDevice has it. If the device
// is gone, it returns "".
func numberOf(loop string) string {
	text, err := os.ReadFile(filepath.Join("/sys/block", loop, "dev"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// livingLoops returns the loop devices of the files below a directory. It ignores a device that was
// cut off from its file and only exists until its last user closes it.
func livingLoops(dir string) map[string][]string {
	loops := map[string][]string{}
	for _, file := range harness.Got(filepath.Glob("/sys/block/loop*/loop/backing_file")) {
		backing, err1 := os.ReadFile(file)
		offset, err2 := os.ReadFile(filepath.Join(filepath.Dir(file), "offset"))
		path := strings.TrimSpace(string(backing))
		if err1 != nil || err2 != nil || !strings.HasPrefix(path, dir+"/") ||
			strings.TrimSpace(string(offset)) != "0" {
			continue
		}
		loops[path] = append(loops[path], strings.Split(file, "/")[3])
	}
	return loops
}

func (j *joint) device(v int, n string) (harness.GuestDevice, bool) {
	for _, d := range j.devices[n] {
		if d.Serial != "" && d.Serial == j.serials[v] {
			return d, true
		}
	}
	return harness.GuestDevice{}, false
}

// foreignDisk is a disk of an administrator. The driver must never change it.
type foreignDisk struct {
	name, id, node string // node is the instance that has the disk, or ""
	of             int    // the volume that has the same serial, or 0
	gib            int64
	path           string // the file with its bytes
	state          proof.FileState
}

// makeNamesake attaches a foreign disk whose name begins with the name of the volume's disk, so
// that both devices have the same serial. For an odd volume the foreign disk has a filesystem, like
// a backup. For an even volume it is blank, like a disk for restored data. If the guest then shows
// only one of two blank disks, the driver can identify it only by its size, so the foreign disk is
// larger.
func (h *History) makeNamesake(ctx context.Context, s Step) string {
	if h.world.rackDown || h.world.down[s.node] || len(h.world.faults) > 0 ||
		h.world.serials[s.vol] == "" || h.env.namesake(s.vol) != nil {
		return impossible
	}
	d := &foreignDisk{name: h.world.serials[s.vol] + "-backup", node: s.node, of: s.vol, gib: 1}
	if s.vol%2 == 0 {
		d.name, d.gib = h.world.serials[s.vol]+"-restore", 2
	}
	h.world.place(s).namesake = true
	h.env.makeForeign(ctx, d)
	return ""
}

func (h *History) takeNamesake(ctx context.Context, s Step) string {
	d := h.env.namesake(s.vol)
	if d == nil || h.world.rackDown || len(h.world.faults) > 0 {
		return impossible
	}
	h.world.at(s.vol, d.node).namesake = false
	d.unchanged(true)
	h.env.foreign = slices.DeleteFunc(h.env.foreign, func(f *foreignDisk) bool { return f == d })
	harness.Must(h.env.Rack.DetachDisk(ctx, d.id, h.env.Rack.Instance(d.node).ID))
	harness.Must(h.env.Rack.DeleteDisk(ctx, d.id))
	return ""
}

func (env *Environment) namesake(v int) *foreignDisk {
	for _, d := range env.foreign {
		if v != 0 && d.of == v {
			return d
		}
	}
	return nil
}

func (env *Environment) makeForeign(ctx context.Context, d *foreignDisk) {
	disk := harness.Got(env.Rack.CreateDisk(ctx, env.Rack.Project, d.name, d.gib*gib))
	d.id, d.path = disk.Id, proof.DiskFile(env.Rack, disk.Id)
	switch {
	case d.name == "csi-random":
		harness.Must(os.WriteFile(d.path, pattern(1, 1, 1), 0o600))
		harness.Must(os.Truncate(d.path, gib))
	case !strings.HasSuffix(d.name, "-restore"):
		harness.Must(exec.CommandContext(ctx, "mke2fs", "-q", "-t", "ext4", d.path).Run())
	}
	if d.node != "" {
		harness.Must(env.Rack.AttachDisk(ctx, d.id, env.Rack.Instance(d.node).ID))
	}
	d.state = harness.Got(proof.ReadFileState(d.path))
	env.foreign = append(env.foreign, d)
}

// unchanged fails if somebody has written to the disk. If bytes is set, it also compares all bytes.
func (d *foreignDisk) unchanged(bytes bool) {
	harness.Got(d.state.Compare("the foreign disk "+d.name, d.path, bytes))
}
