//go:build linux

package machine

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Machine is the running virtual machine of an instance. It ends when its guest powers it off, or
// when its QEMU process is killed.
type Machine struct {
	ID      string
	qmp     *monitor
	sshPort int // the port of 127.0.0.1 that QEMU forwards to the guest's sshd

	// mu lets one call at a time change the disks, and guards ports. ports tells whether the machine
	// has PCIe root ports for its disks. plugged() sets it.
	mu    sync.Mutex
	ports bool

	// pidMu guards pid: a pidfd of QEMU, or -1 after Release.
	pidMu sync.Mutex
	pid   int
}

// Ended returns a channel that is closed when the machine has ended.
func (m *Machine) Ended() <-chan struct{} { return m.qmp.ended }

// PoweredOff reports whether an ended machine was powered off by its guest.
func (m *Machine) PoweredOff() bool {
	m.qmp.mu.Lock()
	defer m.qmp.mu.Unlock()
	return m.qmp.last == "guest-shutdown"
}

// SSHPort returns the port of 127.0.0.1 that QEMU forwards to the guest's sshd.
func (m *Machine) SSHPort() int { return m.sshPort }

// Release closes the connection to QEMU, but does not end the machine. Before Release no other
// process can find the machine, because QEMU serves one connection at a time.
func (m *Machine) Release() error {
	m.pidMu.Lock()
	defer m.pidMu.Unlock()
	if m.pid < 0 {
		return nil
	}
	err := errors.Join(m.qmp.conn.Close(), unix.Close(m.pid))
	m.pid = -1
	return err
}

// rootSlot is the PCI slot of the machine's root disk, which is not a disk of the rack.
const rootSlot = 0x9

// slots are the PCI slots of the rack's disks.
var slots = []int{0x10, 0x11, 0x12, 0x13, 0x14, 0x15, 0x16, 0x17, 0x1a, 0x1b, 0x1c, 0x1d}

// The guest gets ejectTime to release a disk. Unplug repeats its request every askAgain, because a
// guest that boots ignores the request.
const (
	ejectTime = 10 * time.Second
	askAgain  = time.Second
)

var errNoSlot = fmt.Errorf("an instance has %d disks at most", len(slots))

// node returns QEMU's name for a block device of a disk. QEMU limits such names to 31 bytes.
func node(kind, id string) string {
	id = strings.ReplaceAll(id, "-", "")
	return kind[:1] + kind[len(kind)-1:] + id[:min(len(id), 29)]
}

func (d Disk) block(file string) map[string]any {
	return map[string]any{"driver": "raw", "node-name": node("disk", d.ID), "read-only": d.ReadOnly,
		"size": d.SizeBytes, "file": file}
}

func port(slot int) string { return fmt.Sprintf("port-%#x", slot) }

// device describes a disk's NVMe controller to QEMU. If ports is true, the slot has a root port.
func (d Disk) device(slot int, ports bool) map[string]any {
	bus, at := "pci.0", slot
	if ports {
		bus, at = port(slot), 0
	}
	return map[string]any{"driver": "nvme", "id": "nvme-" + d.ID, "drive": node("disk", d.ID),
		"serial": d.Serial, "bus": bus, "addr": fmt.Sprintf("%#x", at),
		"logical_block_size": d.BlockSize, "physical_block_size": d.BlockSize}
}

type pciBus struct {
	Devices []struct {
		Slot int
		ID   string `json:"qdev_id"`
	}
}

// plugged maps the IDs of disks to their slots.
func (m *Machine) plugged(ctx context.Context) (map[string]int, error) {
	var buses []pciBus
	if err := m.qmp.do(ctx, "query-pci", nil, &buses); err != nil {
		return nil, err
	}
	used := map[string]int{}
	for _, bus := range buses {
		for _, d := range bus.Devices {
			m.ports = m.ports || d.ID == port(d.Slot)
			if id, is := strings.CutPrefix(d.ID, "nvme-"); is {
				used[id] = d.Slot
			}
		}
	}
	if m.ports {
		return m.behindPorts(ctx)
	}
	return used, nil
}

// behindPorts maps the IDs of disks behind root ports to their slots. query-pci does not list these
// disks until the firmware has numbered the buses.
func (m *Machine) behindPorts(ctx context.Context) (map[string]int, error) {
	const peripheral = "/machine/peripheral"
	var devices []struct{ Name string }
	if err := m.qmp.do(ctx, "qom-list", map[string]any{"path": peripheral}, &devices); err != nil {
		return nil, err
	}
	used := map[string]int{}
	for _, d := range devices {
		id, is := strings.CutPrefix(d.Name, "nvme-")
		if !is {
			continue
		}
		var bus string // the path of the bus, which ends with the port's name
		if err := m.qmp.do(ctx, "qom-get", map[string]any{"path": peripheral + "/" + d.Name,
			"property": "parent_bus"}, &bus); err != nil {
			return nil, err
		}
		for _, slot := range slots {
			if path.Base(bus) == port(slot) {
				used[id] = slot
			}
		}
	}
	return used, nil
}

// Plug plugs a disk into the lowest free slot, unless the machine has the disk.
func (m *Machine) Plug(ctx context.Context, d Disk) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	ctx, cancel := context.WithTimeout(ctx, plugTime)
	defer cancel()
	used, err := m.plugged(ctx)
	if err != nil {
		return err
	}
	if _, has := used[d.ID]; has {
		nodes, err := m.nodes(ctx)
		if err == nil && nodes[node("dead", d.ID)] {
			err = fmt.Errorf("the guest still has disk %s, which was cut off: reboot or stop the "+
				"instance", d.ID)
		}
		return err
	}
	taken := slices.Collect(maps.Values(used))
	i := slices.IndexFunc(slots, func(slot int) bool { return !slices.Contains(taken, slot) })
	if i < 0 {
		return errNoSlot
	}
	// A process that was killed while it plugged or unplugged the disk may have left block devices.
	if err := m.forget(ctx, d.ID); err != nil {
		return err
	}
	file := map[string]any{"driver": "file", "node-name": node("file", d.ID), "filename": d.Path,
		"read-only": d.ReadOnly, "discard": "ignore"}
	for _, block := range []map[string]any{file, d.block(node("file", d.ID))} {
		if err = m.qmp.do(ctx, "blockdev-add", block, nil); err != nil {
			break
		}
	}
	if err == nil {
		err = m.qmp.do(ctx, "device_add", d.device(slots[i], m.ports), nil)
	}
	if err != nil {
		return errors.Join(err, m.forget(ctx, d.ID))
	}
	return nil
}

// Unplug asks the guest to release a disk, if the machine has it. If the guest does not release it
// in time, Unplug cuts the disk off: the guest's reads and writes fail. When Unplug returns without
// an error, no further write of the guest reaches the disk's file.
func (m *Machine) Unplug(ctx context.Context, d Disk) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	err := m.eject(ctx, d)
	if errors.Is(err, ErrGone) {
		return nil
	}
	return err
}

func (m *Machine) eject(ctx context.Context, d Disk) error {
	used, err := m.plugged(ctx)
	if err != nil {
		return err
	}
	if _, has := used[d.ID]; !has {
		return m.forget(ctx, d.ID)
	}
	events, stop := m.qmp.watch()
	defer stop()
	end := time.After(ejectTime)
	again := time.NewTicker(askAgain)
	defer again.Stop()
	for asked := false; ; asked = true {
		err := m.qmp.do(ctx, "device_del", map[string]any{"id": "nvme-" + d.ID}, nil)
		if err != nil && !asked {
			return err
		}
		for waits := true; waits; {
			select {
			case <-ctx.Done():
				return fmt.Errorf("the guest has not released disk %s: %w", d.ID, context.Cause(ctx))
			case <-m.qmp.ended:
				return ErrGone
			case e := <-events:
				if e.name == "DEVICE_DELETED" && e.Device == "nvme-"+d.ID {
					return m.forget(ctx, d.ID)
				}
			case <-end:
				return m.cut(ctx, d)
			case <-again.C:
				waits = false
			}
		}
	}
}

// Keep unplugs all disks except those with the given IDs, as Unplug does.
func (m *Machine) Keep(ctx context.Context, ids ...string) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	used, err := m.plugged(ctx)
	errs := []error{err}
	for id := range used {
		if !slices.Contains(ids, id) {
			errs = append(errs, m.eject(ctx, Disk{ID: id, SizeBytes: 1 << 20}))
		}
	}
	return errors.Join(errs...)
}

// cut replaces the file below a guest's disk with a block device that fails every request.
func (m *Machine) cut(ctx context.Context, d Disk) error {
	nodes, err := m.nodes(ctx)
	if err != nil || !nodes[node("file", d.ID)] {
		return err // an earlier call has cut the disk off
	}
	dead := map[string]any{"driver": "blkdebug", "node-name": node("dead", d.ID),
		"inject-error": []map[string]any{{"event": "none", "errno": int(unix.EIO)}},
		"image":        map[string]any{"driver": "null-co", "size": d.SizeBytes}}
	if !nodes[node("dead", d.ID)] {
		if err := m.qmp.do(ctx, "blockdev-add", dead, nil); err != nil {
			return err
		}
	}
	over := map[string]any{"options": []map[string]any{d.block(node("dead", d.ID))}}
	if err := m.qmp.do(ctx, "blockdev-reopen", over, nil); err != nil {
		return err
	}
	return m.qmp.do(ctx, "blockdev-del", map[string]any{"node-name": node("file", d.ID)}, nil)
}

func (m *Machine) forget(ctx context.Context, id string) error {
	nodes, err := m.nodes(ctx)
	for _, name := range []string{node("disk", id), node("dead", id), node("file", id)} {
		if err == nil && nodes[name] {
			err = m.qmp.do(ctx, "blockdev-del", map[string]any{"node-name": name}, nil)
		}
	}
	return err
}

func (m *Machine) nodes(ctx context.Context) (map[string]bool, error) {
	var all []struct {
		Name string `json:"node-name"`
	}
	err := m.qmp.do(ctx, "query-named-block-nodes", map[string]any{"flat": true}, &all)
	names := map[string]bool{}
	for _, n := range all {
		names[n.Name] = true
	}
	return names, err
}

// Pause stops the guest's processors until Resume. Meanwhile the guest writes nothing.
func (m *Machine) Pause(ctx context.Context) error { return m.qmp.do(ctx, "stop", nil, nil) }

// Resume ends a Pause.
func (m *Machine) Resume(ctx context.Context) error { return m.qmp.do(ctx, "cont", nil, nil) }

// Reset restarts the guest at once, as a reset button does.
func (m *Machine) Reset(ctx context.Context) error {
	return m.qmp.do(ctx, "system_reset", nil, nil)
}

// Stop kills QEMU, without telling the guest, and waits until QEMU has ended.
func (m *Machine) Stop(ctx context.Context) error {
	if err := m.kill(); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("stop QEMU: %w", err)
	}
	select {
	case <-m.qmp.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("wait for the end of QEMU: %w", context.Cause(ctx))
	}
}

func (m *Machine) kill() error {
	m.pidMu.Lock()
	defer m.pidMu.Unlock()
	if m.pid < 0 {
		return nil
	}
	return unix.PidfdSendSignal(m.pid, unix.SIGKILL, nil, 0)
}

var forwarded = regexp.MustCompile(`HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+\S+\s+22\s`)

func (m *Machine) findPort(ctx context.Context) error {
	var text string
	err := m.qmp.do(ctx, "human-monitor-command",
		map[string]any{"command-line": "info usernet"}, &text)
	if err != nil {
		return err
	}
	found := forwarded.FindStringSubmatch(text)
	if found == nil {
		return fmt.Errorf("QEMU names no forwarded port: %q", text)
	}
	m.sshPort, err = strconv.Atoi(found[1])
	return err
}
