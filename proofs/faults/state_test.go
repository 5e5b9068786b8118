package faults_test

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"strings"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// rackState is all that the rack has: disks and snapshots by the name that the orchestrator gave
// them, or else by their own.
type rackState struct {
	Disks     map[string]disk
	Snapshots map[string]snapshot
	// Devices are how many loop devices carry a serial.
	Devices map[string]int
	Storage int64
}

type disk struct {
	ID, Name, State, At, From string
	Size                      int64
	BlockSize                 int
}

type snapshot struct {
	ID, Disk, State string
	Size            int64
}

// fresh is the ID of what was not there when the cell began.
const fresh = "new"

// readState reads the rack's state.
func readState(ctx context.Context, admin adminapi.Client) (rackState, error) {
	w := rackState{Disks: map[string]disk{}, Snapshots: map[string]snapshot{},
		Devices: map[string]int{}}
	state, err := admin.State(ctx)
	if err != nil {
		return w, err
	}
	w.Storage = state.StorageBytes
	for _, d := range state.Disks {
		entry := disk{ID: d.ID, Name: d.Name, State: d.State.State, At: d.State.Instance,
			Size: d.Size, BlockSize: d.BlockSize}
		if d.SnapshotID != nil {
			entry.From = *d.SnapshotID
		}
		if d.ImageID != nil {
			entry.From = *d.ImageID
		}
		insert(w.Disks, nameOf(d.Name, d.Description), entry)
	}
	for _, s := range state.Snapshots {
		insert(w.Snapshots, nameOf(s.Name, s.Description),
			snapshot{ID: s.ID, Disk: s.DiskID, State: s.State, Size: s.Size})
	}
	for _, d := range state.LoopDevices {
		w.Devices[d.Serial]++
	}
	return w, nil
}

// insert keeps both of two objects with one name.
func insert[T any](table map[string]T, name string, object T) {
	for n := 2; ; n++ {
		if _, taken := table[name]; !taken {
			table[name] = object
			return
		}
		name = fmt.Sprintf("%s (%d)", strings.TrimSuffix(name, fmt.Sprintf(" (%d)", n-1)), n)
	}
}

// nameOf is the orchestrator's name for an object, which the driver keeps in its description.
func nameOf(name, description string) string {
	var mark struct{ Name string }
	_, text, ok := strings.Cut(description, "csi.oxide.computer ")
	if ok && json.Unmarshal([]byte(text), &mark) == nil && mark.Name != "" {
		return mark.Name
	}
	return name
}

func (state rackState) clone() rackState {
	return rackState{Disks: maps.Clone(state.Disks), Snapshots: maps.Clone(state.Snapshots),
		Devices: maps.Clone(state.Devices), Storage: state.Storage}
}

// since is the state with the IDs of what was not in an earlier one made equal.
func (state rackState) since(earlier rackState) rackState {
	now, known := state.clone(), map[string]bool{}
	for _, d := range earlier.Disks {
		known[d.ID] = true
	}
	for _, s := range earlier.Snapshots {
		known[s.ID] = true
	}
	for name, d := range now.Disks {
		if !known[d.ID] {
			d.ID, d.Name = fresh, ""
			now.Disks[name] = d
		}
	}
	for name, s := range now.Snapshots {
		if !known[s.ID] {
			s.ID = fresh
			now.Snapshots[name] = s
		}
	}
	return now
}

// differs describes how the state differs from another; "" when it does not.
func (state rackState) differs(from rackState) string { return cmp.Diff(from, state) }
