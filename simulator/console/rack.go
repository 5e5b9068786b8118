package console

import (
	"cmp"
	"encoding/json"
	"fmt"
	"html/template"
	"net/http"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

type card struct {
	ID, Name, State    string
	CanStart, CanStop  bool
	Slots              []slot
	Attached, AllSlots int
	// Machine runs it, if it is not nil.
	Machine *adminapi.Machine
}

// slot is a place for a disk in an instance. If Disk is "", the slot is empty.
type slot struct {
	Disk, Label, Title string
	Boot               bool
}

type shelved struct {
	slot
	State     string
	Size      int64
	Snapshots []snapshot
}

type snapshot struct {
	ID, Name, State string
	Size            int64
}

type toggle struct {
	ID, Name, Explanation string
	On                    bool
	// Change is the body of the request that flips the switch.
	Change string
}

func parts(state adminapi.State, switches adminapi.Switches,
	faults []adminapi.ActiveFault) map[string][]part {
	disks, snapshots := map[string][]adminapi.Disk{}, map[string][]snapshot{}
	var detached []adminapi.Disk
	for _, s := range state.Snapshots {
		snapshots[s.DiskID] = append(snapshots[s.DiskID], snapshot{s.ID, s.Name, s.State, s.Size})
	}
	for _, d := range state.Disks {
		if d.State.Instance == "" {
			detached = append(detached, d)
		} else {
			disks[d.State.Instance] = append(disks[d.State.Instance], d)
		}
	}
	lists := map[string][]part{"instances": {}, "shelf": {}, "switches": {}, "faults": {}}
	add := func(list, id, template string, model any) {
		lists[list] = append(lists[list], part{id, template, model})
	}
	for _, i := range sorted(state.Instances, func(i adminapi.Instance) string { return i.Name }) {
		c := newCard(i, disks[i.ID], switches.DiskLimit)
		for _, m := range state.Machines {
			if m.InstanceID == i.ID {
				m.Console = lastLines(m.Console)
				c.Machine = &m
			}
		}
		add("instances", "i-"+i.ID, "card", c)
	}
	for _, d := range sorted(detached, func(d adminapi.Disk) string { return d.Name }) {
		add("shelf", "d-"+d.ID, "shelved", shelved{slotOf(d, false), d.State.State, d.Size,
			snapshots[d.ID]})
		delete(snapshots, d.ID)
	}
	var others []snapshot // of attached or deleted disks
	for _, of := range snapshots {
		others = append(others, of...)
	}
	if len(others) > 0 {
		add("shelf", "others", "others", sorted(others, func(s snapshot) string { return s.Name }))
	}
	lists["quota"] = []part{{"q", "quota", struct{ Used, All int64 }{state.StorageBytes,
		int64(switches.QuotaBytes)}}}
	for _, t := range toggles(switches) {
		add("switches", t.ID, "toggle", t)
	}
	for _, f := range faults {
		add("faults", "f-"+f.ID, "fault", struct {
			ID, Rule string
			Fired    int
		}{f.ID, rule(f.Fault), f.Fired})
	}
	return lists
}

// lastLines returns the last lines of a serial console without escape sequences for a terminal.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(terminal.ReplaceAllString(text, "")), "\n")
	return strings.ToValidUTF8(strings.Join(lines[max(0, len(lines)-4):], "\n"), "�")
}

var terminal = regexp.MustCompile(`\x1b\[[0-9;?]*[A-Za-z]|[^\P{C}\n]`)

func sorted[T any](all []T, name func(T) string) []T {
	slices.SortStableFunc(all, func(a, b T) int { return cmp.Compare(name(a), name(b)) })
	return all
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

// label returns the name of a disk for people: the claim or the name in its tag, or else its name
// on the rack.
func label(d adminapi.Disk) string {
	tag := readTag(d.Description)
	return cmp.Or(tag["claim"], tag["name"], d.Name)
}

// readTag returns the fields of a driver's tag: the JSON object in a description such as
// "csi.example {…}".
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

// softDelete is the free delay that the switch "Soft delete" sets.
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
			panic(err) // cannot fail: strings and booleans
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

// rule describes a fault. It hides the token to which a fault may be limited.
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

// refresh brings the board up to date. The caller holds mu.
func (c *Console) refresh() error {
	version, err := c.Version()
	if err != nil {
		return err
	}
	switches, faults := c.Switches(), c.Faults()
	told, err := json.Marshal([]any{version, switches, faults, c.Machines()})
	if err != nil || string(told) == c.stamp {
		return err
	}
	state, _, err := c.State()
	if err != nil {
		return err
	}
	if err := c.board.put(parts(state, switches, faults)); err != nil {
		return err
	}
	c.names = map[string]string{}
	for _, i := range state.Instances {
		c.names[i.ID] = i.Name
	}
	for _, d := range state.Disks {
		c.names[d.ID] = d.Name
	}
	c.stamp = string(told)
	return nil
}

type rackBody struct {
	Lists      map[string][]template.HTML
	Rows       []template.HTML
	Filter     string
	Instances  int
	Operations []string
	Settings   []setting
	Mischiefs  []mischief
}

type setting struct{ Name, Value string }

// shownRows is the number of requests and entries of flight records that a page shows.
const shownRows = 100

func (c *Console) rackPage(w http.ResponseWriter, r *http.Request) {
	body := rackBody{Filter: r.URL.Query().Get("disk"), Operations: c.Operations,
		Mischiefs: mischiefs, Settings: settings(c.Switches())}
	c.mu.Lock()
	err := c.refresh()
	last := c.board.last
	body.Lists = c.board.html()
	c.mu.Unlock()
	at := position{boot: c.boot, change: last}
	if err == nil {
		body.Rows, err = c.rows(&at, &watched{Console: c, name: body.Filter})
	}
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	body.Instances = len(body.Lists["instances"])
	c.show(w, r, http.StatusOK, "rack.tmpl", page{Title: "A simulated rack",
		Events: at.address("disk", body.Filter), Body: body})
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

// board has the changing parts of a page: lists of items, each an HTML element with the item's id.
// It numbers its changes, so that a page gets only the changes since it was rendered.
type board struct {
	last  int
	lists map[string]*list
	items map[string]*item
}

type list struct {
	ids     []string
	changed int
}

type item struct {
	part
	html    template.HTML
	changed int
}

// part is an item before it is rendered by a template. Items with equal models look the same.
type part struct {
	id, template string
	model        any
}

// update has the lists whose order has changed and the items that have changed, as JSON for the
// script.
type update struct {
	Lists map[string][]string      `json:"lists,omitempty"`
	Items map[string]template.HTML `json:"items,omitempty"`
	Rows  []template.HTML          `json:"rows,omitempty"`
}

func (b *board) put(lists map[string][]part) error {
	if b.items == nil {
		b.lists, b.items = map[string]*list{}, map[string]*item{}
	}
	b.last++
	shown := map[string]bool{}
	for name, parts := range lists {
		var ids []string
		for _, p := range parts {
			ids = append(ids, p.id)
			shown[p.id] = true
			if old := b.items[p.id]; old != nil && reflect.DeepEqual(old.model, p.model) {
				continue
			}
			html, err := render(p.template, p.model)
			if err != nil {
				return err
			}
			b.items[p.id] = &item{p, html, b.last}
		}
		if old := b.lists[name]; old == nil || !slices.Equal(old.ids, ids) {
			b.lists[name] = &list{ids, b.last}
		}
	}
	for id := range b.items {
		if !shown[id] {
			delete(b.items, id)
		}
	}
	return nil
}

// since returns the changes after the one with that number.
func (b *board) since(last int) update {
	u := update{Lists: map[string][]string{}, Items: map[string]template.HTML{}}
	for name, l := range b.lists {
		if l.changed > last {
			u.Lists[name] = append([]string{}, l.ids...)
		}
	}
	for id, i := range b.items {
		if i.changed > last {
			u.Items[id] = i.html
		}
	}
	return u
}

func (b *board) html() map[string][]template.HTML {
	all := map[string][]template.HTML{}
	for name, l := range b.lists {
		for _, id := range l.ids {
			all[name] = append(all[name], b.items[id].html)
		}
	}
	return all
}
