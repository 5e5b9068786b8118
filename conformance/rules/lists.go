package rules

import (
	"cmp"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
)

// reading is a list that was read to its end, in one order and with one size of page.
type reading struct {
	order string
	// limit is the size of the pages.
	limit int
	pages [][]listed
	// gone are the IDs of objects that were deleted before it began. deleted are objects that existed
	// until it began. made are objects that were made during it, and come behind the pages that had
	// been read by then.
	gone          []string
	deleted, made []listed
}

// orders are the orders of a list. Each compares two neighbours.
var orders = map[string]func(a, b listed) int{
	"name_ascending":  func(a, b listed) int { return cmp.Compare(a.Name, b.Name) },
	"name_descending": func(a, b listed) int { return cmp.Compare(b.Name, a.Name) },
	"id_ascending":    func(a, b listed) int { return cmp.Compare(a.ID, b.ID) },
}

// creation is the most that the creation of an object by others may take until it is listed.
var creation = time.Minute

// judgeReadings compares readings of a list, in the order in which they were made, with each other
// and with objects that existed all the time. Others may make and delete objects meanwhile. An
// object existed at a reading if it is in an earlier and in a later one, if it was made before the
// first one began, or if it is there afterwards.
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
	// smallPages is the number of pages of a few objects after which a reading goes on with large
	// ones.
	smallPages = 24
	// allAtOnce is more than a list has.
	allAtOnce = 10000
)

// readList reads a list to its end, and calls between, if it is not nil, after the first page. It
// reports whether all its pages had the limit that was asked for.
func (c *Check) readList(list, path string, r *reading, between func()) (whole bool) {
	what := fmt.Sprintf("%s in the order %s, in pages of %d", list, r.order, r.limit)
	base, _, _ := strings.Cut(path, "?")
	next, limit := path+"sort_by="+r.order, r.limit
	before := map[string]bool{}
	for {
		page := c.page(what, fmt.Sprintf("%s&limit=%d", next, limit))
		r.pages = append(r.pages, page.Items)
		if before[next] {
			c.Fatalf("%s: page %d has the token of an earlier one, so it has no end", what, len(r.pages))
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

// checkList reads a list in each order, in pages of 1, 2, 3, all and all but one, and compares it
// as a set. It begins after the given time. The function between, if it is not nil, deletes an
// object of the list and makes another one during one of the readings.
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
		c.Errorf("%s %s", list, wrong)
	}
	c.extent.Look(report.Measure{What: list, Looked: int64(n), Unit: "objects"})
	whole := report.Measure{What: list + " as a set", Of: int64(len(readings)), Unit: "readings"}
	for _, order := range slices.Sorted(maps.Keys(looked)) {
		whole.Looked += int64(len(looked[order]))
		whole.Words += fmt.Sprintf("%s in pages of %s; ", order, strings.Join(looked[order], ", "))
	}
	whole.Words = strings.TrimSuffix(whole.Words, "; ")
	c.extent.Look(whole)
	if c.readings != nil {
		c.readings(list, readings, known, began)
	}
}

func itemOf(disk *oxide.Disk) listed {
	return listed{disk.Id, string(disk.Name), *disk.TimeCreated}
}

// checkLists demands that each list has all its objects, whatever its order and its pages. The
// disks exist already.
func (c *Check) checkLists(disks []listed) {
	var snapshots, instances, images []listed
	for range 2 {
		disk := c.Disk()
		disks = append(disks, itemOf(disk))
		snapshot := Must[*oxide.Snapshot](c, "take a snapshot")(c.Snapshot(disk.Id))
		snapshots = append(snapshots, listed{snapshot.Id, string(snapshot.Name), *snapshot.TimeCreated})
		instance := Must[*oxide.Instance](c, "create an instance")(c.CreateInstance(c.NewInstance()))
		instances = append(instances, listed{instance.Id, string(instance.Name), *instance.TimeCreated})
		image := Must[*oxide.Image](c, "create an image")(c.createImage(c.image(snapshot.Id)))
		images = append(images, listed{image.Id, string(image.Name), *image.TimeCreated})
	}
	another := c.Disk()
	began := *another.TimeCreated
	c.checkList("disk_list", "/v1/disks?"+c.inProject()+"&", disks, began, func() (gone, made listed) {
		c.must("delete a disk while the disks are listed", c.DeleteDisk(another.Id))
		return itemOf(another), itemOf(c.Disk())
	})
	c.checkList("snapshot_list", "/v1/snapshots?"+c.inProject()+"&", snapshots, began, nil)
	c.checkList("instance_list", "/v1/instances?"+c.inProject()+"&", instances, began, nil)
	c.checkList("image_list", "/v1/images?"+c.inProject()+"&", images, began, nil)
	own := Must[*oxide.Project](c, "read the project")(c.Client.ProjectView(c.ctx,
		oxide.ProjectViewParams{Project: c.project()}))
	c.checkList("project_list", "/v1/projects?",
		[]listed{{own.Id, string(own.Name), *own.TimeCreated}}, began, nil)
}
