//go:build linux

package model

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// foreignDisk is a disk that an administrator made by hand. The driver must never change it.
type foreignDisk struct {
	name, id, node string // node is the instance that has the disk, or ""
	of             int    // the volume whose serial it has, or 0
	gib            int64
	path           string // the file with its bytes
	sum            [sha256.Size]byte
	modified       time.Time
}

// makeForeign makes disks with content beside the driver's disks: a filesystem that is not
// attached, under a name like the driver's own; another filesystem that node a uses; and
// random bytes at node b.
func (env *environment) makeForeign(ctx context.Context) error {
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

// makeNamesake attaches a disk whose name begins like the volume's, so that its device has the
// same serial. One kind has a filesystem, like a backup. The other kind is blank, like a disk
// to which data will be restored, and is larger than the volume's disk: a blank disk of the
// same size could not be distinguished from the volume's own new disk if that disk is missing.
func (h *history) makeNamesake(ctx context.Context, s step) (string, error) {
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

func (h *history) takeNamesake(ctx context.Context, s step) (string, error) {
	d := h.namesake(s.vol)
	if d == nil || h.world.rackDown || len(h.world.faults) > 0 {
		return impossible, nil
	}
	delete(h.world.namesakes, at(s.vol, d.node))
	return "", h.env.takeForeign(ctx, d)
}

func (h *history) namesake(v int) *foreignDisk {
	for _, d := range h.env.foreign {
		if v != 0 && d.of == v {
			return d
		}
	}
	return nil
}

// takeForeign returns an error unless a foreign disk is unchanged, and removes the disk.
func (env *environment) takeForeign(ctx context.Context, d *foreignDisk) error {
	if err := d.untouched(true); err != nil {
		return err
	}
	env.foreign = slices.DeleteFunc(env.foreign, func(f *foreignDisk) bool { return f == d })
	if err := env.detachDisk(ctx, d.id, d.node); err != nil {
		return err
	}
	return env.Rack.DeleteDisk(ctx, d.id)
}

// makeForeignDisk makes a disk with random bytes or with a filesystem, or a blank disk.
func (env *environment) makeForeignDisk(ctx context.Context, d *foreignDisk) error {
	disk, err := env.Rack.CreateDisk(ctx, env.Rack.Project, d.name, d.gib*gib)
	if err != nil {
		return err
	}
	d.id, d.path = disk.Id, env.backing(disk.Id)
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
	if d.sum, err = sumOf(d.path); err != nil {
		return err
	}
	d.modified, err = modified(d.path)
	env.foreign = append(env.foreign, d)
	return err
}

// backing returns the backing file of a disk.
func (env *environment) backing(id string) string {
	return filepath.Join(env.Rack.Dir, "sim", "disks", id+".img")
}

func modified(path string) (time.Time, error) {
	info, err := os.Stat(path)
	if err != nil {
		return time.Time{}, err
	}
	return info.ModTime(), nil
}

// sumOf reads the head and the tail of a file, which contain everything that a program could
// mistake for its own data. Other writes can be seen from the file's modification time.
func sumOf(path string) (sum [sha256.Size]byte, err error) {
	file, err := os.Open(path)
	if err != nil {
		return sum, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return sum, err
	}
	const part = 4 << 20
	h := sha256.New()
	for _, offset := range []int64{0, info.Size() - part} {
		if _, err := io.Copy(h, io.NewSectionReader(file, offset, part)); err != nil {
			return sum, err
		}
	}
	return [sha256.Size]byte(h.Sum(nil)), nil
}

// untouched returns an error if the bytes of a disk have changed.
func (d *foreignDisk) untouched(thorough bool) error {
	now, err := modified(d.path)
	if err != nil {
		return fmt.Errorf("the foreign disk %s: %w", d.name, err)
	}
	if !now.Equal(d.modified) {
		return fmt.Errorf("the foreign disk %s was written to at %s", d.name, now)
	}
	if !thorough {
		return nil
	}
	sum, err := sumOf(d.path)
	if err == nil && sum != d.sum {
		err = fmt.Errorf("the foreign disk %s holds other bytes than before", d.name)
	}
	return err
}
