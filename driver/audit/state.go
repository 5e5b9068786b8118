package audit

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// state is what earlier audits saw: orphans, and when each was seen first. It is a file of the
// operator's, and good for one cluster in one project.
type state struct {
	Version int                  `json:"version"`
	Cluster string               `json:"cluster"`
	Project string               `json:"project"`
	Objects map[string]firstSeen `json:"objects"`
}

// firstSeen is of one orphan, by id.
type firstSeen struct {
	Kind    Kind      `json:"kind"`
	Name    string    `json:"name"`
	Created time.Time `json:"created"`
	First   time.Time `json:"first"`
}

const stateVersion = 1

// readState reads a state file; one that does not exist yet has no objects.
func readState(path, cluster, project string) (state, error) {
	none := state{Version: stateVersion, Cluster: cluster, Project: project}
	if path == "" {
		return none, nil
	}
	data, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return none, nil
	case err != nil:
		return none, err
	}
	var s state
	switch err := json.Unmarshal(data, &s); {
	case err != nil:
		return none, fmt.Errorf("%s is no state file of an audit: %w", path, err)
	case s.Version != stateVersion:
		return none, fmt.Errorf("%s has the version %d, not %d", path, s.Version, stateVersion)
	case s.Cluster != cluster || s.Project != project:
		return none, fmt.Errorf("%s is of the cluster %q in the project %s, this audit is of %q in "+
			"%s; use a file of its own", path, s.Cluster, s.Project, cluster, project)
	}
	return s, nil
}

// next is the state after an audit whose list was made at a time. What is no orphan any more,
// or is in use, is dropped; a list that is not to be trusted adds nothing.
func (s state) next(orphans []object, at time.Time, t trust) state {
	n := s
	n.Objects = map[string]firstSeen{}
	for _, o := range orphans {
		seen, ok := s.Objects[o.ID]
		known := ok && seen.Kind == o.Kind && seen.Name == o.Name && seen.Created.Equal(o.Created)
		switch {
		case o.Why != "" || !o.free():
		case known:
			n.Objects[o.ID] = seen
		case t[o.Kind] == "":
			n.Objects[o.ID] = firstSeen{o.Kind, o.Name, o.Created.UTC(), at.UTC()}
		}
	}
	return n
}

// write replaces the file, so that it holds the old state or the new one whatever happens.
func (s state) write(path string) (err error) {
	if path == "" {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("--state-file: %w", err)
		}
	}()
	data, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		return err
	}
	file, err := os.CreateTemp(filepath.Dir(path), filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	_, writeErr := file.Write(append(data, '\n'))
	if err := errors.Join(writeErr, file.Sync(), file.Close()); err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	if err := os.Rename(file.Name(), path); err != nil {
		return errors.Join(err, os.Remove(file.Name()))
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}
