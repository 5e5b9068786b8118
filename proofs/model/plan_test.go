//go:build linux

package model

// towards returns the orchestrator's next call towards a pod that uses the volume on a node.
func (h *history) towards(v int, n string) step {
	f, ctl := h.world.seen, 1+int(h.value+uint64(len(h.lines)))%2
	holder := f[holderField(v)]
	switch {
	case h.world.rackDown:
		return step{op: startRack}
	case h.world.namesakes[at(v, n)] && len(h.lines)%3 == 0:
		return step{op: takeNamesake, vol: v} // in the meantime the calls are refused
	case f[diskField(v)] == "" || h.orchestrator.volumes[v].GetVolumeId() != f[diskField(v)]:
		return h.towardsDisk(v, ctl)
	case holder != "" && holder != n:
		s, _ := h.away(v)
		return s
	case holder == "" || h.orchestrator.published[at(v, n)] == nil:
		return step{op: attach, ctl: ctl, vol: v, node: n}
	case h.world.down[n]:
		return step{op: startInstance, node: n}
	case h.world.bare[at(v, n)] && len(h.lines)%3 == 1:
		return step{op: stopInstance, node: n} // a started instance has the devices of all its disks
	case h.world.lost[at(v, n)] || h.world.bare[at(v, n)] && len(h.lines)%3 == 2:
		s, _ := h.away(v)
		return s
	case !h.staged[at(v, n)] || !kinds[v].block() && f[stagedField(v, n)] == "":
		return step{op: stage, vol: v, node: n}
	case !f.published(v, n):
		return step{op: publish, vol: v, node: n, pod: 1}
	case kinds[v].shared && f[publishedField(v, n, 2)] == "":
		return step{op: publish, vol: v, node: n, pod: 2}
	}
	s := step{op: writeSynced, vol: v, node: n, pod: 1, block: int(h.value) % blocks}
	if f[publishedField(v, n, 1)] == "" {
		s.pod = 2
	}
	return s
}

// towardsDisk returns the next call towards a volume's creation. If the volume is restored from a
// snapshot, the snapshot and its volume are created first.
func (h *history) towardsDisk(v, ctl int) step {
	snap := kinds[v].snap
	switch {
	case snap == 0 || h.orchestrator.snapshots[snap] != "" &&
		h.world.seen[snapField(snap)] == h.orchestrator.snapshots[snap]:
		return step{op: createVolume, ctl: ctl, vol: v}
	case h.orchestrator.volumes[snapOf[snap]] == nil || h.world.seen[diskField(snapOf[snap])] == "":
		return h.towardsDisk(snapOf[snap], ctl)
	}
	return step{op: createSnapshot, ctl: ctl, snap: snap}
}

// away returns the orchestrator's next call towards the deletion of a volume, or false if the
// volume is deleted.
func (h *history) away(v int) (step, bool) {
	f, ctl := h.world.seen, 1+len(h.lines)%2
	for _, n := range nodes {
		if h.world.down[n] {
			continue // the node has no mounts, and no driver runs
		}
		for _, p := range pods {
			if f[publishedField(v, n, p)] != "" || h.orchestrator.given[publishedField(v, n, p)] {
				return step{op: unpublish, vol: v, node: n, pod: p}, true
			}
		}
		if h.world.held[at(v, n)] {
			return step{op: letGo, vol: v, node: n, pod: 1}, true
		}
		if f[stagedField(v, n)] != "" || h.orchestrator.staged[at(v, n)] {
			return step{op: unstage, vol: v, node: n}, true
		}
	}
	switch {
	case f[holderField(v)] != "":
		return step{op: detach, ctl: ctl, vol: v, node: f[holderField(v)]}, true
	case f[diskField(v)] == "":
		return step{}, false
	case h.orchestrator.volumes[v].GetVolumeId() != f[diskField(v)]:
		return step{op: createVolume, ctl: ctl, vol: v}, true
	}
	return step{op: deleteVolume, ctl: ctl, vol: v}, true
}
