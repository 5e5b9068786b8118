package dataplane

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/machine"
)

// GuestDir returns the directory of an instance's guest view, which contains sys and dev.
func (p *Plane) GuestDir(id string) string { return guestDir(p.Dir, id) }

func guestDir(dir, id string) string { return filepath.Join(dir, "guests", id) }

func (p *Plane) view(id string) view { return view(p.GuestDir(id)) }

// AddGuest creates the guest view of an instance. A view that exists keeps its devices.
func (p *Plane) AddGuest(g Firmware) (err error) {
	defer wrap(&err, "make the guest of instance %s", g.Name)
	if err := p.view(g.InstanceID).make(g.InstanceID); err != nil {
		return err
	}
	p.guests.mu.Lock()
	defer p.guests.mu.Unlock()
	if p.guests.byID[g.InstanceID] == nil {
		h := fnv.New64a()
		h.Write([]byte(g.InstanceID))
		p.guests.byID[g.InstanceID] = &guestState{plugged: map[string]*plugged{},
			random: rand.New(rand.NewPCG(p.Seed, h.Sum64()))}
	}
	return nil
}

// RemoveGuest removes a guest, its devices and its view, if they exist.
func (p *Plane) RemoveGuest(id string) (err error) {
	defer wrap(&err, "remove the guest of instance %s", id)
	if err := p.VMs.Halt(id); err != nil {
		return err
	}
	if err := p.unplugAll(id); err != nil {
		return err
	}
	p.guests.remove(id)
	if err = RemoveTree(p.GuestDir(id)); err == nil {
		p.Removed(id)
	}
	return err
}

func (p *Plane) unplugAll(id string) error {
	if g := p.guests.all()[id]; g != nil {
		for _, d := range p.guests.devices(g) {
			if err := p.Unplug(id, d.spec.DiskID); err != nil {
				return err
			}
		}
	}
	return nil
}

// Empty unplugs every disk and removes all guests, but not their views. Reconcile removes the views
// of instances that are not added again.
func (p *Plane) Empty() error {
	for id := range p.guests.all() {
		if err := errors.Join(p.VMs.Halt(id), RemoveTree(p.VMs.dir(id))); err != nil {
			return err
		}
		if err := p.unplugAll(id); err != nil {
			return err
		}
		p.guests.remove(id)
	}
	return nil
}

type guestState struct {
	// plugged maps IDs to the guest's disks. The mutex of Plane.guests guards it.
	plugged map[string]*plugged

	mu sync.Mutex
	// mu guards the guest view, its device nodes, and the fields random and removed. A goroutine that
	// holds the mutex of Plane.guests must not lock mu.
	//
	// random chooses the numbers of the devices.
	random *rand.Rand
	// removed means that RemoveGuest or Empty has removed the guest.
	removed bool

	// copying is locked while a disk is copied. The guest's machine must not start or resume then.
	copying sync.Mutex
	// machine is the guest's running virtual machine, or nil. It is started and stopped under mu.
	machine atomic.Pointer[machine.Machine]
}

type plugged struct {
	spec  Device
	guest *guestState
	// loop is nil if a fault hides the device for ever, or if guests get no loop devices.
	loop *loopdev.Device
	// never is true if a fault keeps the disk from the guest's virtual machine. wrongSize is the size
	// that a fault gives the disk in this machine, or 0.
	never     bool
	wrongSize int64
	// node is the device's name in the guest. It is "" while the guest does not see the device.
	node string
	// cancel ends the goroutine that shows a delayed device, and appeared is closed when it has ended.
	cancel   context.CancelFunc
	appeared chan struct{}
}

type guests struct {
	mu sync.Mutex
	// mu guards byID and each guestState.plugged. No goroutine writes files while it holds mu.
	byID map[string]*guestState
}

func (g *guests) remove(instanceID string) {
	guest := g.lock(instanceID)
	if guest == nil {
		return
	}
	defer guest.mu.Unlock()
	guest.removed = true
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.byID, instanceID)
}

func (g *guests) all() map[string]*guestState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return maps.Clone(g.byID)
}

func (g *guests) devices(of *guestState) []*plugged {
	g.mu.Lock()
	defer g.mu.Unlock()
	return slices.Collect(maps.Values(of.plugged))
}

// lock locks an instance's guest and returns it, or nil if the instance has no guest.
func (g *guests) lock(instanceID string) *guestState {
	guest := g.all()[instanceID]
	if guest == nil {
		return nil
	}
	guest.mu.Lock()
	if guest.removed {
		guest.mu.Unlock()
		return nil
	}
	return guest
}

func (g *guests) note(d *plugged) {
	g.mu.Lock()
	defer g.mu.Unlock()
	d.guest.plugged[d.spec.DiskID] = d
}

func (g *guests) forget(d *plugged) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(d.guest.plugged, d.spec.DiskID)
}

func (g *guests) disk(id string) *plugged {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, guest := range g.byID {
		if d := guest.plugged[id]; d != nil {
			return d
		}
	}
	return nil
}

const (
	nvmeSerialBytes = 20
	nvmeModelBytes  = 40
)

type view string

func (v view) blockDir() string { return filepath.Join(string(v), "sys", "block") }

func (v view) nodePath(name string) string { return filepath.Join(string(v), "dev", name) }

func (v view) asideDir() string { return filepath.Join(string(v), "aside") }

// hiddenPath returns the path of a file that exists while the guest does not see the disk (A54).
func (v view) hiddenPath(diskID string) string { return filepath.Join(string(v), "hidden", diskID) }

func (v view) make(instanceID string) error {
	dmi := filepath.Join(string(v), "sys", "class", "dmi", "id")
	for _, sub := range []string{dmi, v.blockDir(), v.nodePath(""), v.hiddenPath(""), v.asideDir()} {
		if err := os.MkdirAll(sub, 0o755); err != nil {
			return err
		}
	}
	// A55: the firmware reports the instance's ID, which only root can read.
	return errors.Join(
		writeAttribute(dmi, "sys_vendor", "Oxide\n", 0o444),
		writeAttribute(dmi, "product_name", "OxVM\n", 0o444),
		writeAttribute(dmi, "product_serial", instanceID+"\n", 0o400),
		writeAttribute(dmi, "product_uuid", instanceID+"\n", 0o400))
}

// show creates the device node, and then renames the device's directory into sysfs, so that a
// program that sees the directory also finds the device node.
func (v view) show(spec Device, loop loopdev.Device, name string) error {
	aside := filepath.Join(v.asideDir(), name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	if err := writeBlockDevice(aside, spec, loop); err != nil {
		return err
	}
	node := aside + ".node"
	if err := os.Remove(node); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := makeNode(node, loop); err != nil {
		return err
	}
	if err := os.Rename(node, v.nodePath(name)); err != nil {
		return err
	}
	return os.Rename(aside, filepath.Join(v.blockDir(), name))
}

func (v view) shows(name string, loop loopdev.Device) bool {
	sequence, err := os.ReadFile(filepath.Join(v.blockDir(), name, "diskseq"))
	return err == nil && string(sequence) == fmt.Sprintf("%d\n", loop.Sequence) &&
		isNodeOf(v.nodePath(name), loop)
}

// deviceName matches the names of the rack's devices. Other files in a view are the guest's.
var deviceName = regexp.MustCompile(`^nvme\d+n1$`)

func (v view) names() ([]string, error) {
	var names []string
	for _, dir := range []string{v.blockDir(), v.nodePath("")} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			return nil, err
		}
		for _, e := range entries {
			if deviceName.MatchString(e.Name()) {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

func (v view) remove(name string) error {
	aside := filepath.Join(v.asideDir(), name)
	if err := os.RemoveAll(aside); err != nil {
		return err
	}
	err := os.Rename(filepath.Join(v.blockDir(), name), aside)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err = os.Remove(v.nodePath(name)); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, os.RemoveAll(aside))
}

// clearAside removes entries that an earlier simulator was creating or removing when it ended.
func (v view) clearAside() error {
	return errors.Join(os.RemoveAll(v.asideDir()), os.MkdirAll(v.asideDir(), 0o755))
}

// freeName chooses a random name that no device has, so that names do not show the order in which
// disks were attached (A57).
func (v view) freeName(random *rand.Rand) (string, error) {
	for span := 16; ; span *= 2 {
		for _, n := range random.Perm(span) {
			name := fmt.Sprintf("nvme%dn1", n)
			_, err := os.Lstat(filepath.Join(v.blockDir(), name))
			if errors.Is(err, fs.ErrNotExist) {
				return name, nil
			}
			if err != nil {
				return "", err
			}
		}
	}
}

// writeBlockDevice writes the files of an NVMe namespace, as Linux shows them. The controller's
// fields are padded with NULs, and the model is empty (A56).
func writeBlockDevice(dir string, spec Device, loop loopdev.Device) error {
	for _, sub := range []string{"queue", "device", "holders"} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o755); err != nil {
			return err
		}
	}
	ro, writeCache := map[bool]int{true: 1}[loop.ReadOnly], "write back"
	if spec.Local {
		writeCache = "write through"
	}
	padded := func(s string, n int) string { return s + strings.Repeat("\x00", n-len(s)) + "\n" }
	var errs []error
	for name, value := range map[string]string{
		"dev":                      fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor),
		"size":                     fmt.Sprintf("%d\n", loop.SizeBytes/512),
		"ro":                       fmt.Sprintf("%d\n", ro),
		"diskseq":                  fmt.Sprintf("%d\n", loop.Sequence),
		"queue/write_cache":        writeCache + "\n",
		"queue/logical_block_size": fmt.Sprintf("%d\n", loop.BlockSize),
		"device/serial":            padded(spec.serial(), nvmeSerialBytes),
		"device/model":             padded("", nvmeModelBytes),
	} {
		errs = append(errs, writeAttribute(dir, name, value, 0o444))
	}
	return errors.Join(errs...)
}

// writeAttribute writes a file of sysfs. It does not rewrite a file that already has the value,
// because the guest may be reading it.
func writeAttribute(dir, name, value string, mode os.FileMode) error {
	path := filepath.Join(dir, name)
	if old, err := os.ReadFile(path); err == nil && string(old) == value {
		return nil
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return os.WriteFile(path, []byte(value), mode)
}
