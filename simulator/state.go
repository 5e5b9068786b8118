package simulator

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func (s *Server) state() (adminapi.State, error) {
	state := adminapi.State{
		Attachments: []adminapi.Attachment{}, LoopDevices: []adminapi.LoopDevice{},
	}
	err := s.store.view(func(tx *tx) error {
		var err error
		state.StorageBytes, err = tx.storage()
		return errors.Join(err,
			collect(tx, projects, &state.Projects), collect(tx, instances, &state.Instances),
			collect(tx, disks, &state.Disks), collect(tx, snapshots, &state.Snapshots),
			collect(tx, images, &state.Images))
	})
	if err != nil {
		return state, err
	}
	for _, d := range state.Disks {
		if d.State.Instance != "" {
			state.Attachments = append(state.Attachments,
				adminapi.Attachment{InstanceID: d.State.Instance, DiskID: d.ID})
		}
	}
	devices, err := s.plane.OwnDevices()
	for _, d := range devices {
		state.LoopDevices = append(state.LoopDevices,
			adminapi.LoopDevice{
				Path: d.Path, Serial: d.Serial, BackingFile: d.BackingFile})
	}
	return state, err
}

// collect decodes every record of a table into the admin listener's type, which has the record's
// JSON keys.
func collect[R, T any](tx *tx, t table[R], into *[]T) error {
	*into = []T{}
	return t.bucket(tx).ForEach(func(id, data []byte) error {
		var record T
		if err := json.Unmarshal(data, &record); err != nil {
			return fmt.Errorf("read the record of %s %s: %w", t.name, id, err)
		}
		*into = append(*into, record)
		return nil
	})
}
