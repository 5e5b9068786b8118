package simulator

import (
	"errors"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// TestA09AScanReturnsEveryLastingObjectOnceAndInOrder inserts and deletes objects during a scan.
// The scan must return every object that existed all the time exactly once, in order, and no
// object of another project.
func TestA09AScanReturnsEveryLastingObjectOnceAndInOrder(t *testing.T) {
	s, err := store.Open(t.TempDir()+"/rack.db", false)
	simtest.NoError(t, err)
	defer s.Close()
	names := rapid.StringMatching(`[a-z]([-a-z0-9]{0,5}[a-z0-9])?`)
	rapid.Check(t, func(rt *rapid.T) {
		stay := rapid.SliceOfNDistinct(names, 0, 30, rapid.ID).Draw(rt, "stay")
		more := rapid.SliceOfDistinct(names, rapid.ID).Draw(rt, "come and go")
		sortBy := rapid.SampledFrom([]string{store.ByName, store.ByNameDescending, store.ByID}).Draw(rt,
			"order")
		limit := rapid.IntRange(1, 7).Draw(rt, "limit")
		project := store.DerivedID(rapid.StringN(1, 8, 8).Draw(rt, "project"))
		make := func(name string) store.Disk {
			return store.Disk{Identity: store.NewIdentity(store.DerivedID(project, name), name, ""),
				ProjectID: project}
		}
		err := s.Update(func(tx *store.Tx) error {
			if err := store.Prepare(tx, nil); err != nil {
				return err
			}
			neighbour := make("zz")
			neighbour.ID, neighbour.ProjectID = store.DerivedID("x", project), project[:35]+"0"
			return tx.PutDisk(neighbour)
		})
		for _, name := range stay {
			err = errors.Join(err, s.Update(func(tx *store.Tx) error { return tx.PutDisk(make(name)) }))
		}
		var seen []store.Identity
		at := scan{SortBy: sortBy, limit: limit}
		for {
			var items []store.Disk
			err = errors.Join(err, s.View(func(tx *store.Tx) (err error) {
				items, err = store.Disks.Scan(tx, project, at.SortBy, at.LastSeen, at.limit)
				return err
			}))
			if err != nil {
				rt.Fatal(err)
			}
			p := newPage(at, items)
			for _, d := range items {
				seen = append(seen, d.Identity)
			}
			if p.NextPage == nil {
				break
			}
			if at, err = parseToken(*p.NextPage); err != nil {
				rt.Fatal(err)
			}
			at.limit = limit
			if len(more) > 0 {
				d := make(more[0])
				more = more[1:]
				if slices.Contains(stay, d.Name) {
					continue
				}
				err = s.Update(func(tx *store.Tx) error {
					if store.Disks.Taken(tx, project, d.Name) {
						return store.Disks.Delete(tx, d)
					}
					return tx.PutDisk(d)
				})
			}
		}
		var stayed []string
		for _, d := range seen {
			if slices.Contains(stay, d.Name) {
				stayed = append(stayed, d.Name)
			}
		}
		sorted := sortedBy(sortBy, seen)
		if !slices.Equal(seen, sorted) {
			rt.Errorf("not in order: %v", seen)
		}
		slices.Sort(stay)
		slices.Sort(stayed)
		if !slices.Equal(stay, stayed) {
			rt.Errorf("saw %v of %v", stayed, stay)
		}
		clearProject(rt, s, project)
	})
}

func clearProject(rt *rapid.T, s *store.Store, project string) {
	err := s.Update(func(tx *store.Tx) error {
		items, err := store.Disks.Scan(tx, project, store.ByName, nil, maxLimit)
		for _, d := range items {
			err = errors.Join(err, store.Disks.Delete(tx, d))
		}
		return err
	})
	if err != nil {
		rt.Fatal(err)
	}
}
