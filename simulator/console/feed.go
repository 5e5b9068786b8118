package console

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// row is a row of the feed: a request, or an entry of a flight record.
type row struct {
	Request *requestRow
	Flight  *flightRow
}

type requestRow struct {
	adminapi.Request
	Who, Disk string
	Bad       bool
}

func newRequestRow(r adminapi.Request) *requestRow {
	// "terraform-provider-oxide/1.2 (…)" is shown as "terraform-provider-oxide".
	who, _, _ := strings.Cut(r.Caller, " ")
	who, _, _ = strings.Cut(who, "/")
	row := &requestRow{Request: r, Who: who, Bad: r.Status == 0 || r.Status >= 400}
	if strings.Contains(r.Path, "/disks") {
		row.Disk = r.ObjectID
	}
	return row
}

// ended returns the time at which the rack answered a request.
func ended(r adminapi.Request) time.Time {
	return r.Time.Add(time.Duration(r.DurationMS * float64(time.Millisecond)))
}

type flightRow struct {
	flightlog.Entry
	Who, Object, About string
	Bad                bool
}

// newFlightRow returns the row of an entry. names has the names of instances and disks by ID. For a
// deleted object the row shows the name in the entry, or the ID.
func newFlightRow(e flightlog.Entry, names map[string]string) *flightRow {
	e.Time = e.Time.UTC()
	about := slices.DeleteFunc([]string{e.Device, e.Path, e.Detail},
		func(s string) bool { return s == "" })
	return &flightRow{Entry: e, Who: cmp.Or(names[e.Instance], e.Instance),
		Object: cmp.Or(names[e.Volume], e.Disk, e.Volume), About: strings.Join(about, ", "),
		Bad: e.Outcome != flightlog.Begun && e.Outcome != flightlog.Done}
}

// shownRows is the number of requests and entries of flight records that a page shows.
const shownRows = 100

// rows returns the requests and the entries of flight records that concern a disk, the newest
// first.
func (c *Console) rows(state adminapi.State, disk watched) (rows []row) {
	names := map[string]string{}
	for _, i := range state.Instances {
		names[i.ID] = i.Name
	}
	for _, d := range state.Disks {
		names[d.ID] = d.Name
	}
	requests := c.Requests(0, shownRows, disk.wants)
	entries := c.Flights(0, shownRows, disk.wantsEntry)
	for len(rows) < shownRows && len(requests)+len(entries) > 0 {
		if len(requests) == 0 || len(entries) > 0 && entries[0].Time.After(ended(requests[0])) {
			rows = append(rows, row{Flight: newFlightRow(entries[0], names)})
			entries = entries[1:]
		} else {
			rows = append(rows, row{Request: newRequestRow(requests[0])})
			requests = requests[1:]
		}
	}
	return rows
}
