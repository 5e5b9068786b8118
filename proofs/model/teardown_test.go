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

// tearDown undoes everything at the end of a history, as a patient orchestrator does.
func (h *history) tearDown(ctx context.Context) error {
	if err := h.calm(ctx); err != nil {
		return err
	}
	if err := h.readAll(ctx); err != nil {
		return err
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
				if err := h.do(ctx, s); err != nil {
					return err
				}
			}
		}
		for s := range snapOf {
			if s > 0 && h.world.seen[snapField(s)] != "" {
				todo = true
				for _, o := range []op{createSnapshot, deleteSnapshot} {
					if err := h.do(ctx, step{op: o, ctl: 1, snap: s}); err != nil {
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

// readAll brings every volume to a pod once more. The checks then read all acknowledged data.
func (h *history) readAll(ctx context.Context) error {
	for v := 1; v < len(kinds); v++ {
		for range 20 {
			if !slices.ContainsFunc(nodes, func(n string) bool { return h.world.lost[at(v, n)] }) {
				break
			}
			s, _ := h.away(v)
			if err := h.do(ctx, s); err != nil {
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
			if err := h.do(ctx, s); err != nil {
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
func (h *history) calm(ctx context.Context) error {
	steps := []step{{op: startRack}}
	for _, n := range nodes {
		steps = append(steps, step{op: startInstance, node: n})
	}
	for _, s := range append(steps, step{op: wait}) {
		if err := h.do(ctx, s); err != nil {
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
		if err := h.do(ctx, step{op: takeNamesake, vol: v}); err != nil {
			return err
		}
	}
	return nil
}

// clean returns an error if the history has left something.
func (h *history) clean(ctx context.Context) error {
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
	if err := harness.CheckFlightDirs(slices.Collect(maps.Values(h.env.nodes))...); err != nil {
		return fmt.Errorf("the flight recorders: %w", err)
	}
	return h.env.balance(ctx)
}
