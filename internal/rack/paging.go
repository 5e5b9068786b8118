package rack

import (
	"bytes"
	"cmp"
	"compress/flate"
	"context"
	"encoding/base64"
	"errors"
	"io"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

const pageSize = 1000

// maxListBytes is the largest list that the driver returns, below gRPC's default limit of 4 MiB.
// The rest is on the next page, even if the CO asked for everything.
const maxListBytes = 7 << 19

// Pager selects one CSI page from a listing in the order of ids. Its token contains the last id of
// the page before, so that any controller can return a page again, and so that objects that come
// and go do not shift others to another page. It also contains the rack's own token, with which the
// listing continues.
type Pager struct {
	world World
	from  string // the rack's page to begin with; empty for the first
	after string
	limit int // 0 means no limit

	page  string // the rack's page that is being visited
	seen  string // the last id that the rack has listed
	pages int    // that were asked for
	taken int
	bytes int
	last  string
	Next  string
}

// NewPager begins a page of at most maxEntries entries after a starting token; 0 means no limit.
func (c *Client) NewPager(ctx context.Context, startingToken string, maxEntries int32) (p *Pager,
	err error) {
	if maxEntries < 0 {
		return nil, csierr.New(csierr.FieldInvalid, "max_entries is negative")
	}
	p = &Pager{limit: int(maxEntries)}
	if startingToken == "" {
		return p, nil
	}
	if p.world, err = c.World(ctx); err != nil {
		return nil, err
	}
	var ok bool
	if p.after, p.from, ok = unpackToken(p.world.Project, startingToken); !ok {
		return nil, startingTokenInvalid()
	}
	return p, nil
}

func startingTokenInvalid() error {
	return csierr.New(csierr.StartingTokenInvalid, "starting_token is not one of this driver; begin "+
		"the listing again without one")
}

// Take adds an entry to this page and reports whether it did. An entry of an earlier or later page
// is not added.
func (p *Pager) Take(id string, entry proto.Message) bool {
	const frame = 8 // around an entry in the response
	if id <= p.after || p.Next != "" {
		return false
	}
	size := proto.Size(entry) + frame
	if p.limit > 0 && p.taken == p.limit || p.taken > 0 && p.bytes+size > maxListBytes {
		p.Next = packToken(p.world.Project, p.last, p.page)
		return false
	}
	p.taken, p.bytes, p.last = p.taken+1, p.bytes+size, id
	return true
}

// Full reports whether the page is complete.
func (p *Pager) Full() bool { return p.Next != "" }

// nextPage returns the rack's next page and how many objects to request. If most of the objects
// belong to the listing, a page takes two requests: one for its entries, and one for the entry
// after them.
func (p *Pager) nextPage(token string) (page string, limit *int) {
	if p.page = token; token == "" {
		p.page = p.from
	}
	p.pages++
	n := pageSize
	switch {
	case p.limit == 0 || p.pages > 2:
	case p.taken == p.limit:
		n = 1
	default:
		n = min(p.limit, pageSize)
	}
	return p.page, &n
}

// checkPage checks that the rack lists the project's objects in the order of ids, as it was asked
// to. A CSI page begins after the last id of the page before, so it would omit objects in another
// order. Each object has to be in the project, because the rack's own token names a project, which
// a caller may have changed.
func checkPage[T any](p *Pager, objects []T) error {
	for i := range objects {
		id, project := identity(&objects[i])
		switch {
		case p.world.Project == "", project == p.world.Project:
		case p.from != "":
			return startingTokenInvalid()
		default:
			return p.world.has("listed object", id, project)
		}
		if id < p.seen {
			return InvalidResponse("list", "the object %.80q is listed after %.80q: expected the order "+
				"of ids", id, p.seen)
		}
		p.seen = id
	}
	return nil
}

// pageError converts the rack's refusal of a page. The token of another rack or release is as
// invalid as one that is not the driver's.
func (p *Pager) pageError(ctx context.Context, doing string, err error) error {
	if p.page != "" && p.page == p.from && errors.Is(err, oxide.ErrHTTP400) {
		return startingTokenInvalid()
	}
	return Error(ctx, doing, err)
}

// eachObject visits the objects of all the rack's pages until visit has enough or fails. The
// rack names a next page after every page that is not empty, and an empty page need not be the
// last.
func eachObject[T any](fetch func(token string) (items []T, next string, err error),
	visit func(*T) (enough bool, err error)) error {
	walk := pageWalk{tokens: map[string]bool{}, objects: map[string]bool{}}
	for token := ""; ; {
		items, next, err := fetch(token)
		if err != nil {
			return err
		}
		if items == nil {
			// The rack's empty page has an empty list. A response without a list comes from another server,
			// and the objects that it does not list would appear to be lost.
			return InvalidResponse("list", "the page has no list of objects")
		}
		for i := range items {
			if err := walk.object(&items[i]); err != nil {
				return err
			}
			if enough, err := visit(&items[i]); enough || err != nil {
				return err
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

// leastPageSize is less than or equal to every limit that a rack puts on its pages: it allows 10000
// objects, and sends 100 if the request names no limit (dropshot, server.rs: page_max_nitems,
// page_default_nitems).
const leastPageSize = 100

// wholeInOne returns the token of the next page, or "" if the page is shorter than every limit and
// so is the last one. That holds only for a list that the rack reads with one query and does not
// filter afterwards, such as the disks of an instance (omicron, datastore/disk.rs:
// instance_list_disks). The rack names a next page nevertheless (dropshot, pagination.rs:
// ResultsPage::new).
func wholeInOne(objects int, next string) string {
	if 0 < objects && objects < leastPageSize {
		return ""
	}
	return next
}

// maxEmptyPages limits the empty pages in a row, and maxPages the pages of a list.
const maxEmptyPages, maxPages = 10, 1000

// pageWalk stops a listing that would not end. On a rack in order no page and no object appears
// twice.
type pageWalk struct {
	tokens, objects map[string]bool
	empty           int
}

func (w *pageWalk) object(object any) error {
	id, _ := identity(object)
	if w.objects[id] && id != "" {
		return InvalidResponse("list", "the object %.80q is listed twice", id)
	}
	w.objects[id] = true
	return nil
}

func (w *pageWalk) page(objects int, next string) error {
	w.empty++
	if objects > 0 {
		w.empty = 0
	}
	switch {
	case w.tokens[next]:
		return InvalidResponse("list", "its pages repeat")
	case w.empty > maxEmptyPages:
		return InvalidResponse("list", "%d pages in a row are empty and name a next one", w.empty)
	case len(w.tokens) >= maxPages:
		return InvalidResponse("list", "it has more than %d pages", maxPages)
	}
	w.tokens[next] = true
	return nil
}

func identity(object any) (id, project string) {
	switch o := object.(type) {
	case *oxide.Disk:
		return o.Id, o.ProjectId
	case *oxide.Snapshot:
		return o.Id, o.ProjectId
	case *oxide.Instance:
		return o.Id, o.ProjectId
	case *oxide.DeviceAccessToken:
		return o.Id, ""
	}
	return "", ""
}

// EachDisk visits the project's disks in the order of their ids, beginning at the pager's token.
func (c *Client) EachDisk(ctx context.Context, pages *Pager,
	visit func(*oxide.Disk) (enough bool, err error)) (err error) {
	if pages.world, err = c.World(ctx); err != nil {
		return err
	}
	return eachObject(func(token string) ([]oxide.Disk, string, error) {
		var params oxide.DiskListParams
		if params.PageToken, params.Limit = pages.nextPage(token); params.PageToken == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.DiskList(ctx, params)
		if err != nil {
			return nil, "", pages.pageError(ctx, "list disks", err)
		}
		return page.Items, page.NextPage, checkPage(pages, page.Items)
	}, visit)
}

// EachSnapshot visits the project's snapshots in the order of their ids, beginning at the pager's
// token.
func (c *Client) EachSnapshot(ctx context.Context, pages *Pager,
	visit func(*oxide.Snapshot) (enough bool, err error)) (err error) {
	if pages.world, err = c.World(ctx); err != nil {
		return err
	}
	return eachObject(func(token string) ([]oxide.Snapshot, string, error) {
		var params oxide.SnapshotListParams
		if params.PageToken, params.Limit = pages.nextPage(token); params.PageToken == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.SnapshotList(ctx, params)
		if err != nil {
			return nil, "", pages.pageError(ctx, "list snapshots", err)
		}
		return page.Items, page.NextPage, checkPage(pages, page.Items)
	}, visit)
}

// BootDisks returns the ids of the project's boot disks.
func (c *Client) BootDisks(ctx context.Context) (map[string]bool, error) {
	boot := map[string]bool{}
	err := c.EachInstance(ctx, func(instance *oxide.Instance) {
		boot[strings.ToLower(instance.BootDiskId)] = true
	})
	return boot, err
}

// EachInstance visits the project's instances.
func (c *Client) EachInstance(ctx context.Context, visit func(*oxide.Instance)) error {
	return eachObject(func(token string) ([]oxide.Instance, string, error) {
		params := oxide.InstanceListParams{Limit: oxide.NewPointer(pageSize), PageToken: token}
		if token == "" {
			params.Project, params.SortBy = c.ProjectParam(), oxide.NameOrIdSortModeIdAscending
		}
		page, err := c.InstanceList(ctx, params)
		if err != nil {
			return nil, "", Error(ctx, "list instances", err)
		}
		return page.Items, page.NextPage, nil
	}, func(instance *oxide.Instance) (enough bool, err error) {
		visit(instance)
		return false, nil
	})
}

// EachToken visits the access tokens of the token's user.
func (c *Client) EachToken(ctx context.Context, visit func(*oxide.DeviceAccessToken)) error {
	return eachObject(func(token string) ([]oxide.DeviceAccessToken, string, error) {
		page, err := c.CurrentUserAccessTokenList(ctx, oxide.CurrentUserAccessTokenListParams{
			Limit: oxide.NewPointer(pageSize), PageToken: token,
		})
		if err != nil {
			return nil, "", Error(ctx, "list the user's tokens", err)
		}
		return page.Items, page.NextPage, nil
	}, func(token *oxide.DeviceAccessToken) (enough bool, err error) {
		visit(token)
		return false, nil
	})
}

// Holders returns the instances of the project that list the disk. It is for a disk in a state that
// names no instance, such as faulted.
func (c *Client) Holders(ctx context.Context, disk string) ([]string, error) {
	var all []string
	if err := c.EachInstance(ctx, func(i *oxide.Instance) { all = append(all, i.Id) }); err != nil {
		return nil, err
	}
	const atOnce = 16
	found, errs := make([]bool, len(all)), make([]error, len(all))
	var asked async.Group
	for n := range min(atOnce, len(all)) {
		asked.Go(func() {
			for i := n; i < len(all); i += atOnce {
				// The other disks may be in any project.
				disks, err := c.disksOf(ctx, World{}, oxide.NameOrId(all[i]))
				if !csierr.IsNotFound(err) { // if so, the instance was deleted meanwhile
					errs[i] = err
				}
				found[i] = slices.ContainsFunc(disks, func(d oxide.Disk) bool { return d.Id == disk })
			}
		})
	}
	asked.Wait()
	var holders []string
	for i, id := range all {
		if found[i] {
			holders = append(holders, id)
		}
	}
	return holders, cmp.Or(errs...)
}

// A starting token is the id of the last returned entry and, after a dot, the rack's token of the
// page on which the listing continues. CSI allows 128 bytes and the rack's token has about 200, so
// it is deflated. If it still does not fit it is left out: the listing then begins at the rack's
// first page and skips what was returned before.

// packToken returns the token that continues after an id; page is empty for the rack's first page.
func packToken(project, after, page string) string {
	raw, err := base64.URLEncoding.DecodeString(page)
	if err != nil || page == "" || base64.URLEncoding.EncodeToString(raw) != page {
		return after
	}
	var packed bytes.Buffer
	w, err := flate.NewWriterDict(&packed, flate.BestCompression, tokenDictionary(project))
	if err != nil {
		panic(err) // the level is valid
	}
	_, _ = w.Write(raw) // a buffer never fails
	_ = w.Close()
	token := after + "." + base64.RawURLEncoding.EncodeToString(packed.Bytes())
	if len(token) > volume.MaxStringBytes {
		return after
	}
	return token
}

func unpackToken(project, token string) (after, page string, ok bool) {
	after, packed, paged := strings.Cut(token, ".")
	switch {
	case !volume.IsID(after) || len(token) > volume.MaxStringBytes:
		return "", "", false
	case !paged:
		return after, "", true
	}
	data, err := base64.RawURLEncoding.DecodeString(packed)
	if err != nil {
		return "", "", false
	}
	const most = 512 // of the rack's own token
	raw, err := io.ReadAll(io.LimitReader(
		flate.NewReaderDict(bytes.NewReader(data), tokenDictionary(project)), most))
	if err != nil {
		return "", "", false
	}
	page = base64.URLEncoding.EncodeToString(raw)
	return after, page, packToken(project, after, page) == token
}

// tokenDictionary returns what the rack's token is likely to contain. Only the length of our tokens
// depends on it.
func tokenDictionary(project string) []byte {
	return []byte(`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"` + project +
		`","last_seen":""}}`)
}
