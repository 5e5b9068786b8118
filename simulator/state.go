package simulator

import "errors"

// State is all that a rack has at one moment, for tests that count what is left.
type State struct {
	Projects    []project        `json:"projects"`
	Instances   []instance       `json:"instances"`
	Disks       []disk           `json:"disks"`
	Snapshots   []snapshotRecord `json:"snapshots"`
	Images      []image          `json:"images"`
	Attachments []attachment     `json:"attachments"`
	LoopDevices []loopDevice     `json:"loop_devices"`
	// StorageBytes is what disks and snapshots take of the quota, deleted ones until they are freed.
	StorageBytes int64 `json:"storage_bytes"`
}

type attachment struct {
	InstanceID string `json:"instance_id"`
	DiskID     string `json:"disk_id"`
}

type loopDevice struct {
	Path        string `json:"path"`
	Serial      string `json:"serial"`
	BackingFile string `json:"backing_file"`
}

func (s *Server) state() (State, error) {
	state := State{Attachments: []attachment{}, LoopDevices: []loopDevice{}}
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
			state.Attachments = append(state.Attachments, attachment{d.State.Instance, d.ID})
		}
	}
	devices, err := s.plane.ownDevices()
	for _, d := range devices {
		state.LoopDevices = append(state.LoopDevices,
			loopDevice{d.Path, d.Serial, d.BackingFile})
	}
	return state, err
}

// collect reads every record of a table.
func collect[T any](tx *tx, t table[T], into *[]T) error {
	*into = []T{}
	return t.each(tx, func(record T) error {
		*into = append(*into, record)
		return nil
	})
}
