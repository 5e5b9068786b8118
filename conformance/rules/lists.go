package rules

import (
	"cmp"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

var ofLists = []tested{
	{"A09", "disk_create disk_list snapshot_list instance_list image_list", func(c *Check) { // pages
		disks, before := []string{}, c.name() // a page after "before" has no disks of earlier checks
		var known []listed
		for range 3 {
			known = append(known, c.item(c.disk()))
			disks = append(disks, known[len(known)-1].Name)
		}
		id := c.page("the first of the check's disks",
			"/v1/disks?limit=1&"+c.after("name_ascending", string(before))).Items
		if len(id) != 1 || id[0].Name != disks[0] {
			c.fatalf("the page of one disk after a name: expected %s; found %v", disks[0], id)
		}
		for _, test := range []struct{ what, query, names string }{
			{"two disks after the first by name", "limit=2&" + c.after("name_ascending", disks[0]),
				disks[1] + " " + disks[2]},
			{"two disks before the last by name", "limit=2&" + c.after("name_descending", disks[2]),
				disks[1] + " " + disks[0]},
			{"a disk by ID", "limit=1&" + c.after("id_ascending", previous(id[0].ID)), disks[0]},
			{"a disk after a token, with other parameters",
				"limit=1&project=nobodys&sort_by=name_descending&" + c.after("name_ascending", disks[0]),
				disks[1]},
		} {
			equal(c, test.what, c.page(test.what, "/v1/disks?"+test.query).names(), test.names)
		}
		c.checkToken("name_ascending", "")
		c.checkToken("id_ascending", "&sort_by=id_ascending")
		if n := len(c.page("disks", "/v1/disks?"+c.inProject()).Items); n > 100 {
			c.errorf("a page without a limit: expected 100 disks at most; found %d", n)
		}
		var snapshots, instances, images []listed
		for range 2 {
			disk := c.disk()
			snapshot := c.snapshot(disk.Id).must()
			known, snapshots = append(known, c.item(disk)), append(snapshots, c.item(snapshot))
			instances = append(instances, c.item(c.createInstance(c.newInstance()).must()))
			images = append(images, c.item(c.createImage(c.image(snapshot.Id)).must()))
		}
		another := c.disk()
		began, project := *another.TimeCreated, "?"+c.inProject()+"&"
		c.checkList("disk_list", "/v1/disks"+project, known, began, func() (gone, made listed) {
			c.deleteDisk(another.Id).must()
			return c.item(another), c.item(c.disk())
		})
		c.checkList("snapshot_list", "/v1/snapshots"+project, snapshots, began, nil)
		c.checkList("instance_list", "/v1/instances"+project, instances, began, nil)
		c.checkList("image_list", "/v1/images"+project, images, began, nil)
		own := c.item(c.viewProject(c.Project).must())
		c.checkList("project_list", "/v1/projects?", []listed{own}, began, nil)
		const token = "failed to parse pagination token: "
		c.expect([]expected{
			{"a limit beyond the greatest", get("/v1/disks?limit=99999&" + c.inProject()), ok},
			{"a limit of nothing", get("/v1/disks?limit=0&" + c.inProject()),
				badQuery("invalid value: integer `0`, expected a nonzero u32")},
			{"a token of 513 bytes", get("/v1/disks?page_token=" + strings.Repeat("A", 513)),
				badQuery(token + "too large")},
			{"a token of nothing", get("/v1/disks?page_token=e30="), badQuery(token + "corrupted token")},
			{"a limit with a sign", get("/v1/disks?limit=%2B2&" + c.inProject()), ok},
		})
		for given, want := range map[string]string{"!": "Invalid symbol 33, offset 0.",
			"A": "Invalid input length: 1", "AA": "Invalid padding", "AB==": "Invalid last symbol 66, " +
				"offset 1.", "A===": "Invalid symbol 61, offset 1.", "AAAA=AAA": "Invalid symbol 61, offset 4.",
			"AA!AA": "Invalid symbol 33, offset 2.", "!AAA!": "Invalid symbol 33, offset 4.",
			"eyJ2IjoidjIifQ==": "corrupted token"} {
			request := get("/v1/disks?page_token=" + url.QueryEscape(given))
			equal(c, "the token "+given, c.Send(request).Refused(), badQuery(token+want))
		}
	}},
	{"A10", "instance_disk_list instance_disk_attach", func(c *Check) { // the last page
		disk, instance := c.disk(), c.StoppedInstance()
		path := "/v1/instances/" + instance.Id + "/disks"
		c.checkEmptyPage("an empty list", path)
		c.attach(disk.Id, instance.Id).must()
		last := c.page("a list of one disk", path)
		equal(c, "a list of one disk", last.names(), string(disk.Name))
		if last.NextPage == nil {
			c.fatalf("the last page that is not empty: expected a token; found null")
		}
		c.checkEmptyPage("the page after the last object",
			path+"?page_token="+url.QueryEscape(*last.NextPage))
		second := c.disk()
		c.attach(second.Id, instance.Id).must()
		c.checkList("instance_disk_list", path+"?", []listed{c.item(disk), c.item(second)},
			*second.TimeCreated, nil)
		equal(c, "the disks on a page for more than there are",
			len(c.page("a list of two disks", path+"?limit=100").Items), 2)
	}},
	{"A62", "disk_list disk_view", func(c *Check) { // queries
		disk := c.disk()
		list := "/v1/disks?" + c.inProject()
		const noOrder = "unknown variant ``, expected one of `name_ascending`, `name_descending`, " +
			"`id_ascending`"
		c.expect([]expected{
			{"a limit that is no number", get(list + "&limit=x"), badQuery("invalid digit found in string")},
			{"a limit beyond 32 bits", get(list + "&limit=5000000000"),
				badQuery("number too large to fit in target type")},
			{"an empty limit", get(list + "&limit="), badQuery("cannot parse integer from empty string")},
			{"an empty order", get(list + "&sort_by="), badQuery(noOrder)},
			{"an empty token", get(list + "&page_token="),
				badQuery("failed to parse pagination token: corrupted token")},
			{"an empty project", get("/v1/disks?project="), badQuery(notAName)},
			{"no project", get("/v1/disks"), badQuery("missing field `project`")},
			{"two projects, the first a bad one", get("/v1/disks?limit=1&project=X&" + c.inProject()), ok},
			{"two projects, the last a bad one", get(list + "&project=X"), badQuery(notAName)},
			{"two orders, the first a bad one", get(list + "&limit=1&sort_by=x&sort_by=id_ascending"), ok},
			{"two limits", get(list + "&limit=1&limit=1"), badQuery("duplicate field `limit`")},
			{"two projects for one disk", get("/v1/disks/" + string(disk.Name) + "?" + c.inProject() + "&" +
				c.inProject()), badQuery("duplicate field `project`")},
			{"an empty project for an ID", get("/v1/disks/" + disk.Id + "?project="), badQuery(notAName)},
			{"two unknown parameters", get("/v1/disks/" + disk.Id + "?x=1&x=2"), ok},
		})
	}},
}

// reading is one read of a whole list, in one order and with one page size.
type reading struct {
	order string
	limit int // the size of the pages
	pages [][]listed
	// gone has the IDs of the objects that were deleted before this reading. During the reading, the
	// objects in deleted were deleted, and those in made were created on pages not yet read.
	gone          []string
	deleted, made []listed
}

var orders = map[string]func(a, b listed) int{
	"name_ascending":  func(a, b listed) int { return cmp.Compare(a.Name, b.Name) },
	"name_descending": func(a, b listed) int { return cmp.Compare(b.Name, a.Name) },
	"id_ascending":    func(a, b listed) int { return cmp.Compare(a.ID, b.ID) },
}

// creation is the longest time from an object's time_created until lists show it.
var creation = time.Minute

// judgeReadings compares readings of a list, in the order of time, and returns what is wrong. Each
// reading must have the known objects. Any other object must be in all readings between the first
// and the last that has it. If its time_created is before began-creation, it must also be in all
// earlier readings. If it still exists, it must also be in all later readings.
func judgeReadings(readings []reading, known []listed, began time.Time,
	exists func(id string) bool) (wrong []string) {
	seen, first, last := map[string]listed{}, map[string]int{}, map[string]int{}
	see := func(i int, item listed) { // the readings come in order
		if _, is := seen[item.ID]; !is {
			if seen[item.ID], first[item.ID] = item, i; item.Made.Before(began.Add(-creation)) {
				first[item.ID] = 0
			}
		}
		last[item.ID] = i
	}
	for i, r := range readings {
		for _, item := range slices.Concat(r.pages...) {
			see(i, item)
		}
		for _, item := range r.made {
			see(i, item)
			first[item.ID], last[item.ID] = i, len(readings)
		}
		for _, item := range r.deleted {
			see(i-1, item)
			first[item.ID] = 0
		}
	}
	for _, k := range known {
		see(0, k)
		first[k.ID], last[k.ID] = 0, len(readings)
	}
	for id := range last {
		if last[id] < len(readings)-1 && exists(id) {
			last[id] = len(readings)
		}
	}
	for i, r := range readings {
		all := slices.Concat(r.pages...)
		what := fmt.Sprintf("in the order %s, in pages of %d", r.order, r.limit)
		has := map[string]bool{}
		for at, item := range all {
			has[item.ID] = true
			if at > 0 && orders[r.order](all[at-1], item) >= 0 {
				wrong = append(wrong, fmt.Sprintf("%s: %s follows %s", what, item.Name, all[at-1].Name))
			}
			if slices.Contains(r.gone, item.ID) {
				wrong = append(wrong, what+": it has "+item.Name+", which was deleted before")
			}
		}
		for id, item := range seen {
			if !has[id] && first[id] <= i && i <= last[id] {
				wrong = append(wrong, what+": it lacks "+item.Name+", which exists")
			}
		}
		for n, page := range r.pages {
			if n < smallPages && len(page) > r.limit {
				wrong = append(wrong, fmt.Sprintf("%s: a page has %d objects", what, len(page)))
			}
		}
	}
	return wrong
}

const (
	// After smallPages small pages, a reading continues with large ones.
	smallPages = 24
	// allAtOnce is a page size that exceeds every list's length.
	allAtOnce = 10000
)

// readList reads a list to its end. After the first page it calls between(), unless that is nil. It
// returns false if it read the last pages with a greater limit than r.limit.
func (c *Check) readList(list, path string, r *reading, between func()) (whole bool) {
	what := fmt.Sprintf("%s in the order %s, in pages of %d", list, r.order, r.limit)
	base, _, _ := strings.Cut(path, "?")
	next, limit := path+"sort_by="+r.order, r.limit
	before := map[string]bool{}
	for {
		page := c.page(what, fmt.Sprintf("%s&limit=%d", next, limit))
		r.pages = append(r.pages, page.Items)
		if before[next] {
			c.fatalf("%s: page %d has the token of an earlier one, so it has no end", what, len(r.pages))
		}
		before[next] = true
		if page.NextPage == nil || len(page.Items) == 0 {
			return limit == r.limit
		}
		if len(r.pages) == 1 && between != nil {
			between()
		}
		if len(r.pages) == smallPages {
			limit = max(limit, allAtOnce)
		}
		next = base + "?page_token=" + url.QueryEscape(*page.NextPage)
	}
}

// checkList reads a list of n objects in each order, in pages of 1, 2, 3, n-1 and n objects, and
// compares the readings. One reading calls between(), unless that is nil, to delete an object of
// the list and to create another one.
func (c *Check) checkList(list, path string, known []listed, began time.Time,
	between func() (gone, made listed)) {
	readings, gone := []reading{{order: "id_ascending", limit: allAtOnce}}, []string{}
	c.readList(list, path, &readings[0], nil)
	n := len(slices.Concat(readings[0].pages...))
	looked := map[string][]string{"id_ascending": {"all"}}
	for _, order := range []string{"name_ascending", "name_descending", "id_ascending"} {
		for _, limit := range []int{1, 2, 3, max(n-1, 1), max(n, 1)} {
			r := reading{order: order, limit: limit, gone: slices.Clone(gone)}
			var during func()
			if between != nil && len(readings) == 2 {
				during = func() {
					deleted, made := between()
					gone, r.deleted = append(gone, deleted.ID), []listed{deleted}
					if last := r.pages[0][len(r.pages[0])-1]; orders[order](last, made) < 0 {
						r.made = append(r.made, made)
					}
				}
			}
			if c.readList(list, path, &r, during) {
				looked[order] = append(looked[order], strconv.Itoa(limit))
			}
			readings = append(readings, r)
		}
	}
	view, _, _ := strings.Cut(path, "?")
	for _, wrong := range judgeReadings(readings, known, began, func(id string) bool {
		at := view + "/" + id
		if list == "instance_disk_list" {
			at = "/v1/disks/" + id
		}
		return c.Send(get(at)).Status == 200
	}) {
		c.errorf("%s %s", list, wrong)
	}
	c.extent.Look(report.Measure{What: list, Looked: int64(n), Unit: "objects"})
	whole := report.Measure{What: list + " as a set", Of: int64(len(readings)), Unit: "readings"}
	for _, order := range slices.Sorted(maps.Keys(looked)) {
		whole.Looked += int64(len(looked[order]))
		whole.Words += fmt.Sprintf("%s in pages of %s; ", order, strings.Join(looked[order], ", "))
	}
	whole.Words = strings.TrimSuffix(whole.Words, "; ")
	c.extent.Look(whole)
}

func (c *Check) item(object any) listed {
	shown := fieldsOf[listed](c, object)
	if shown.Made.IsZero() {
		c.fatalf("%s (%s): expected the time of its creation; found none", shown.Name, shown.ID)
	}
	return shown
}

type listPage struct {
	NextPage *string  `json:"next_page"`
	Items    []listed `json:"items"`
}

type listed struct {
	ID   string    `json:"id"`
	Name string    `json:"name"`
	Made time.Time `json:"time_created"`
}

func (p listPage) names() string {
	var names []string
	for _, item := range p.Items {
		names = append(names, item.Name)
	}
	return strings.Join(names, " ")
}

func (c *Check) page(what, path string) listPage {
	a := c.Send(get(path))
	var page listPage
	if err := json.Unmarshal(a.Body, &page); err != nil || a.Status != 200 {
		c.fatalf("%s: expected a page; found HTTP %d %s", what, a.Status, a.Body)
	}
	return page
}

// tokenText returns the decoded token of the page after lastSeen.
func (c *Check) tokenText(sortBy, lastSeen string) string {
	return fmt.Sprintf(`{"v":"v1","page_start":{"sort_by":%q,"project":%q,"last_seen":%q}}`, sortBy,
		c.Project, lastSeen)
}

func (c *Check) after(sortBy, lastSeen string) string {
	return "page_token=" + url.QueryEscape(base64.URLEncoding.EncodeToString(
		[]byte(c.tokenText(sortBy, lastSeen))))
}

// previous returns the UUID before id. A page that begins after that UUID begins with id.
func previous(id string) string {
	parsed, err := uuid.Parse(id)
	if err != nil {
		return id
	}
	n := new(big.Int).SetBytes(parsed[:])
	n.Sub(n, big.NewInt(1)).FillBytes(parsed[:])
	return parsed.String()
}

// checkToken checks the token that a page with only the first disk returns.
func (c *Check) checkToken(sortBy, query string) {
	what := "the first disk with " + sortBy
	first := c.page(what, "/v1/disks?limit=1&"+c.inProject()+query)
	if len(first.Items) != 1 || first.NextPage == nil {
		c.fatalf("%s: expected one disk and a token; found %v", what, first.Items)
	}
	last := first.Items[0].Name
	if sortBy == "id_ascending" {
		last = first.Items[0].ID
	}
	held, err := base64.URLEncoding.DecodeString(*first.NextPage)
	c.must("decode the token behind "+what, err)
	equal(c, "the token behind "+what, string(held), c.tokenText(sortBy, last))
}

func (c *Check) checkEmptyPage(what, path string) {
	page := c.object(what, c.Send(get(path)))
	equal(c, what+": its items", string(page["items"]), "[]")
	equal(c, what+": its token", string(page["next_page"]), "null")
}
