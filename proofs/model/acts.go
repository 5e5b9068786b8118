//go:build linux

package model

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// impossible is the result of a step that is not possible in the present state.
const impossible = "impossible"

// act does a step that is not a call of the driver, and returns text for the transcript, or
// impossible.
func (h *History) act(ctx context.Context, s Step) (string, error) {
	switch s.op {
	case write, writeSynced:
		return h.write(s)
	case freeze, thaw:
		return h.freeze(s)
	case hold, holdByLoop, letGo:
		return h.hold(s)
	case makeNamesake:
		return h.makeNamesake(ctx, s)
	case takeNamesake:
		return h.takeNamesake(ctx, s)
	case wait:
		return "", h.wait(ctx)
	case fault:
		return h.addFault(ctx, s.fault)
	case killController, endController, killNode, endNode:
		return h.replace(ctx, s)
	case stopInstance, startInstance:
		return h.switchInstance(ctx, s)
	}
	return h.actOnRack(ctx, s.op)
}

// write writes a block as a pod does, unless the volume's device is lost or its filesystem is
// frozen.
func (h *History) write(s Step) (string, error) {
	content := h.contents[s.vol]
	if content == nil || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[at(s.vol, s.node)] || h.world.frozen[at(s.vol, s.node)] {
		return impossible, nil
	}
	if s.node == h.ReadOnlyAt {
		if put(h.env.target(s.vol, s.node, s.pod), s.vol, s.block, h.value+1, true) == nil {
			return "", errors.New("a volume is read-only and was written")
		}
		return " = refused", nil
	}
	if err := h.forge(s, content); err != nil {
		return "", fmt.Errorf("a pod cannot forge records: %w", err)
	}
	h.value++
	synced := s.op == writeSynced
	if err := put(h.env.target(s.vol, s.node, s.pod), s.vol, s.block, h.value, synced); err != nil {
		return "", fmt.Errorf("a pod cannot write: %w", err)
	}
	content.wrote(s.block, h.value, synced)
	if synced {
		h.count.bytes += blockSize
	}
	return fmt.Sprintf(" = value %d", h.value), nil
}

// forge writes files with forged records, before the first block of a filesystem.
func (h *History) forge(s Step, content *content) (err error) {
	if kinds[s.vol].block() || content.forged != nil {
		return nil
	}
	id, size := h.world.seen[diskField(s.vol)], kinds[s.vol].bytes()
	content.forged, err = proof.Forgery{Volume: id, Disk: h.serials[s.vol],
		Filesystem: kinds[s.vol].fsType, SizeBytes: size, NextBytes: 2 * size,
		Device: proof.DiskFile(h.env.Rack, id)}.Write(h.env.target(s.vol, s.node, s.pod))
	return err
}

// wait waits for the end of every abandoned call, after which no fact is in doubt.
func (h *History) wait(ctx context.Context) error {
	if err := h.env.awaitIdle(ctx, h.world.rackDown); err != nil {
		return err
	}
	if h.world.rackDown {
		return nil // while the rack is down, the result of its work is unknown
	}
	j, err := h.observe(ctx, nil)
	if err != nil {
		return err
	}
	if err := h.check(j, nil); err != nil {
		return err
	}
	h.world.doubts = nil
	h.world.recordsFirst = slices.Contains(h.world.faults, noDevice)
	return nil
}

func (h *History) addFault(ctx context.Context, name string) (string, error) {
	devices := func(fault string) bool { return fault == noDevice || fault == "slow device" }
	if h.world.rackDown || len(h.world.faults) >= 4 ||
		devices(name) && slices.ContainsFunc(h.world.faults, devices) {
		return impossible, nil
	}
	if name == noDevice {
		h.world.recordsFirst = true
		if err := h.env.recordFirst(ctx, true); err != nil {
			return "", err
		}
	}
	id, err := h.env.Rack.Admin.AddFault(ctx, faults[name].Fault)
	if err != nil {
		return "", err
	}
	h.faultNames[id] = name
	h.world.faults = append(h.world.faults, name)
	return "", nil
}

// replace kills or stops a driver, and starts it again.
func (h *History) replace(ctx context.Context, s Step) (string, error) {
	onNode := s.op == killNode || s.op == endNode
	if onNode && h.world.down[s.node] {
		return impossible, nil
	}
	p := h.env.Nodes[s.node]
	if !onNode {
		p = h.env.Controllers[s.ctl-1]
	}
	if s.op == killNode || s.op == killController {
		p.Kill()
	} else if err := p.Stop(); err != nil {
		return "", err
	}
	return "", h.restart(ctx, p)
}

func (h *History) switchInstance(ctx context.Context, s Step) (string, error) {
	stop := s.op == stopInstance
	if h.world.rackDown || h.world.down[s.node] == stop {
		return impossible, nil
	}
	h.count.restarts++
	if !stop {
		err := h.env.startNode(ctx, s.node)
		h.world.down[s.node] = err != nil
		return "", err
	}
	if err := h.env.stopNode(ctx, s.node); err != nil {
		return "", err
	}
	h.world.down[s.node] = true
	for v := 1; v < len(kinds); v++ {
		// The mounts are gone, and data that were not synced may be lost.
		if h.world.seen.mounted(v, s.node) && h.contents[v] != nil {
			h.contents[v].partial = true
		}
		h.staged[at(v, s.node)] = false
		h.world.frozen[at(v, s.node)] = false
		h.world.seen[stagedField(v, s.node)] = ""
		for _, p := range pods {
			h.world.seen[publishedField(v, s.node, p)] = ""
		}
	}
	return "", nil
}

func (h *History) actOnRack(ctx context.Context, o op) (string, error) {
	if h.world.rackDown != (o == startRack) {
		return impossible, nil
	}
	switch o {
	case killRack:
		h.env.Rack.Kill()
		h.world.rackDown = true
		return "", nil
	case restartRack:
		if err := h.env.Bystanders.Suspend(); err != nil {
			return "", err
		}
		err := h.env.Rack.Terminate()
		if err != nil && !strings.Contains(err.Error(), "still held") {
			return "", err
		}
		for v := range kinds {
			for _, n := range nodes {
				if h.world.seen.mounted(v, n) {
					h.world.lost[at(v, n)] = true // after the restart the disks have other devices
					h.contents[v].partial = true
				}
			}
		}
	}
	h.count.restarts++
	h.world.rackDown = false
	h.world.faults, h.world.recordsFirst = nil, false // a restart of the rack removes its faults
	if err := h.env.Rack.Start(ctx); err != nil {
		return "", err
	}
	return "", h.env.resumeBystanders(ctx)
}

// freeze freezes or thaws a filesystem as a backup does. No pod writes to a frozen filesystem,
// because the write would wait until it is thawed.
func (h *History) freeze(s Step) (string, error) {
	key := at(s.vol, s.node)
	if kinds[s.vol].block() || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[key] || h.world.frozen[key] == (s.op == freeze) {
		return impossible, nil
	}
	if err := proof.SetFrozen(h.env.target(s.vol, s.node, s.pod), s.op == freeze); err != nil {
		return "", fmt.Errorf("%s: %w", s, err)
	}
	h.world.frozen[key] = s.op == freeze
	return "", nil
}

// hold opens a device for writing, as a process does that outlives the publication of its volume,
// or lets a loop device use it. letGo ends that use.
func (h *History) hold(s Step) (string, error) {
	key := at(s.vol, s.node)
	if s.op == letGo {
		if !h.world.held[key] {
			return impossible, nil
		}
		return "", h.drop(key)
	}
	if h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[key] || h.world.held[key] || h.world.namesakes[key] {
		return impossible, nil
	}
	device, err := h.env.Rack.Instance(s.node).Device(h.serials[s.vol])
	if err != nil {
		return impossible, nil //nolint:nilerr // the guest does not show it
	}
	var holder io.Closer
	if s.op == hold {
		holder, err = os.OpenFile(device.Path, os.O_WRONLY, 0)
	} else {
		holder, err = loopOver(device.Path)
	}
	if err != nil {
		return "", err
	}
	h.open[key], h.world.held[key] = holder, true
	h.count.holders++
	return "", nil
}

// loopDevice is the path of a loop device.
type loopDevice string

func loopOver(path string) (loopDevice, error) {
	out, err := exec.Command("losetup", "--find", "--show", path).Output()
	return loopDevice(strings.TrimSpace(string(out))), err
}

// Close releases the loop device.
func (l loopDevice) Close() error { return exec.Command("losetup", "--detach", string(l)).Run() }

// drop closes a device that is kept open.
func (h *History) drop(key string) error {
	holder := h.open[key]
	delete(h.open, key)
	delete(h.world.held, key)
	return holder.Close()
}

// dropLost closes the devices that the guest does not show any more.
func (h *History) dropLost(j *joint) error {
	for v := range kinds {
		for _, n := range nodes {
			if _, seen := j.device(v, n); h.world.held[at(v, n)] && !seen {
				if err := h.drop(at(v, n)); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// dropAll closes every device that is kept open.
func (h *History) dropAll() error {
	var errs []error
	for key := range h.world.held {
		errs = append(errs, h.drop(key))
	}
	return errors.Join(errs...)
}

// sensible reports whether the model knows the answer to a mistaken call: the other volume, which
// the call uses by mistake, must be in a known state.
func (h *History) sensible(s Step) bool {
	w, here, there := h.world, at(s.vol, s.node), at(s.other, s.node)
	if len(w.doubts) > 0 || w.rackDown || w.lost[here] || w.half[here] || w.lost[there] ||
		w.half[there] || w.namesakes[here] || w.namesakes[there] || w.bare[here] || w.bare[there] ||
		s.op != publishOther && s.other == s.vol {
		return false
	}
	staged := w.seen[stagedField(s.vol, s.node)] != ""
	switch s.op {
	case stageAstray:
		return staged || kinds[s.vol].block() && w.seen.published(s.vol, s.node)
	case publishOther:
		return staged || kinds[s.vol].block()
	}
	return true
}
