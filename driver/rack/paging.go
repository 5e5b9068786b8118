package rack

import (
	"context"
	"errors"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// pageSize is how many objects the driver asks the rack for at once.
const pageSize = 1000

// mostListBytes is the largest list that the driver answers, below gRPC's default limit of 4 MiB.
// What does not fit is on the next page, also when the CO asked for everything.
const mostListBytes = 7 << 19

// Pager cuts a CSI page out of a listing in the order of ids. Its token is the last id of the page
// before, so that a page can be asked for again, from any controller, and objects that come and go
// move no others; and the rack's own token, with which the listing goes on where it was.
type Pager struct {
	project string
	from    string // the rack's page to begin with; empty for the first
	after   string
	most    int // 0 means no limit

	page  string // the rack's page that is being visited
	pages int    // that were asked for
	taken int
	bytes int
	last  string
	Next  string
}

// NewPager begins a page of at most maxEntries entries, 0 for no limit, behind a starting token.
func (c *Client) NewPager(startingToken string, maxEntries int32) (*Pager, error) {
	if maxEntries < 0 {
		return nil, csierr.New(csierr.FieldInvalid, "max_entries is negative")
	}
	p := &Pager{project: c.Project, most: int(maxEntries)}
	if startingToken == "" {
		return p, nil
	}
	var ok bool
	if p.after, p.from, ok = unpackToken(p.project, startingToken); !ok {
		return nil, startingTokenInvalid()
	}
	return p, nil
}

func startingTokenInvalid() error {
	return csierr.New(csierr.StartingTokenInvalid, "starting_token is none that "+
		"this driver gave; begin the listing again without one")
}

// Take puts an object that belongs into the listing on this page, if it belongs there.
func (p *Pager) Take(id string, entry proto.Message) bool {
	const frame = 8 // around an entry in the answer
	if id <= p.after || p.Next != "" {
		return false
	}
	size := proto.Size(entry) + frame
	if p.most > 0 && p.taken == p.most || p.taken > 0 && p.bytes+size > mostListBytes {
		p.Next = packToken(p.project, p.last, p.page)
		return false
	}
	p.taken, p.bytes, p.last = p.taken+1, p.bytes+size, id
	return true
}

// Full says that nothing more can be taken.
func (p *Pager) Full() bool { return p.Next != "" }

// ask says which page of the rack comes next, and how many objects to ask for. Two requests make a
// page as long as most of the objects belong into the listing: one for its entries, and one for the
// entry behind them.
func (p *Pager) ask(token string) (page string, limit *int) {
	if p.page = token; token == "" {
		p.page = p.from
	}
	p.pages++
	n := pageSize
	switch {
	case p.most == 0 || p.pages > 2:
	case p.taken == p.most:
		n = 1
	default:
		n = min(p.most, pageSize)
	}
	return p.page, &n
}

// problem is what the rack has against a page. A token of another rack's, or of another release, is
// none of this driver's.
func (p *Pager) problem(ctx context.Context, doing string, err error) error {
	if p.page != "" && p.page == p.from && errors.Is(err, oxide.ErrHTTP400) {
		return startingTokenInvalid()
	}
	return Error(ctx, doing, err)
}

// eachObject visits the objects of all the rack's pages until visit says that it has enough. The
// rack names a next page after every page that is not empty, and a page that is empty need not be
// the last one.
func eachObject[T any](fetch func(token string) (items []T, next string, err error),
	visit func(*T) (enough bool)) error {
	var walk pageWalk
	for token := ""; ; {
		items, next, err := fetch(token)
		if err != nil {
			return err
		}
		if items == nil {
			// The rack's empty page has a list, an empty one. Without any it is somebody else's
			// answer, and what is not listed would pass for lost.
			return InvalidResponse("list", "the page has no list of objects")
		}
		for i := range items {
			if err := walk.object(objectID(&items[i])); err != nil {
				return err
			}
			if visit(&items[i]) {
				return nil
			}
		}
		if next == "" {
			return nil
		}
		if err := walk.page(len(items), next); err != nil {
			return err
		}
		token = next
	}
}

// mostEmptyPages is how many pages in a row may be empty and not the last.
const mostEmptyPages = 10

// pageWalk ends a listing that would not end: no page and no object comes twice in one, for the
// rack goes by an order in which each is behind the one before.
type pageWalk struct {
	tokens, objects map[string]bool
	empty           int
}

func (w *pageWalk) object(id string) error {
	if w.objects[id] && id != "" {
		return InvalidResponse("list", "the object %.80q is listed twice", id)
	}
	if w.objects == nil {
		w.objects = map[string]bool{}
	}
	w.objects[id] = true
	return nil
}

// page takes note of a page of that many objects and the token of the next one.
func (w *pageWalk) page(objects int, next string) error {
	w.empty++
	if objects > 0 {
		w.empty = 0
	}
	switch {
	case w.tokens[next]:
		return InvalidResponse("list", "its pages go round in a circle")
	case w.empty > mostEmptyPages:
		return InvalidResponse("list", "%d pages in a row are empty and name a next one", w.empty)
	}
	if w.tokens == nil {
		w.tokens = map[string]bool{}
	}
	w.tokens[next] = true
	return nil
}

// objectID is the id of an object that a rack lists.
func objectID(object any) string {
	switch o := object.(type) {
	case *oxide.Disk:
		return o.Id
	case *oxide.Snapshot:
		return o.Id
	case *oxide.Instance:
		return o.Id
	}
	return ""
}

// EachDisk visits the project's disks in the order of their ids, from where the pages begin.
func (c *Client) EachDisk(ctx context.Context, pages *Pager,
	visit func(*oxide.Disk) (enough bool)) error {
	return eachObject(func(token string) ([]oxide.Disk, string, error) {
		var params oxide.DiskListParams
		if params.PageToken, params.Limit = pages.ask(token); params.PageToken == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.DiskList(ctx, params)
		if err != nil {
			return nil, "", pages.problem(ctx, "list disks", err)
		}
		return page.Items, page.NextPage, nil
	}, visit)
}

// EachSnapshot visits the project's snapshots in the order of their ids, from where the pages
// begin.
func (c *Client) EachSnapshot(ctx context.Context, pages *Pager,
	visit func(*oxide.Snapshot) bool) error {
	return eachObject(func(token string) ([]oxide.Snapshot, string, error) {
		var params oxide.SnapshotListParams
		if params.PageToken, params.Limit = pages.ask(token); params.PageToken == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.SnapshotList(ctx, params)
		if err != nil {
			return nil, "", pages.problem(ctx, "list snapshots", err)
		}
		return page.Items, page.NextPage, nil
	}, visit)
}

// BootDisks are the ids of the project's boot disks.
func (c *Client) BootDisks(ctx context.Context) (map[string]bool, error) {
	boot := map[string]bool{}
	err := eachObject(func(token string) ([]oxide.Instance, string, error) {
		params := oxide.InstanceListParams{Limit: oxide.NewPointer(pageSize), PageToken: token}
		if token == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.InstanceList(ctx, params)
		if err != nil {
			return nil, "", Error(ctx, "list instances", err)
		}
		return page.Items, page.NextPage, nil
	}, func(instance *oxide.Instance) (enough bool) {
		boot[strings.ToLower(instance.BootDiskId)] = true
		return false
	})
	return boot, err
}
