//go:build linux

package model

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// impossible is the result of a step that is not possible in the present state.
const impossible = "impossible"

// act does a step that is not a call of the driver, and returns text for the transcript, or
// impossible.
func (h *history) act(ctx context.Context, s step) (string, error) {
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
func (h *history) write(s step) (string, error) {
	content := h.contents[s.vol]
	if content == nil || h.world.seen[publishedField(s.vol, s.node, s.pod)] == "" ||
		h.world.lost[at(s.vol, s.node)] || h.world.frozen[at(s.vol, s.node)] {
		return impossible, nil
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
func (h *history) forge(s step, content *content) (err error) {
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
func (h *history) wait(ctx context.Context) error {
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

func (h *history) addFault(ctx context.Context, name string) (string, error) {
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
func (h *history) replace(ctx context.Context, s step) (string, error) {
	onNode := s.op == killNode || s.op == endNode
	if onNode && h.world.down[s.node] {
		return impossible, nil
	}
	p := h.env.nodes[s.node]
	if !onNode {
		p = h.env.controllers[s.ctl-1]
	}
	if s.op == killNode || s.op == killController {
		p.Kill()
	} else if err := p.Stop(); err != nil {
		return "", err
	}
	return "", h.restart(ctx, p)
}

func (h *history) switchInstance(ctx context.Context, s step) (string, error) {
	stop := s.op == stopInstance
	if h.world.rackDown || h.world.down[s.node] == stop {
		return impossible, nil
	}
	h.count.restarts++
	if !stop {
		h.world.down[s.node] = false
		return "", h.env.startNode(ctx, s.node)
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

func (h *history) actOnRack(ctx context.Context, o op) (string, error) {
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
