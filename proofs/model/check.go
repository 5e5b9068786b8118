//go:build linux

package model

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"os"
	"slices"

	"github.com/moby/sys/mountinfo"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// review compares an observed state with the model after calls have ended. Then it makes the
// observed state the state of the model.
type review struct {
	env   *Environment
	world *world
	count *counts
	now   *joint
	calls []ended
}

// check fails if the calls do not allow the observed state, or if the state breaks a general rule.
// Otherwise the observed state becomes the state of the model.
func (h *History) check(ctx context.Context, calls []ended) {
	r := &review{h.env, h.world, h.count, h.observe(ctx, calls), calls}
	for _, part := range []func(){
		r.unplugged, r.deviceless, r.checkPromises, r.checkFields, r.checkAttached, r.checkHolders,
		r.checkReleased, r.checkMounts, r.checkForeign, r.believe, r.dropLost, r.checkData,
	} {
		part()
	}
}

func (r *review) checkFields() {
	for _, f := range allFields {
		value, allowed := r.now.facts[f], r.world.allowed(f, r.calls)
		if !isAllowed(value, allowed) {
			fail("%q is %q, the model allows %q", f, value, allowed)
		}
	}
}

var allFields = func() (all []field) {
	for v := 1; v < len(kinds); v++ {
		all = append(all, diskField(v), sourceField(v), holderField(v))
	}
	for v, n := range everywhere {
		all = append(all, stagedField(v, n))
		for _, p := range pods {
			all = append(all, publishedField(v, n, p))
		}
	}
	for s := 1; s < len(snapOf); s++ {
		all = append(all, snapField(s), snapSourceField(s))
	}
	return all
}()

// checkPromises fails if a call answered OK and its effect is missing, unless another call may have
// undone it: a call of another op in the same step, or an abandoned call.
func (r *review) checkPromises() {
	for i, c := range r.calls {
		if c.how != succeeded {
			continue
		}
		others := slices.DeleteFunc(slices.Concat(r.calls[:i:i], r.calls[i+1:]), func(o ended) bool {
			return o.op == c.op && o.how != openCall
		})
		if field, kept := c.kept(r.now.facts); !kept && !r.world.mayTouch(field, others) {
			fail("%s answered OK, but %q is %q", c.brief(), field, r.now.facts[field])
		}
	}
}

// kept() returns the first field that the call changes, and whether the field has the value that
// the answer OK promises. After a delete or a detach, every value except the old one is accepted,
// because another call may have created the object again or attached the disk elsewhere.
func (s Step) kept(f facts) (field, bool) {
	intends := s.intends()
	if len(intends) == 0 {
		return "", true
	}
	field := intends[0].field
	switch s.op {
	case createVolume, createSnapshot:
		return field, f[field] == s.id
	case deleteVolume, deleteSnapshot:
		return field, f[field] != s.id
	case detach:
		return field, f[field] != s.node
	}
	return field, f[field] == intends[0].value
}

// mayTouch reports whether a call in calls, or an abandoned call, can change the field.
func (w *world) mayTouch(f field, calls []ended) bool {
	touches := func(a assign) bool { return a.field == f }
	return slices.ContainsFunc(w.doubts, touches) ||
		slices.ContainsFunc(calls, func(c ended) bool {
			return slices.ContainsFunc(c.intends(), touches)
		})
}

// deviceless sets bare for each volume that is attached to a node without its device, if the rack
// may have only recorded the attach, or if a disk with the same serial was shown (A54).
func (r *review) deviceless() {
	w := r.world
	for v, n := range everywhere {
		_, seen := r.now.device(v, n)
		here := w.at(v, n)
		before := here.bare
		here.bare = !seen && r.now.facts[holderField(v)] == n && !w.down[n] &&
			(before || here.shown && !r.now.shown[at(v, n)] ||
				w.recordsFirst && w.mayTouch(holderField(v), r.calls))
		if here.bare && !before {
			r.count.bare++
		}
	}
}

// checkAttached fails if an attach answered OK and the node does not have the volume's device. The
// device may be missing if the rack records an attach first, if the device appears late, or if the
// guest shows another disk with the same serial.
func (r *review) checkAttached() {
	w := r.world
	for i, c := range r.calls {
		here := w.place(c.Step)
		if c.op != attach || c.how != succeeded || here.bare || here.slow || w.down[c.node] ||
			w.rackDown || r.now.shown[at(c.vol, c.node)] ||
			w.mayTouch(holderField(c.vol), slices.Concat(r.calls[:i:i], r.calls[i+1:])) {
			continue
		}
		if _, seen := r.now.device(c.vol, c.node); !seen {
			fail("%s answered OK, and the node has no device of it", c.brief())
		}
	}
}

// underWay returns the abandoned calls. Their effects may happen during the observation.
func underWay(calls []ended) []ended {
	return slices.DeleteFunc(slices.Clone(calls), func(c ended) bool { return c.how != openCall })
}

// checkHolders fails if a disk has two devices, or if its device is in another instance than the
// one to which the rack has attached the disk.
func (r *review) checkHolders() {
	for v := 1; v < len(kinds); v++ {
		var where []string
		for _, n := range nodes {
			for _, d := range r.now.devices[n] {
				if d.Serial != "" && d.Serial == r.now.serials[v] {
					where = append(where, n)
				}
			}
		}
		holder := r.now.facts[holderField(v)]
		sure := !r.world.rackDown && !r.world.mayTouch(holderField(v), underWay(r.calls))
		if len(where) > 1 || len(where) == 1 && where[0] != holder && sure {
			fail("v%d is attached to %q, and its device is seen by %q", v, holder, where)
		}
		if id := r.now.facts[diskField(v)]; id != "" {
			if devices := r.now.loops[proof.DiskFile(r.env.Rack, id)]; len(devices) > 1 {
				fail("v%d has the loop devices %q, want one", v, devices)
			}
		}
	}
}

// checkReleased fails if an unstage answered OK while the device is in use or the volume is
// published. It ignores block volumes whose device is lost.
func (r *review) checkReleased() {
	for _, c := range r.calls {
		dead := kinds[c.vol].block() && r.world.place(c.Step).lost
		if c.op != unstage || c.how != succeeded || dead {
			continue
		}
		if r.world.place(c.Step).open != nil {
			r.count.released++
			fail("%s answered OK while the device is in use", c.brief())
		}
		for _, p := range pods {
			f := publishedField(c.vol, c.node, p)
			if r.now.facts[f] != "" && !r.world.mayTouch(f, r.calls) {
				fail("%s answered OK while pod %d has the volume", c.brief(), p)
			}
		}
	}
}

func (r *review) checkMounts() {
	known := map[string]bool{}
	for v, n := range everywhere {
		for _, path := range r.env.paths(v, n) {
			known[path] = true
			r.checkMount(v, n, r.now.mounts[path])
		}
	}
	for path, infos := range r.now.mounts {
		if !known[path] {
			fail("%s is mounted at %s, which is no path of a volume", infos[0].Source, path)
		}
	}
}

func (r *review) checkMount(v int, n string, infos []*mountinfo.Info) {
	if len(infos) > 1 {
		fail("%s has %d mounts, want one", infos[0].Mountpoint, len(infos))
	}
	if len(infos) == 0 || r.lostBy(v, n) {
		return
	}
	device, ok := r.now.device(v, n)
	if number := harness.MountedNumber(infos[0]); !ok || number != device.Number {
		// Fail only if the mount still exists. An abandoned call may have unmounted it meanwhile.
		now := harness.Got(mountinfo.GetMounts(mountinfo.SingleEntryFilter(infos[0].Mountpoint)))
		if len(now) > 0 && now[0].ID == infos[0].ID {
			fail("device %s is mounted at %s, not the device of v%d (%v)", number,
				infos[0].Mountpoint, v, device)
		}
	}
}

// unplugged marks a mounted volume as lost if its device is missing and a detach may be under way.
func (r *review) unplugged() {
	for v, n := range everywhere {
		_, seen := r.now.device(v, n)
		if !seen && r.now.facts.mounted(v, n) && !r.lostBy(v, n) &&
			r.world.mayTouch(holderField(v), r.calls) {
			here := r.world.at(v, n)
			here.half, here.lost = true, true
			r.world.contents[v].cut()
		}
	}
}

// lostBy reports whether the volume is mounted on a node from which its disk was detached.
func (r *review) lostBy(v int, n string) bool {
	return r.world.at(v, n).lost ||
		r.now.facts.mounted(v, n) && r.now.facts[holderField(v)] != n
}

func (r *review) checkForeign() {
	harness.Must(r.env.Bystanders.Check())
	for _, d := range r.env.foreign {
		d.unchanged(false)
		disk, ok := r.now.disks[d.id]
		if !ok && r.now.disks != nil {
			fail("the foreign disk %s does not exist any more", d.name)
		}
		if ok && (disk.Name != d.name || disk.Description != "made by hand" ||
			r.env.nodeOf(disk.State.Instance) != d.node) {
			fail("the foreign disk %s has become %+v", d.name, disk)
		}
	}
}

// believe makes the observed state the state of the model.
func (r *review) believe() {
	w := r.world
	for s := 1; s < len(snapOf); s++ {
		id := r.now.facts[snapField(s)]
		if id != "" && w.snapshots[id] == nil && w.contents[snapOf[s]] != nil {
			w.snapshots[id] = w.contents[snapOf[s]].clone()
		}
	}
	for v := 1; v < len(kinds); v++ {
		switch before, now := w.seen[diskField(v)], r.now.facts[diskField(v)]; {
		case now == "":
			delete(w.contents, v)
		case now != before:
			w.contents[v] = newContent()
			if s := kinds[v].snap; s != 0 && w.snapshots[r.now.facts[sourceField(v)]] != nil {
				w.contents[v] = w.snapshots[r.now.facts[sourceField(v)]].clone()
			}
		}
		for _, n := range nodes {
			here, lost := w.at(v, n), r.lostBy(v, n) && r.now.facts.mounted(v, n)
			if lost && !here.lost {
				w.contents[v].cut()
			}
			here.lost, here.half, here.shown = lost, lost && here.half, r.now.shown[at(v, n)]
		}
		if w.seen[holderField(v)] != "" && r.now.facts[holderField(v)] == "" &&
			w.contents[v] != nil && slices.ContainsFunc(w.contents[v].written[:],
			func(values []uint64) bool { return len(values) > 1 }) {
			w.contents[v].cut() // data that were not flushed may be lost
		}
	}
	w.seen = r.now.facts
}

// dropLost closes the open devices that the guest does not show any more.
func (r *review) dropLost() {
	for v, n := range everywhere {
		if _, seen := r.now.device(v, n); !seen {
			harness.Must(r.world.at(v, n).drop())
		}
	}
}

func (r *review) checkData() {
	moving := underWay(r.calls)
	for v, c := range r.world.contents {
		for _, n := range nodes {
			if r.world.at(v, n).lost || r.world.mayTouch(holderField(v), moving) {
				continue
			}
			for _, p := range pods {
				f := publishedField(v, n, p)
				if r.now.facts[f] == "" || r.world.mayTouch(f, moving) {
					continue
				}
				if c.partial && kinds[v].snap != 0 {
					r.count.copies++
				}
				data, err := contents(r.env.target(v, n, p), v)
				if err == nil {
					err = c.read(v, data)
				}
				if err == nil && c.forged != nil {
					err = r.env.Proof.Forged.Checked(c.forged.Check(r.env.target(v, n, p)))
				}
				if err != nil {
					r.count.lost += blockSize
					fail("pod %d on %s: %w", p, n, err)
				}
			}
		}
	}
}

// TearDown ends all disturbances, and deletes all volumes and snapshots as an orchestrator does. If
// read is set, it first publishes and reads every volume. It fails if something is left.
func (h *History) TearDown(ctx context.Context, read bool) (err error) {
	defer harness.Catch(&err)
	h.calm(ctx)
	if read {
		h.readAll(ctx)
	}
	for range 4 {
		todo := false
		for v := len(kinds) - 1; v > 0; v-- {
			todo = todo || h.orchestrator.away(v).op != ""
			h.until(ctx, func() (Step, bool) {
				s := h.orchestrator.away(v)
				return s, s.op != ""
			})
		}
		for s := range snapOf {
			if s > 0 && h.world.seen[snapField(s)] != "" {
				todo = true
				h.run(ctx, Step{op: createSnapshot, ctl: 1, snap: s},
					Step{op: deleteSnapshot, ctl: 1, snap: s})
			}
		}
		if !todo {
			h.clean(ctx)
			return nil
		}
	}
	return errors.New("the volumes and snapshots cannot be deleted")
}

// until runs the steps that next() returns. It stops after 20 steps and returns false.
func (h *History) until(ctx context.Context, next func() (s Step, more bool)) bool {
	for range 20 {
		s, more := next()
		if !more {
			return true
		}
		h.run(ctx, s)
	}
	return false
}

// Release unpublishes, unstages and detaches all volumes.
func (h *History) Release(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	harness.Must(h.Wait(ctx))
	for v := 1; v < len(kinds); v++ {
		h.until(ctx, func() (Step, bool) {
			s := h.orchestrator.away(v)
			return s, s.op != "" && s.op != deleteVolume && s.op != createVolume
		})
	}
	return nil
}

// readAll publishes every volume once more, so that checkData reads all acknowledged data.
func (h *History) readAll(ctx context.Context) {
	o := h.orchestrator
	for v := 1; v < len(kinds); v++ {
		h.until(ctx, func() (Step, bool) {
			return o.away(v),
				slices.ContainsFunc(nodes, func(n string) bool { return h.world.at(v, n).lost })
		})
	}
	for v := 1; v < len(kinds); v++ {
		if h.world.seen[diskField(v)] == "" {
			continue
		}
		o.goals[v] = cmp.Or(o.goals[v], "c")
		if !h.until(ctx, func() (Step, bool) {
			s := o.towards(v, o.goals[v])
			return s, s.op != writeSynced
		}) {
			fail("v%d cannot be published on node %s", v, o.goals[v])
		}
	}
}

func (h *History) calm(ctx context.Context) {
	h.run(ctx, Step{op: startRack})
	for _, n := range nodes {
		h.run(ctx, Step{op: startInstance, node: n})
	}
	h.run(ctx, Step{op: wait})
	h.world.faults, h.world.recordsFirst = nil, false
	harness.Must(errors.Join(h.world.dropAll(), h.env.Rack.Admin.ClearFaults(ctx)))
	h.env.recordFirst(ctx, false)
	for v := range kinds {
		h.run(ctx, Step{op: takeNamesake, vol: v})
	}
}

// clean fails if the history has left a volume, a snapshot, a mount or another object.
func (h *History) clean(ctx context.Context) {
	for f, value := range h.world.seen {
		if value != "" {
			fail("at the end %q is %q", f, value)
		}
	}
	for v, n := range everywhere {
		for _, path := range h.env.paths(v, n)[1:] {
			if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
				fail("the target %s still exists", path)
			}
		}
	}
	for _, d := range h.env.foreign {
		d.unchanged(true)
	}
	if err := harness.CheckFlightDirs(slices.Collect(maps.Values(h.env.Nodes))...); err != nil {
		fail("the flight recorders: %w", err)
	}
	harness.Must(h.env.Balance(ctx))
}
