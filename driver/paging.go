package driver

import (
	"context"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"
)

// rackPage is how many objects the driver asks the rack for at once.
const rackPage = 1000

// pager cuts a CSI page out of a listing in the order of ids. Its token is the last id of the page
// before, so that a page can be asked for again, from any controller, and objects that come and go
// move no others.
type pager struct {
	after string
	most  int // 0 means no limit

	taken int
	last  string
	next  string
}

func newPager(startingToken string, maxEntries int32) (*pager, error) {
	if maxEntries < 0 {
		return nil, fail(codes.InvalidArgument, ReasonFieldInvalid, "max_entries is negative")
	}
	p := &pager{most: int(maxEntries)}
	if startingToken == "" {
		return p, nil
	}
	id, ok := rackID(startingToken)
	if !ok || string(id) != startingToken {
		return nil, fail(codes.Aborted, ReasonStartingTokenInvalid, "starting_token is none that "+
			"this driver gave; begin the listing again without one")
	}
	p.after = string(id)
	return p, nil
}

// take says whether an object that belongs into the listing belongs on this page.
func (p *pager) take(id string) bool {
	switch {
	case id <= p.after || p.next != "":
		return false
	case p.most > 0 && p.taken == p.most:
		p.next = p.last
		return false
	}
	p.taken, p.last = p.taken+1, id
	return true
}

// full says that nothing more can be taken.
func (p *pager) full() bool { return p.next != "" }

// eachObject visits the objects of all the rack's pages until visit says that it has enough. The
// rack names a next page after every page that is not empty.
func eachObject[T any](fetch func(token string) (items []T, next string, err error),
	visit func(*T) (enough bool)) error {
	token := ""
	for {
		items, next, err := fetch(token)
		switch {
		case err != nil:
			return err
		case items == nil:
			// The rack's empty page has a list, an empty one. Without any it is somebody else's
			// answer, and what is not listed would pass for lost.
			return wrongAnswer("list", "the page has no list of objects")
		}
		for i := range items {
			if visit(&items[i]) {
				return nil
			}
		}
		switch {
		case len(items) == 0 || next == "":
			return nil
		case next == token:
			return wrongAnswer("list", "the page after this one is this one")
		}
		token = next
	}
}

// eachDisk visits the project's disks in the order of their ids.
func (c *Controller) eachDisk(ctx context.Context, visit func(*oxide.Disk) (enough bool)) error {
	return eachObject(func(token string) ([]oxide.Disk, string, error) {
		params := oxide.DiskListParams{Limit: oxide.NewPointer(rackPage), PageToken: token}
		if token == "" {
			params.Project, params.SortBy = c.project(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.Client.DiskList(ctx, params)
		if err != nil {
			return nil, "", statusError(ctx, "list disks", err)
		}
		return page.Items, page.NextPage, nil
	}, visit)
}

// eachSnapshot visits the project's snapshots in the order of their ids.
func (c *Controller) eachSnapshot(ctx context.Context, visit func(*oxide.Snapshot) bool) error {
	return eachObject(func(token string) ([]oxide.Snapshot, string, error) {
		params := oxide.SnapshotListParams{Limit: oxide.NewPointer(rackPage), PageToken: token}
		if token == "" {
			params.Project, params.SortBy = c.project(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.Client.SnapshotList(ctx, params)
		if err != nil {
			return nil, "", statusError(ctx, "list snapshots", err)
		}
		return page.Items, page.NextPage, nil
	}, visit)
}

// bootDisks are the ids of the project's boot disks.
func (c *Controller) bootDisks(ctx context.Context) (map[string]bool, error) {
	boot := map[string]bool{}
	err := eachObject(func(token string) ([]oxide.Instance, string, error) {
		params := oxide.InstanceListParams{Limit: oxide.NewPointer(rackPage), PageToken: token}
		if token == "" {
			params.Project, params.SortBy = c.project(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.Client.InstanceList(ctx, params)
		if err != nil {
			return nil, "", statusError(ctx, "list instances", err)
		}
		return page.Items, page.NextPage, nil
	}, func(instance *oxide.Instance) (enough bool) {
		boot[strings.ToLower(instance.BootDiskId)] = true
		return false
	})
	return boot, err
}
