package driver

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// sightings is what earlier audits saw: orphans, and when each was seen first. It is a file of the
// operator's, and good for one cluster in one project.
type sightings struct {
	Version int                 `json:"version"`
	Cluster string              `json:"cluster"`
	Project string              `json:"project"`
	Objects map[string]sighting `json:"objects"`
}

// sighting is of one orphan, by id.
type sighting struct {
	Kind    objectKind `json:"kind"`
	Name    string     `json:"name"`
	Created time.Time  `json:"created"`
	First   time.Time  `json:"first"`
}

const sightingsVersion = 1

// readSightings reads a file of sightings; one that is not there yet has none.
func readSightings(path, cluster, project string) (sightings, error) {
	none := sightings{Version: sightingsVersion, Cluster: cluster, Project: project}
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
	var s sightings
	switch err := json.Unmarshal(data, &s); {
	case err != nil:
		return none, fmt.Errorf("%s is no file of sightings: %w", path, err)
	case s.Version != sightingsVersion:
		return none, fmt.Errorf("%s has the version %d, not %d", path, s.Version, sightingsVersion)
	case s.Cluster != cluster || s.Project != project:
		return none, fmt.Errorf("%s is of the cluster %q in the project %s, this audit is of %q in "+
			"%s; use a file of its own", path, s.Cluster, s.Project, cluster, project)
	}
	return s, nil
}

// next are the sightings after an audit whose list was made at a time. What is no orphan any more,
// or is in use, is forgotten; a list that is not to be trusted adds none.
func (s sightings) next(orphans []object, at time.Time, t trust) sightings {
	n := s
	n.Objects = map[string]sighting{}
	for _, o := range orphans {
		seen, ok := s.Objects[o.ID]
		known := ok && seen.Kind == o.Kind && seen.Name == o.Name && seen.Created.Equal(o.Created)
		switch {
		case o.Why != "" || !o.free():
		case known:
			n.Objects[o.ID] = seen
		case t[o.Kind] == "":
			n.Objects[o.ID] = sighting{o.Kind, o.Name, o.Created.UTC(), at.UTC()}
		}
	}
	return n
}

// write replaces the file, so that it has the old sightings or the new ones whatever happens.
func (s sightings) write(path string) (err error) {
	if path == "" {
		return nil
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("--sightings: %w", err)
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
