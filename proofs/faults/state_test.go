package faults_test

import (
	"context"
	"fmt"
	"maps"
	"strings"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// rackState is the complete state of the rack. The keys of disks and snapshots are the
// orchestrator's names or, if they have none, their own.
type rackState struct {
	Disks     map[string]disk
	Snapshots map[string]snapshot
	// Devices is the number of loop devices for each serial.
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

// fresh replaces the IDs of objects that did not exist when the cell began.
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
		insert(w.Disks, d.Name, d.Description, entry)
	}
	for _, s := range state.Snapshots {
		insert(w.Snapshots, s.Name, s.Description,
			snapshot{ID: s.ID, Disk: s.DiskID, State: s.State, Size: s.Size})
	}
	for _, d := range state.LoopDevices {
		w.Devices[d.Serial]++
	}
	return w, nil
}

// insert adds an object to a table. If the name is taken, insert adds a number to it.
func insert[T any](table map[string]T, name, description string, object T) {
	if given := harness.NameIn(description); given != "" {
		name = given
	}
	for n := 2; ; n++ {
		if _, taken := table[name]; !taken {
			table[name] = object
			return
		}
		name = fmt.Sprintf("%s (%d)", strings.TrimSuffix(name, fmt.Sprintf(" (%d)", n-1)), n)
	}
}

func (state rackState) clone() rackState {
	return rackState{Disks: maps.Clone(state.Disks), Snapshots: maps.Clone(state.Snapshots),
		Devices: maps.Clone(state.Devices), Storage: state.Storage}
}

// since returns the state with the ID fresh for all objects that an earlier state does not have.
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

// differs returns the difference from another state, or "" if the states are equal.
func (state rackState) differs(from rackState) string { return cmp.Diff(from, state) }
