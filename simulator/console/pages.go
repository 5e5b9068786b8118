package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/flightlog"
)

type card struct {
	ID, Name, State    string
	CanStart, CanStop  bool
	Slots              []slot
	Attached, AllSlots int
	// Machine is nil if the instance does not run in a virtual machine.
	Machine *adminapi.Machine
}

// slot is one of an instance's slots for disks. It is empty if Disk is "".
type slot struct {
	Disk, Label, Title string
	Boot               bool
}

type shelved struct {
	slot
	State     string
	Size      int64
	Snapshots []adminapi.SnapshotRecord
}

type toggle struct {
	ID, Name, Explanation string
	On                    bool
	// Change is the body of the PATCH request that changes the switch to its other value.
	Change string
}

type rackBody struct {
	Cards       []card
	Shelf       []shelved
	Others      []adminapi.SnapshotRecord // the snapshots of attached or deleted disks
	Used, Quota int64
	Toggles     []toggle
	Faults      []adminapi.ActiveFault
	Rows        []row

	Filter     string
	Operations []string
	Settings   []setting
	Presets    []preset
}

type setting struct{ Name, Value string }

// fill sets the fields that depend on the rack's objects. Each instance shows at least limit slots.
func (b *rackBody) fill(state adminapi.State, limit int) {
	disks, snapshots := map[string][]adminapi.Disk{}, map[string][]adminapi.SnapshotRecord{}
	var detached []adminapi.Disk
	for _, s := range state.Snapshots {
		snapshots[s.DiskID] = append(snapshots[s.DiskID], s)
	}
	for _, d := range state.Disks {
		if d.State.Instance == "" {
			detached = append(detached, d)
		} else {
			disks[d.State.Instance] = append(disks[d.State.Instance], d)
		}
	}
	for _, i := range sorted(state.Instances, func(i adminapi.Instance) string { return i.Name }) {
		c := newCard(i, disks[i.ID], limit)
		for _, m := range state.Machines {
			if m.InstanceID == i.ID {
				m.Console = lastLines(m.Console)
				c.Machine = &m
			}
		}
		b.Cards = append(b.Cards, c)
	}
	for _, d := range sorted(detached, func(d adminapi.Disk) string { return d.Name }) {
		b.Shelf = append(b.Shelf, shelved{slotOf(d, false), d.State.State, d.Size, snapshots[d.ID]})
		delete(snapshots, d.ID)
	}
	for _, of := range snapshots {
		b.Others = append(b.Others, of...)
	}
	b.Others = sorted(b.Others, func(s adminapi.SnapshotRecord) string { return s.Name })
}

func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(terminal.ReplaceAllString(text, "")), "\n")
	return strings.ToValidUTF8(strings.Join(lines[max(0, len(lines)-4):], "\n"), "�")
}

var terminal = regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]|[^\P{C}\n]`)

func sorted[T any](all []T, name func(T) string) []T {
	return slices.SortedStableFunc(slices.Values(all),
		func(a, b T) int { return cmp.Compare(name(a), name(b)) })
}

func newCard(i adminapi.Instance, attached []adminapi.Disk, limit int) card {
	c := card{ID: i.ID, Name: i.Name, State: i.RunState, Attached: len(attached),
		AllSlots: max(limit, len(attached)),
		CanStart: i.RunState == "stopped" || i.RunState == "failed",
		CanStop:  i.RunState == "running" || i.RunState == "starting",
		Slots:    make([]slot, 0, limit),
	}
	for _, d := range sorted(attached, func(d adminapi.Disk) string { return d.Name }) {
		if i.BootDiskID != nil && *i.BootDiskID == d.ID {
			c.Slots = slices.Insert(c.Slots, 0, slotOf(d, true))
		} else {
			c.Slots = append(c.Slots, slotOf(d, false))
		}
	}
	c.Slots = append(c.Slots, make([]slot, c.AllSlots-len(c.Slots))...)
	return c
}

func slotOf(d adminapi.Disk, boot bool) slot {
	return slot{d.ID, label(d), d.Name + ", " + bytesText(d.Size), boot}
}

func label(d adminapi.Disk) string {
	tag := readTag(d.Description)
	return cmp.Or(tag["claim"], tag["name"], d.Name)
}

// readTag returns the fields of a driver's tag in a description such as "csi.example {…}".
func readTag(description string) map[string]string {
	_, text, _ := strings.Cut(description, " ")
	var fields map[string]json.RawMessage
	if json.Unmarshal([]byte(text), &fields) != nil {
		return nil
	}
	tag := map[string]string{}
	for name, value := range fields {
		var s string
		if json.Unmarshal(value, &s) != nil {
			s = string(value)
		}
		tag[name] = s
	}
	return tag
}

const softDelete = 30 * time.Second

func toggles(s adminapi.Switches) []toggle {
	hot := s.Hotplug != adminapi.HotplugNone
	soft := s.FreeDelay > 0
	change := func(field string, on, off any, now bool) string {
		value := on
		if now {
			value = off
		}
		body, err := json.Marshal(map[string]any{field: value})
		if err != nil {
			panic(err) // strings and booleans always encode
		}
		return string(body)
	}
	return []toggle{
		{"s-hotplug", "Hot-plug",
			fmt.Sprintf("disks come and go while an instance runs (now: %s)", s.Hotplug), hot,
			change("hotplug", adminapi.HotplugFull, adminapi.HotplugNone, hot)},
		{"s-soft", "Soft delete", "a deleted disk is freed after " +
			cmp.Or(time.Duration(s.FreeDelay), softDelete).String(), soft,
			change("free_delay", softDelete.String(), "0s", soft)},
		{"s-first", "Quota first", "a deletion frees the quota at once", s.QuotaFirst,
			change("quota_first", true, false, s.QuotaFirst)},
		{"s-full", "Full", "there is no space, whatever the quota", s.Full,
			change("full", true, false, s.Full)},
		{"s-replacing", "Replacing", "a drive is replaced, and no snapshot is taken", s.Replacing,
			change("replacing", true, false, s.Replacing)},
	}
}

// rule returns a fault as JSON, without the token to which the fault may be limited.
func rule(f adminapi.Fault) string {
	if f.Bearer != "" {
		f.Bearer = "…"
	}
	data, err := json.Marshal(f)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

func (c *Console) rackPage(w http.ResponseWriter, r *http.Request) {
	state, version, err := c.state()
	if c.answered(w, r, err, version, nil) {
		return
	}
	switches, filter := c.Switches(), r.URL.Query().Get("disk")
	body := rackBody{Filter: filter, Operations: c.Operations, Presets: presets, Faults: c.Faults(),
		Used: state.StorageBytes, Quota: int64(switches.QuotaBytes), Toggles: toggles(switches),
		Settings: settings(switches), Rows: c.rows(state, watch(state, filter))}
	state.Machines = c.Machines() // outside of the records, so version does not cover them
	body.fill(state, switches.DiskLimit)
	c.show(w, r, http.StatusOK, "rack.tmpl", page{Title: "A simulated rack", Live: true, Body: body})
}

func settings(s adminapi.Switches) []setting {
	return []setting{{"hotplug", string(s.Hotplug)}, {"role", s.Role},
		{"quota_bytes", fmt.Sprint(s.QuotaBytes)}, {"disk_limit", fmt.Sprint(s.DiskLimit)},
		{"device_delay", time.Duration(s.DeviceDelay).String()},
		{"create_hold", time.Duration(s.CreateHold).String()},
		{"snapshot_hold", time.Duration(s.SnapshotHold).String()},
		{"free_delay", time.Duration(s.FreeDelay).String()},
		{"instance_delay", time.Duration(s.InstanceDelay).String()}}
}

func (c *Console) routesPage(w http.ResponseWriter, r *http.Request) {
	c.show(w, r, http.StatusOK, "routes.tmpl", page{Title: "Requests of the admin listener",
		Body: struct {
			Host   string
			Routes []adminapi.Route
		}{r.Host, adminapi.Routes}})
}

type diskAbout struct {
	adminapi.Disk
	Instance  string
	Allocated int64
	Tag       []setting
	Snapshots []adminapi.SnapshotRecord
}

var tagWords = []setting{{"name", "CSI name"}, {"claim", "claim"}, {"cluster", "cluster"},
	{"origin", "birth"}, {"use", "use"}}

// watched is the disk that a page shows, or the disk to whose requests a page is limited.
type watched struct {
	// Name is the disk's name, ID or label; "" means every disk.
	Name string
	// Found means that the records contain the disk. About is set only if Found is true.
	About diskAbout
	Found bool
}

func watch(state adminapi.State, name string) watched {
	w := watched{Name: name}
	i := slices.IndexFunc(state.Disks, func(d adminapi.Disk) bool {
		return d.ID == name || d.Name == name || label(d) == name
	})
	if name == "" || i < 0 {
		return w
	}
	w.About.Disk, w.Found = state.Disks[i], true
	for _, s := range state.Snapshots {
		if s.DiskID == w.About.ID {
			w.About.Snapshots = append(w.About.Snapshots, s)
		}
	}
	for _, i := range state.Instances {
		if i.ID == w.About.State.Instance {
			w.About.Instance = i.Name
		}
	}
	tag := readTag(w.About.Description)
	for _, word := range tagWords {
		if value, ok := tag[word.Name]; ok {
			w.About.Tag = append(w.About.Tag, setting{word.Value, value})
			delete(tag, word.Name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(tag)) {
		w.About.Tag = append(w.About.Tag, setting{name, tag[name]})
	}
	return w
}

// wants reports whether r is about the disk. For a deleted disk it compares only w.Name.
func (w watched) wants(r *adminapi.Request) bool {
	is := func(name string) bool {
		return name != "" && (r.Object == name || r.ObjectID == name ||
			strings.Contains(r.Path, "/disks/"+name))
	}
	return w.Name == "" || is(w.Name) || is(w.About.ID) || is(w.About.Name) ||
		slices.ContainsFunc(w.About.Snapshots, func(s adminapi.SnapshotRecord) bool {
			return r.ObjectID == s.ID
		})
}

func (w watched) wantsEntry(e *flightlog.Entry) bool {
	return w.Name == "" || e.Volume == w.Name || e.Disk == w.Name ||
		w.Found && e.Volume == w.About.ID
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
	if err == nil && disk.Found {
		more, err = c.Disk(disk.About.ID)
	}
	if c.answered(w, r, err, version, more) {
		return
	}
	status, title := http.StatusOK, "Disk "+label(disk.About.Disk)
	if !disk.Found {
		status, title = http.StatusNotFound, "A disk that is gone"
	}
	disk.About.Allocated = more.AllocatedBytes
	c.show(w, r, status, "disk.tmpl", page{Title: title, Live: true, Body: struct {
		watched
		Disk
		Rows []row
	}{disk, more, c.rows(state, disk)}})
}

type curve struct {
	Name, Points string
	Now          int
}

// plotted is a plot, 59 units wide and 40 high.
type plotted struct {
	Most   int
	Curves []curve
}

func plot(all []Activity) plotted {
	p := plotted{1, []curve{{Name: "reads"}, {Name: "writes"}, {Name: "flushes"}}}
	for _, a := range all {
		p.Most = max(p.Most, a.Reads, a.Writes, a.Flushes)
	}
	for x, a := range all {
		for n, now := range []int{a.Reads, a.Writes, a.Flushes} {
			point := fmt.Sprintf("%d,%.1f", x, 40-40*float64(now)/float64(p.Most))
			c := &p.Curves[n]
			c.Now, c.Points = now, strings.TrimLeft(c.Points+" "+point, " ")
		}
	}
	return p
}

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

func ended(r adminapi.Request) time.Time {
	return r.Time.Add(time.Duration(r.DurationMS * float64(time.Millisecond)))
}

type flightRow struct {
	flightlog.Entry
	Who, Object, About string
	Bad                bool
}

// newFlightRow shows a deleted object by the disk's name in the entry, or else by the volume's ID.
func newFlightRow(e flightlog.Entry, names map[string]string) *flightRow {
	e.Time = e.Time.UTC()
	about := slices.DeleteFunc([]string{e.Device, e.Path, e.Detail},
		func(s string) bool { return s == "" })
	return &flightRow{Entry: e, Who: cmp.Or(names[e.Instance], e.Instance),
		Object: cmp.Or(names[e.Volume], e.Disk, e.Volume), About: strings.Join(about, ", "),
		Bad: e.Outcome != flightlog.Begun && e.Outcome != flightlog.Done}
}

const shownRows = 100

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
