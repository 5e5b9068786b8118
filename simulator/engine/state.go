package engine

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
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
	err = r.store.View(func(tx *store.Tx) error {
		version = tx.ID()
		var err error
		state.StorageBytes, err = tx.Storage()
		return errors.Join(err,
			collect(tx, store.Projects, &state.Projects), collect(tx, store.Instances, &state.Instances),
			collect(tx, store.Disks, &state.Disks), collect(tx, store.Snapshots, &state.Snapshots),
			collect(tx, store.Images, &state.Images))
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
	err = r.store.View(func(tx *store.Tx) error {
		version = tx.ID()
		return nil
	})
	return version, err
}

// collect decodes every record of a table into the admin listener's type, which has the same JSON
// keys as the record.
func collect[R, T any](tx *store.Tx, t store.Table[R], into *[]T) error {
	*into = []T{}
	return t.EachRaw(tx, func(id string, data []byte) error {
		var record T
		if err := json.Unmarshal(data, &record); err != nil {
			return fmt.Errorf("read the record of %s %s: %w", t.Name, id, err)
		}
		*into = append(*into, record)
		return nil
	})
}
