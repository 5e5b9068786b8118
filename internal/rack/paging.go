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

// maxListBytes limits the list in a response, below gRPC's default limit of 4 MiB. Further entries
// are on the next page, even if the CO set no limit.
const maxListBytes = 7 << 19

// Pager selects one CSI page from a list that is sorted by id. The page's token contains the last
// id of the page before. So any controller can return the page again, and new or deleted objects do
// not move others to another page. The token also contains the rack's page token, so that the pager
// need not read the rack's list from its start.
type Pager struct {
	world World
	from  string // token of the rack's page to begin with; empty for the first
	after string
	limit int // 0 means no limit

	page  string // token of the rack's page that is being visited
	seen  string // the last id that the rack has listed
	pages int    // number of requested pages
	taken int
	bytes int
	last  string
	Next  string
}

// NewPager returns a Pager for at most maxEntries entries after startingToken; 0 means no limit.
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

// Take adds an entry to the page. It returns false if the entry belongs to an earlier or later
// page.
func (p *Pager) Take(id string, entry proto.Message) bool {
	const frame = 8 // bytes around an entry in the response
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

// Full reports whether Take has refused an entry because the page is full.
func (p *Pager) Full() bool { return p.Next != "" }

// nextPage returns the token of the rack's next page, and the number of objects to request. For a
// CSI page with a limit, the second request asks for one object, to show whether an entry follows
// the page. More requests are needed only if objects are filtered out.
func (p *Pager) nextPage(token string) (page string, limit int) {
	p.page = cmp.Or(token, p.from)
	p.pages++
	switch {
	case p.limit == 0 || p.pages > 2:
		return p.page, pageSize
	case p.taken == p.limit:
		return p.page, 1
	}
	return p.page, min(p.limit, pageSize)
}

// checkPage checks that the rack lists objects in the order of ids. Otherwise the next CSI page,
// which begins after this page's last id, could omit objects. It also checks their project, because
// a caller may forge the rack's page token, which names a project.
func checkPage[T any](p *Pager, objects []T) error {
	for i := range objects {
		o := identify(&objects[i])
		switch err := p.world.has("listed object", o.id, o.project); {
		case err != nil && p.from != "":
			return startingTokenInvalid()
		case err != nil:
			return err
		case o.id < p.seen:
			return InvalidResponse("list", "the object %.80q is listed after %.80q: expected the order "+
				"of ids", o.id, p.seen)
		}
		p.seen = o.id
	}
	return nil
}

type page[T any] struct {
	Items    []T
	NextPage string
}

// maxEmptyPages limits the consecutive empty pages of a list, and maxPages all its pages.
const maxEmptyPages, maxPages = 10, 1000

// eachObject visits the objects of a list until visit() returns true or an error. The rack names a
// next page after every page with objects, and may list more objects after an empty page.
// eachObject returns an error if a page or object repeats, or if the list does not end.
func eachObject[T any](ctx context.Context, doing string,
	fetch func(token string) (*page[T], error), visit func(*T) (enough bool, err error)) error {
	tokens, ids := map[string]bool{}, map[string]bool{}
	for token, empty := "", 0; ; {
		p, err := fetch(token)
		switch {
		case err != nil:
			return Error(ctx, doing, err)
		case p.Items == nil:
			// The rack sends the list even if it is empty. A response without it is from another server. If
			// it were taken for an empty page, all objects could seem to be lost.
			return InvalidResponse("list", "the page has no list of objects")
		}
		if empty++; len(p.Items) > 0 {
			empty = 0
		}
		for i := range p.Items {
			id := identify(&p.Items[i]).id
			if ids[id] && id != "" {
				return InvalidResponse("list", "the object %.80q is listed twice", id)
			}
			ids[id] = true
			if enough, err := visit(&p.Items[i]); enough || err != nil {
				return err
			}
		}
		switch token = p.NextPage; {
		case token == "":
			return nil
		case tokens[token]:
			return InvalidResponse("list", "its pages repeat")
		case empty > maxEmptyPages:
			return InvalidResponse("list", "%d pages in a row are empty and name a next one", empty)
		case len(tokens) >= maxPages:
			return InvalidResponse("list", "it has more than %d pages", maxPages)
		}
		tokens[token] = true
	}
}

// leastPageSize is the smallest limit of a rack's page: a rack sends 100 objects if the request has
// no limit, and allows up to 10000 (dropshot, server.rs: page_default_nitems, page_max_nitems).
const leastPageSize = 100

// wholeInOne returns "" if the page is shorter than every limit and therefore the last, otherwise
// the token of the next page. The rack sends a token even with the last page (dropshot,
// pagination.rs: ResultsPage::new). Use it only for lists that the rack reads with one query and
// does not filter, such as an instance's disks (omicron, datastore/disk.rs: instance_list_disks).
func wholeInOne(objects int, next string) string {
	if 0 < objects && objects < leastPageSize {
		return ""
	}
	return next
}

type object struct{ id, name, project, state string }

func identify(of any) object {
	switch o := of.(type) {
	case *oxide.Disk:
		return object{o.Id, string(o.Name), o.ProjectId, string(o.State.State())}
	case *oxide.Snapshot:
		return object{o.Id, string(o.Name), o.ProjectId, string(o.State)}
	case *oxide.Instance:
		return object{o.Id, string(o.Name), o.ProjectId, string(o.RunState)}
	case *oxide.DeviceAccessToken:
		return object{id: o.Id}
	}
	return object{}
}

// EachDisk visits the project's disks in the order of ids, from the pager's token on.
func (c *Client) EachDisk(ctx context.Context, pages *Pager,
	visit func(*oxide.Disk) (enough bool, err error)) error {
	return eachFrom(ctx, c, pages, "list disks", func(p oxide.DiskListParams) (*page[oxide.Disk],
		error) {
		disks, err := c.DiskList(ctx, p)
		return (*page[oxide.Disk])(disks), err
	}, visit)
}

// EachSnapshot visits the project's snapshots in the order of ids, from the pager's token on.
func (c *Client) EachSnapshot(ctx context.Context, pages *Pager,
	visit func(*oxide.Snapshot) (enough bool, err error)) error {
	return eachFrom(ctx, c, pages, "list snapshots", func(p oxide.DiskListParams) (
		*page[oxide.Snapshot], error) {
		snapshots, err := c.SnapshotList(ctx, oxide.SnapshotListParams(p))
		return (*page[oxide.Snapshot])(snapshots), err
	}, visit)
}

func eachFrom[T any](ctx context.Context, c *Client, pages *Pager, doing string,
	list func(oxide.DiskListParams) (*page[T], error),
	visit func(*T) (enough bool, err error)) (err error) {
	if pages.world, err = c.World(ctx); err != nil {
		return err
	}
	return eachObject(ctx, doing, func(token string) (*page[T], error) {
		token, limit := pages.nextPage(token)
		found, err := list(c.listParams(token, limit))
		switch {
		case err != nil && token != "" && token == pages.from && errors.Is(err, oxide.ErrHTTP400):
			// A rack refuses a page token of another rack or release.
			return nil, startingTokenInvalid()
		case err != nil:
			return nil, err
		}
		return found, checkPage(pages, found.Items)
	}, visit)
}

// listParams returns the parameters for a list of the project's objects in the order of ids. A page
// token already contains the project and the order.
func (c *Client) listParams(token string, limit int) oxide.DiskListParams {
	if token != "" {
		return oxide.DiskListParams{Limit: &limit, PageToken: token}
	}
	return oxide.DiskListParams{Limit: &limit, Project: c.ProjectParam(),
		SortBy: oxide.NameOrIdSortModeIdAscending}
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
	return eachObject(ctx, "list instances", func(token string) (*page[oxide.Instance], error) {
		instances, err := c.InstanceList(ctx, oxide.InstanceListParams(c.listParams(token, pageSize)))
		return (*page[oxide.Instance])(instances), err
	}, all(visit))
}

// EachToken visits the access tokens of the user to whom the driver's token belongs.
func (c *Client) EachToken(ctx context.Context, visit func(*oxide.DeviceAccessToken)) error {
	return eachObject(ctx, "list the user's tokens", func(token string) (
		*page[oxide.DeviceAccessToken], error) {
		tokens, err := c.CurrentUserAccessTokenList(ctx, oxide.CurrentUserAccessTokenListParams{
			Limit: oxide.NewPointer(pageSize), PageToken: token})
		return (*page[oxide.DeviceAccessToken])(tokens), err
	}, all(visit))
}

func all[T any](visit func(*T)) func(*T) (enough bool, err error) {
	return func(object *T) (enough bool, err error) {
		visit(object)
		return false, nil
	}
}

// Holders returns the instances whose lists of disks contain the disk. Use it for a disk in a state
// that names no instance, such as faulted.
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
				// The zero World matches every project: the instance may have disks of other projects.
				disks, err := c.disksOf(ctx, World{}, oxide.NameOrId(all[i]))
				if !csierr.IsNotFound(err) { // a deleted instance has no disks
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

// A starting token is the last entry's id, a dot, and the token of the rack's page on which the
// list continues. CSI allows 128 bytes and the rack's token has about 200, so it is compressed. If
// the result is still too long, it is only the id, and the pager skips the entries up to the id.

// packToken returns a starting token. The parameter page is "" for the rack's first page.
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
	const most = 512 // limit of the rack's own token
	raw, err := io.ReadAll(io.LimitReader(
		flate.NewReaderDict(bytes.NewReader(data), tokenDictionary(project)), most))
	if err != nil {
		return "", "", false
	}
	page = base64.URLEncoding.EncodeToString(raw)
	return after, page, packToken(project, after, page) == token
}

// tokenDictionary returns text that most of the rack's page tokens contain. As the dictionary of
// the compression, this text makes the compressed tokens shorter.
func tokenDictionary(project string) []byte {
	return []byte(`{"v":"v1","page_start":{"sort_by":"id_ascending","project":"` + project +
		`","last_seen":""}}`)
}
