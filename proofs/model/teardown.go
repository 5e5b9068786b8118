//go:build linux

package model

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// TearDown ends all disturbances and undoes everything, as a patient orchestrator does. If read is
// set, it first brings every volume to a pod. It returns an error if something is left.
func (h *History) TearDown(ctx context.Context, read bool) error {
	if err := h.calm(ctx); err != nil {
		return err
	}
	if read {
		if err := h.readAll(ctx); err != nil {
			return err
		}
	}
	for range 4 {
		todo := false
		for v := len(kinds) - 1; v > 0; v-- {
			for range 20 {
				s, more := h.away(v)
				if !more {
					break
				}
				todo = true
				if err := h.Do(ctx, s); err != nil {
					return err
				}
			}
		}
		for s := range snapOf {
			if s > 0 && h.world.seen[snapField(s)] != "" {
				todo = true
				for _, o := range []op{createSnapshot, deleteSnapshot} {
					if err := h.Do(ctx, Step{op: o, ctl: 1, snap: s}); err != nil {
						return err
					}
				}
			}
		}
		if !todo {
			return h.clean(ctx)
		}
	}
	return errors.New("the volumes and snapshots cannot be deleted")
}

// Release takes all volumes from their nodes.
func (h *History) Release(ctx context.Context) error {
	if err := h.Wait(ctx); err != nil {
		return err
	}
	for v := 1; v < len(kinds); v++ {
		for {
			s, more := h.away(v)
			if !more || s.op == deleteVolume || s.op == createVolume {
				break
			}
			if err := h.Do(ctx, s); err != nil {
				return err
			}
		}
	}
	return nil
}

// readAll brings every volume to a pod once more. The checks then read all acknowledged data.
func (h *History) readAll(ctx context.Context) error {
	for v := 1; v < len(kinds); v++ {
		for range 20 {
			if !slices.ContainsFunc(nodes, func(n string) bool { return h.world.lost[at(v, n)] }) {
				break
			}
			s, _ := h.away(v)
			if err := h.Do(ctx, s); err != nil {
				return err
			}
		}
	}
	for v := 1; v < len(kinds); v++ {
		if h.world.seen[diskField(v)] == "" {
			continue
		}
		if h.goals[v] == "" {
			h.goals[v] = "c"
		}
		arrived := false
		for range 20 {
			s := h.towards(v, h.goals[v])
			if arrived = s.op == writeSynced; arrived {
				break
			}
			if err := h.Do(ctx, s); err != nil {
				return err
			}
		}
		if !arrived {
			return fmt.Errorf("v%d cannot be published on node %s", v, h.goals[v])
		}
	}
	return nil
}

// calm ends all disturbances: it starts the rack and all instances, removes faults, and closes
// devices.
func (h *History) calm(ctx context.Context) error {
	steps := []Step{{op: startRack}}
	for _, n := range nodes {
		steps = append(steps, Step{op: startInstance, node: n})
	}
	for _, s := range append(steps, Step{op: wait}) {
		if err := h.Do(ctx, s); err != nil {
			return err
		}
	}
	h.world.faults = nil
	if err := h.dropAll(); err != nil {
		return err
	}
	if err := errors.Join(h.env.Rack.Admin.ClearFaults(ctx),
		h.env.recordFirst(ctx, false)); err != nil {
		return err
	}
	h.world.recordsFirst = false
	for v := range kinds {
		if err := h.Do(ctx, Step{op: takeNamesake, vol: v}); err != nil {
			return err
		}
	}
	return nil
}

// clean returns an error if the history has left something.
func (h *History) clean(ctx context.Context) error {
	for f, value := range h.world.seen {
		if value != "" {
			return fmt.Errorf("at the end %q is %q", f, value)
		}
	}
	for v := 1; v < len(kinds); v++ {
		for _, n := range nodes {
			for _, p := range pods {
				path := h.env.target(v, n, p)
				if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("the target %s still exists", path)
				}
			}
		}
	}
	for _, d := range h.env.foreign {
		if err := d.unchanged(true); err != nil {
			return err
		}
	}
	if err := harness.CheckFlightDirs(slices.Collect(maps.Values(h.env.Nodes))...); err != nil {
		return fmt.Errorf("the flight recorders: %w", err)
	}
	return h.env.Balance(ctx)
}

// towards returns the orchestrator's next call towards a pod that uses the volume on a node.
func (h *History) towards(v int, n string) Step {
	f, ctl := h.world.seen, 1+int(h.value+uint64(len(h.lines)))%2
	holder := f[holderField(v)]
	switch {
	case h.world.rackDown:
		return Step{op: startRack}
	case h.world.namesakes[at(v, n)] && len(h.lines)%3 == 0:
		return Step{op: takeNamesake, vol: v} // in the meantime the calls are refused
	case f[diskField(v)] == "" || h.orchestrator.volumes[v].GetVolumeId() != f[diskField(v)]:
		return h.towardsDisk(v, ctl)
	case holder != "" && holder != n:
		s, _ := h.away(v)
		return s
	case holder == "" || h.orchestrator.published[at(v, n)] == nil:
		return Step{op: attach, ctl: ctl, vol: v, node: n}
	case h.world.down[n]:
		return Step{op: startInstance, node: n}
	case h.world.bare[at(v, n)] && len(h.lines)%3 == 1:
		return Step{op: stopInstance, node: n} // a started instance has the devices of all its disks
	case h.world.lost[at(v, n)] || h.world.bare[at(v, n)] && len(h.lines)%3 == 2:
		s, _ := h.away(v)
		return s
	case !h.staged[at(v, n)] || !kinds[v].block() && f[stagedField(v, n)] == "":
		return Step{op: stage, vol: v, node: n}
	case !f.published(v, n):
		return Step{op: publish, vol: v, node: n, pod: 1}
	case kinds[v].shared && f[publishedField(v, n, 2)] == "":
		return Step{op: publish, vol: v, node: n, pod: 2}
	}
	s := Step{op: writeSynced, vol: v, node: n, pod: 1, block: int(h.value) % blocks}
	if f[publishedField(v, n, 1)] == "" {
		s.pod = 2
	}
	return s
}

// towardsDisk returns the next call towards a volume's creation. If the volume is restored from a
// snapshot, the snapshot and its volume are created first.
func (h *History) towardsDisk(v, ctl int) Step {
	snap := kinds[v].snap
	switch {
	case snap == 0 || h.orchestrator.snapshots[snap] != "" &&
		h.world.seen[snapField(snap)] == h.orchestrator.snapshots[snap]:
		return Step{op: createVolume, ctl: ctl, vol: v}
	case h.orchestrator.volumes[snapOf[snap]] == nil || h.world.seen[diskField(snapOf[snap])] == "":
		return h.towardsDisk(snapOf[snap], ctl)
	}
	return Step{op: createSnapshot, ctl: ctl, snap: snap}
}

// away returns the orchestrator's next call towards the deletion of a volume, or false if the
// volume is deleted.
func (h *History) away(v int) (Step, bool) {
	f, ctl := h.world.seen, 1+len(h.lines)%2
	for _, n := range nodes {
		if h.world.down[n] {
			continue // the node has no mounts, and no driver runs
		}
		for _, p := range pods {
			if f[publishedField(v, n, p)] != "" || h.orchestrator.given[publishedField(v, n, p)] {
				return Step{op: unpublish, vol: v, node: n, pod: p}, true
			}
		}
		if h.world.held[at(v, n)] {
			return Step{op: letGo, vol: v, node: n, pod: 1}, true
		}
		if f[stagedField(v, n)] != "" || h.orchestrator.staged[at(v, n)] {
			return Step{op: unstage, vol: v, node: n}, true
		}
	}
	switch {
	case f[holderField(v)] != "":
		return Step{op: detach, ctl: ctl, vol: v, node: f[holderField(v)]}, true
	case f[diskField(v)] == "":
		return Step{}, false
	case h.orchestrator.volumes[v].GetVolumeId() != f[diskField(v)]:
		return Step{op: createVolume, ctl: ctl, vol: v}, true
	}
	return Step{op: deleteVolume, ctl: ctl, vol: v}, true
}
