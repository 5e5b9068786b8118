//go:build linux

package model

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// foreignDisk is a disk of an administrator. The driver must never change it.
type foreignDisk struct {
	name, id, node string // node is the instance that has the disk, or ""
	of             int    // the volume that has the same serial, or 0
	gib            int64
	path           string // the file with its bytes
	state          proof.FileState
}

// makeForeign makes three foreign disks: a detached one with a filesystem and a name like the
// driver's own, one with a filesystem at node a, and one with random bytes at node b.
func (env *Environment) makeForeign(ctx context.Context) error {
	for _, d := range []*foreignDisk{
		{name: "csi-0123456789abcdef", gib: 1},
		{name: "database", node: "a", gib: 1},
		{name: "csi-random", node: "b", gib: 1},
	} {
		if err := env.makeForeignDisk(ctx, d); err != nil {
			return fmt.Errorf("make the foreign disk %s: %w", d.name, err)
		}
	}
	return nil
}

// makeNamesake attaches a foreign disk whose name begins like the name of the volume's disk, so
// that both devices have the same serial. One kind has a filesystem, like a backup. The other kind
// is blank, like a disk for restored data. It is larger than the volume's disk: of the same size,
// the driver could not distinguish it from the volume's blank disk if only the foreign one is
// there.
func (h *History) makeNamesake(ctx context.Context, s Step) (string, error) {
	if h.world.rackDown || h.world.down[s.node] || len(h.world.faults) > 0 ||
		h.serials[s.vol] == "" || h.namesake(s.vol) != nil {
		return impossible, nil
	}
	d := &foreignDisk{name: h.serials[s.vol] + "-backup", node: s.node, of: s.vol, gib: 1}
	if s.vol%2 == 0 {
		d.name, d.gib = h.serials[s.vol]+"-restore", 2
	}
	h.world.namesakes[at(s.vol, s.node)] = true
	return "", h.env.makeForeignDisk(ctx, d)
}

func (h *History) takeNamesake(ctx context.Context, s Step) (string, error) {
	d := h.namesake(s.vol)
	if d == nil || h.world.rackDown || len(h.world.faults) > 0 {
		return impossible, nil
	}
	delete(h.world.namesakes, at(s.vol, d.node))
	return "", h.env.takeForeign(ctx, d)
}

func (h *History) namesake(v int) *foreignDisk {
	for _, d := range h.env.foreign {
		if v != 0 && d.of == v {
			return d
		}
	}
	return nil
}

// takeForeign deletes a foreign disk, and returns an error if it was changed.
func (env *Environment) takeForeign(ctx context.Context, d *foreignDisk) error {
	if err := d.unchanged(true); err != nil {
		return err
	}
	env.foreign = slices.DeleteFunc(env.foreign, func(f *foreignDisk) bool { return f == d })
	if err := env.detachDisk(ctx, d.id, d.node); err != nil {
		return err
	}
	return env.Rack.DeleteDisk(ctx, d.id)
}

// makeForeignDisk makes a disk with random bytes or with a filesystem, or a blank disk.
func (env *Environment) makeForeignDisk(ctx context.Context, d *foreignDisk) error {
	disk, err := env.Rack.CreateDisk(ctx, env.Rack.Project, d.name, d.gib*gib)
	if err != nil {
		return err
	}
	d.id, d.path = disk.Id, proof.DiskFile(env.Rack, disk.Id)
	switch {
	case d.name == "csi-random":
		err = os.WriteFile(d.path, pattern(1, 1, 1), 0o600)
		if err == nil {
			err = os.Truncate(d.path, gib)
		}
	case !strings.HasSuffix(d.name, "-restore"):
		err = exec.CommandContext(ctx, "mke2fs", "-q", "-t", "ext4", d.path).Run()
	}
	if err == nil && d.node != "" {
		err = env.Rack.AttachDisk(ctx, d.id, env.Rack.Instance(d.node).ID)
	}
	if err != nil {
		return err
	}
	d.state, err = proof.ReadFileState(d.path)
	env.foreign = append(env.foreign, d)
	return err
}

// unchanged returns an error if a disk was written to. If bytes is set, it compares the bytes, too.
func (d *foreignDisk) unchanged(bytes bool) error {
	_, err := d.state.Compare("the foreign disk "+d.name, d.path, bytes)
	return err
}

func (env *Environment) detachDisk(ctx context.Context, disk, node string) error {
	return env.Rack.DetachDisk(ctx, disk, env.Rack.Instance(node).ID)
}
