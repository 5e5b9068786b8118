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

// state has the orphans that earlier audits saw, and when each was first seen. It is kept in a file
// for one cluster in one project.
type state struct {
	Version int                  `json:"version"`
	Cluster string               `json:"cluster"`
	Project string               `json:"project"`
	Objects map[string]firstSeen `json:"objects"`
}

// firstSeen is one orphan and when it was first seen.
type firstSeen struct {
	Kind      Kind      `json:"kind"`
	Name      string    `json:"name"`
	Created   time.Time `json:"created"`
	FirstSeen time.Time `json:"firstSeen"`
}

const stateVersion = 1

// readState reads a state file. A file that does not exist yet has no objects.
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
		return none, fmt.Errorf("%s is not a state file of an audit: %w", path, err)
	case s.Version != stateVersion:
		return none, fmt.Errorf("%s has the version %d, not %d", path, s.Version, stateVersion)
	case s.Cluster != cluster || s.Project != project:
		return none, fmt.Errorf("%s belongs to the cluster %q in the project %s, but this audit is of "+
			"%q in %s; use another file", path, s.Cluster, s.Project, cluster, project)
	}
	return s, nil
}

// next returns the state after an audit at a time, by the audit's own clock: a list that is hours
// old shows that an object was not wanted then, and nobody looked since. It drops objects that are
// no longer orphans or are in use, and adds none from a list that is not trusted.
func (s state) next(orphans []object, at time.Time, t trust) state {
	n := s
	n.Objects = map[string]firstSeen{}
	for _, o := range orphans {
		seen, ok := s.Objects[o.ID]
		known := ok && seen.Kind == o.Kind && seen.Name == o.Name && seen.Created.Equal(o.Created)
		switch {
		case o.Foreign != "" || !o.free():
		case known:
			n.Objects[o.ID] = seen
		case t[o.Kind] == "":
			n.Objects[o.ID] = firstSeen{o.Kind, o.Name, o.Created.UTC(), at.UTC()}
		}
	}
	return n
}

// write replaces the file atomically: it always holds the old state or the new one.
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
