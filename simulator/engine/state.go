package engine

import (
	"cmp"
	"slices"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// State returns everything that the rack has.
func (r *Simulation) State() (adminapi.State, error) {
	state, _, err := r.RecordedState()
	if err != nil {
		return state, err
	}
	devices, err := r.plane.OwnDevices()
	for _, d := range devices {
		state.LoopDevices = append(state.LoopDevices,
			adminapi.LoopDevice{
				Path: d.Path, Serial: dataplane.SerialOf(d), BackingFile: d.BackingFile})
	}
	return state, err
}

// RecordedState returns the state without the devices, and the version of the records, which
// increases with every change.
func (r *Simulation) RecordedState() (state adminapi.State, version int, err error) {
	state = adminapi.State{
		Attachments: []adminapi.Attachment{}, LoopDevices: []adminapi.LoopDevice{},
	}
	err = r.store.View(func(tx *store.Tx) {
		version, state.StorageBytes = tx.ID(), tx.Storage()
		collect(tx, store.Projects.Name, &state.Projects)
		collect(tx, store.Instances.Name, &state.Instances)
		collect(tx, store.Disks.Name, &state.Disks)
		collect(tx, store.Snapshots.Name, &state.Snapshots)
		collect(tx, store.Images.Name, &state.Images)
	})
	if err != nil {
		return state, 0, err
	}
	state.Machines = r.Machines()
	for _, d := range state.Disks {
		if d.State.Instance != "" {
			state.Attachments = append(state.Attachments,
				adminapi.Attachment{InstanceID: d.State.Instance, DiskID: d.ID})
		}
	}
	return state, version, nil
}

// Machines returns the virtual machines that run.
func (r *Simulation) Machines() (all []adminapi.Machine) {
	const last = 400
	for id, ssh := range r.plane.SSH() {
		m := adminapi.Machine{InstanceID: id, SSH: ssh}
		if text, _, err := r.plane.Console(id, -1-last, last); err == nil {
			m.Console = string(text)
		}
		all = append(all, m)
	}
	slices.SortFunc(all, func(a, b adminapi.Machine) int {
		return cmp.Compare(a.InstanceID, b.InstanceID)
	})
	return all
}

// Version returns the version of the records.
func (r *Simulation) Version() (version int, err error) {
	return reading(r, func(tx *store.Tx) int { return tx.ID() })
}

// collect decodes every record of a table into the admin listener's type, which has the same JSON
// keys as the record.
func collect[T any](tx *store.Tx, table string, into *[]T) {
	*into = slices.AppendSeq([]T{}, store.As[T](tx, table))
}
