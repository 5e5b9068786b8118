package console

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

// diskAbout is the description of a disk on its page.
type diskAbout struct {
	adminapi.Disk
	Instance  string
	Allocated int64
	Tag       []setting
	Snapshots []snapshot
}

// tagWords are the labels for the fields of a tag, in the order in which they are shown.
var tagWords = []setting{{"name", "CSI name"}, {"claim", "claim"}, {"cluster", "cluster"},
	{"origin", "birth"}, {"use", "use"}}

// watched is the disk that a page shows, or the disk to which the page's list of requests is
// limited.
type watched struct {
	// name is the disk's name, ID or label; "" means every disk.
	name string
	// about is the disk in the records, if found is true.
	about diskAbout
	found bool
}

// watch finds a disk in the records.
func watch(state adminapi.State, name string) watched {
	w := watched{name: name}
	i := slices.IndexFunc(state.Disks, func(d adminapi.Disk) bool {
		return d.ID == name || d.Name == name || label(d) == name
	})
	if name == "" || i < 0 {
		return w
	}
	w.about.Disk, w.found = state.Disks[i], true
	for _, s := range state.Snapshots {
		if s.DiskID == w.about.ID {
			w.about.Snapshots = append(w.about.Snapshots, snapshot{s.ID, s.Name, s.State, s.Size})
		}
	}
	for _, i := range state.Instances {
		if i.ID == w.about.State.Instance {
			w.about.Instance = i.Name
		}
	}
	tag := readTag(w.about.Description)
	for _, word := range tagWords {
		if value, ok := tag[word.Name]; ok {
			w.about.Tag = append(w.about.Tag, setting{word.Value, value})
			delete(tag, word.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(tag)) {
		w.about.Tag = append(w.about.Tag, setting{name, tag[name]})
	}
	return w
}

// wants reports whether a request concerns the disk or a snapshot of it. It recognizes a deleted
// disk by the name in its requests.
func (w watched) wants(r *adminapi.Request) bool {
	is := func(name string) bool {
		return name != "" && (r.Object == name || r.ObjectID == name ||
			strings.Contains(r.Path, "/disks/"+name))
	}
	return w.name == "" || is(w.name) || is(w.about.ID) || is(w.about.Name) ||
		slices.ContainsFunc(w.about.Snapshots, func(s snapshot) bool { return r.ObjectID == s.ID })
}

func (w watched) wantsEntry(e *flightlog.Entry) bool {
	return w.name == "" || e.Volume == w.name || e.Disk == w.name ||
		w.found && e.Volume == w.about.ID
}

func diskRule(f adminapi.DiskFault) string {
	does := "fails"
	switch {
	case f.Hang:
		does = "hangs"
	case f.Lie:
		does = "is not done, and succeeds"
	case f.Delay > 0:
		text, _ := f.Delay.MarshalText()
		does = "takes " + string(text) + " longer"
	}
	where, often := "", ""
	if f.From != 0 || f.To != 0 {
		where = fmt.Sprintf(" of the bytes %d to %d", f.From, f.To)
	}
	if f.Times > 0 {
		often = fmt.Sprintf(" %d times", f.Times)
	}
	return fmt.Sprintf("%s%s %s%s; struck %d times", strings.Join(f.On, ", "), where, does, often,
		f.Fired)
}

func (c *Console) diskPage(w http.ResponseWriter, r *http.Request) {
	state, version, err := c.state()
	disk := watch(state, r.PathValue("disk"))
	var more Disk
	if err == nil && disk.found {
		more, err = c.Disk(disk.about.ID)
	}
	if c.answered(w, r, err, version, more) {
		return
	}
	status, title := http.StatusOK, "Disk "+label(disk.about.Disk)
	if !disk.found {
		status, title = http.StatusNotFound, "A disk that is gone"
	}
	disk.about.Allocated = more.AllocatedBytes
	var armed []string
	for _, f := range more.Faults {
		armed = append(armed, diskRule(f))
	}
	c.show(w, r, status, "disk.tmpl", page{Title: title, Live: true, Body: struct {
		Found bool
		Name  string
		About diskAbout
		Disk
		Armed []string
		Rows  []row
	}{disk.found, disk.name, disk.about, more, armed, c.rows(state, disk)}})
}

type curve struct {
	Name, Points string
	Now          int
}

// plotted is the plot of a disk's activity, 59 units wide and 40 high.
type plotted struct {
	Most   int
	Curves []curve
}

func plot(all []Activity) plotted {
	p := plotted{Most: 1}
	kinds := []struct {
		name string
		of   func(Activity) int
	}{
		{"reads", func(a Activity) int { return a.Reads }},
		{"writes", func(a Activity) int { return a.Writes }},
		{"flushes", func(a Activity) int { return a.Flushes }},
	}
	for _, a := range all {
		p.Most = max(p.Most, a.Reads, a.Writes, a.Flushes)
	}
	for _, kind := range kinds {
		c := curve{Name: kind.name}
		var points []string
		for x, a := range all {
			c.Now = kind.of(a)
			points = append(points, fmt.Sprintf("%d,%.1f", x,
				40-40*float64(c.Now)/float64(p.Most)))
		}
		c.Points = strings.Join(points, " ")
		p.Curves = append(p.Curves, c)
	}
	return p
}

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
	requests := c.Requests(shownRows, disk.wants)
	entries := c.Flights(shownRows, disk.wantsEntry)
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
