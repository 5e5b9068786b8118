package dataplane

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// ErrCannotFail means that the disks of this plane are plain files and cannot fail
// (Config.FlakyDisks).
var ErrCannotFail = errors.New("the disks of this rack cannot fail")

// Flaky contains the disks of a plane with Config.FlakyDisks. The faults of a disk stay active when
// the disk is detached, and apply in the next guest.
type Flaky struct {
	// path returns the path of a disk's file.
	path func(id string) string
	dir  string
	// mark is the prefix of its files' names, and identifies the rack.
	mark string
	// server is nil if the disks are plain files. device is the st_dev of the server's files.
	server *flakydisk.Server
	device uint64

	// mu guards disks, by their IDs.
	mu    sync.Mutex
	disks map[string]*flakyDisk
}

// flakyDisk is a plugged disk, or the faults of a disk that is not plugged.
type flakyDisk struct {
	*flakydisk.Disk
	file flakydisk.File
}

// open removes the mounts of a killed simulator. If serve is true, it starts to serve disks.
func (f *Flaky) open(dir string, serve bool) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		number, ours := strings.CutPrefix(e.Name(), fusePrefix)
		if _, no := strconv.ParseUint(number, 10, 64); ours && no == nil && e.IsDir() {
			err = errors.Join(err, removeMount(filepath.Join(dir, e.Name())))
		}
	}
	if err != nil || !serve {
		return err
	}
	f.disks = map[string]*flakyDisk{}
	// The name is new, so that a guard process of the last simulator does not remove this mount.
	if f.dir, err = os.MkdirTemp(dir, fusePrefix); err != nil {
		return err
	}
	if f.server, err = flakydisk.Mount(f.dir); err != nil {
		return err
	}
	if f.device, err = deviceOf(f.dir); err != nil {
		return errors.Join(err, f.close())
	}
	return nil
}

const fusePrefix = "fuse-"

// close ends the hanging operations and stops serving disks.
func (f *Flaky) close() error {
	if f.server == nil {
		return nil
	}
	f.HealAll()
	return errors.Join(f.server.Close(), os.Remove(f.dir))
}

// HealAll removes the faults of all disks.
func (f *Flaky) HealAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, d := range f.disks {
		d.Heal()
	}
}

// disk returns a disk, plugged or not. The caller holds mu.
func (f *Flaky) disk(id string) *flakyDisk {
	if f.disks[id] == nil {
		f.disks[id] = &flakyDisk{Disk: flakydisk.NewDisk(nil)}
	}
	return f.disks[id]
}

// replace replaces a disk and keeps its faults. The caller holds mu.
func (f *Flaky) replace(id string, d *flakyDisk) {
	for _, fault := range f.disk(id).Faults() {
		d.AddFault(fault)
	}
	f.disks[id] = d
}

// plug returns the path of a file that passes operations on to the disk's file, or makes them fail
// according to the disk's faults.
func (f *Flaky) plug(id, path string) (string, error) {
	if f.server == nil {
		return path, nil
	}
	file, err := flakydisk.OpenFile(path)
	if err != nil {
		return "", err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	d := &flakyDisk{Disk: flakydisk.NewDisk(file), file: file}
	f.replace(id, d)
	return f.server.Put(f.mark+filepath.Base(path), d.Disk), nil
}

// unplug ends the use of a disk's file: hanging operations fail, and no later write reaches the
// file.
func (f *Flaky) unplug(id string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	d := f.disks[id]
	if d == nil || d.file.File == nil {
		return nil
	}
	f.replace(id, &flakyDisk{Disk: flakydisk.NewDisk(nil)})
	d.Cut()
	f.server.Remove(f.mark + filepath.Base(d.file.Name()))
	return d.file.Close()
}

func (f *Flaky) forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	delete(f.disks, id)
}

// Fail adds a fault to a disk, in every guest into which the disk is plugged.
func (f *Flaky) Fail(id string, fault flakydisk.Fault) error {
	return f.with(id, func(d *flakyDisk) { d.AddFault(fault) })
}

// Heal removes all faults of a disk. Hanging operations continue.
func (f *Flaky) Heal(id string) error { return f.with(id, func(d *flakyDisk) { d.Heal() }) }

// Faults returns the faults of a disk.
func (f *Flaky) Faults(id string) (faults []flakydisk.Fault, err error) {
	err = f.with(id, func(d *flakyDisk) { faults = d.Faults() })
	return faults, err
}

// Activity returns the operations of a disk in the last seconds, since it was plugged.
func (f *Flaky) Activity(id string) (all []flakydisk.Activity, err error) {
	err = f.with(id, func(d *flakyDisk) { all = d.Activity(time.Now()) })
	return all, err
}

// with calls do with a disk. It does not wait for reads and writes of the disk, because they may
// hang.
func (f *Flaky) with(id string, do func(*flakyDisk)) error {
	if f.server == nil {
		return ErrCannotFail
	}
	if _, err := os.Stat(f.path(id)); err != nil {
		return fmt.Errorf("there is no disk %q: %w", id, err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	do(f.disk(id))
	return nil
}
