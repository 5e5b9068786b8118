package harness

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/history"
)

// Change is an event in the driver's flight recorder or log.
type Change struct {
	Time time.Time

	Event, Volume, Snapshot, Instance, Path, Request, Claim string
	// Outcome is "begun", "done" or "failed" in the flight recorder, and empty in a log.
	Outcome string
	Seen    bool
}

// Changes returns the changes in a flight recorder's file or in a log, and none for a missing file.
func Changes(path string) ([]Change, error) {
	text, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var changes []Change
	for line := range bytes.Lines(text) {
		var c Change
		if err := json.Unmarshal(line, &c); err != nil {
			return nil, fmt.Errorf("a line of %s: %w", path, err)
		}
		if c.Event != "" {
			changes = append(changes, c)
		}
	}
	return changes, nil
}

const flightDir = "volumes/flight"

// FlightFile returns the path of the flight recorder's file for a volume.
func (p *Plugin) FlightFile(volumeID string) string {
	return filepath.Join(p.Dir, flightDir, volumeID+".jsonl")
}

// FlightRecords returns the changes in this driver's flight recorder. The keys are paths of files.
func (p *Plugin) FlightRecords() (records map[string][]Change, err error) {
	defer Catch(&err)
	records = map[string][]Change{}
	for _, file := range Got(filepath.Glob(p.FlightFile("*"))) {
		records[file] = Got(Changes(file))
	}
	return records, nil
}

// CheckFlightDirs reads the flight recorders of several nodes. It returns an error if a change,
// except those in notAnnounced, has no earlier entry "begun", or if a volume was formatted twice.
func CheckFlightDirs(plugins ...*Plugin) (err error) {
	defer Catch(&err)
	formatted := map[string]int{}
	for _, p := range plugins {
		records := Got(p.FlightRecords())
		for _, path := range slices.Sorted(maps.Keys(records)) {
			changes, begun := records[path], map[string]int{}
			for i, c := range changes {
				key := c.Event + " " + c.Path
				switch {
				case c.Outcome == "begun":
					begun[key]++
				case !notAnnounced[c.Event] && begun[key] == 0:
					return fmt.Errorf("%s, line %d: %s was not announced", path, i+1, c.Event)
				case c.Outcome == "done":
					begun[key] = 0
				}
				if c.Event == "Formatted" && c.Outcome == "done" {
					formatted[c.Volume]++
				}
			}
		}
	}
	for id, times := range formatted {
		if times > 1 {
			return fmt.Errorf("volume %s was formatted %d times", id, times)
		}
	}
	return nil
}

// notAnnounced contains the events that the driver records only after they have happened.
var notAnnounced = map[string]bool{"ProvenBlank": true, "FormatResumed": true,
	"FilesystemRepaired": true}

// turns maps an event to the kind of object that it creates (made) or removes (not made).
var turns = map[string]struct {
	thing string
	made  bool
}{
	"Mounted": {"mount", true}, "Unmounted": {"mount", false},
	"Published": {"publication", true}, "Unpublished": {"publication", false},
	"DiskAttached": {"attachment", true}, "DiskDetached": {"attachment", false},
	"DiskCreated": {"disk", true}, "DiskDeleted": {"disk", false},
}

// CheckChanges returns an error if a change creates an object that exists, or removes an object
// that does not exist.
func CheckChanges(changes []Change) error {
	exists := map[string]bool{}
	begun := map[bool]map[string]int{true: {}, false: {}}
	for i, c := range changes {
		turn, ok := turns[c.Event]
		if !ok {
			continue
		}
		key := turn.thing + " " + c.Volume
		if turn.thing == "attachment" {
			key += " at " + c.Instance
		} else if turn.thing != "disk" {
			key += " at " + c.Path
		}
		own, other := begun[turn.made], begun[!turn.made]
		switch c.Outcome {
		case "begun":
			own[key]++
			continue
		case "failed":
			own[key]--
			continue
		}
		// If an earlier change has no outcome, it may have happened, so this change may be correct.
		if exists[key] == turn.made && own[key] < 2 && other[key] == 0 {
			return fmt.Errorf("change %d of %d, %s: the %s was made twice or undone twice, or a change "+
				"between the two was not recorded", i+1, len(changes), c.Event, key)
		}
		exists[key], own[key], other[key] = turn.made, 0, 0
	}
	return nil
}

// Diagnosis contains the fields that tests read in the JSON output of the driver's command doctor.
type Diagnosis struct {
	Chains []struct {
		Links   []struct{ Link, State, What string }
		Finding struct{ Link, Reason, Wrong, Do, Next string }
	}
}

// Lane returns the name of the column for calls to this driver on a page of package history.
func (p *Plugin) Lane() string {
	_, number, _ := strings.Cut(filepath.Base(p.Dir), "-")
	return strings.TrimSpace(fmt.Sprintf("driver %s: %s %s", number, p.options.Mode,
		p.Instance.Name))
}

func (p *Plugin) record(ctx context.Context, method string, req, reply any,
	conn *grpc.ClientConn, invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
	if strings.Contains(method, ".Identity/") {
		return invoke(ctx, method, req, reply, conn, options...)
	}
	answered := p.History.Call(p.Lane(), path.Base(method)+about(req))
	err := invoke(ctx, method, req, reply, conn, options...)
	outcome := "OK"
	if err != nil {
		outcome = status.Code(err).String() + ": " + status.Convert(err).Message()
	}
	answered(outcome, err != nil)
	return err
}

func about(req any) (objects string) {
	if r, ok := req.(interface{ GetName() string }); ok {
		objects += " " + r.GetName()
	}
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		objects += " " + short(r.GetVolumeId())
	}
	if r, ok := req.(interface{ GetSnapshotId() string }); ok {
		objects += " " + short(r.GetSnapshotId())
	}
	if r, ok := req.(interface{ GetNodeId() string }); ok {
		objects += " on " + short(r.GetNodeId())
	}
	return objects
}

func short(id string) string {
	if len(id) == 36 {
		return id[:8]
	}
	return id
}

// Events returns the changes that the drivers have recorded, and the requests that the rack got,
// both since the given time. It lists no requests if rack is nil or does not run.
func Events(ctx context.Context, rack *Rack, since time.Time, plugins ...*Plugin) (
	events []history.Event, err error) {
	defer Catch(&err)
	for _, p := range plugins {
		records := Got(p.FlightRecords())
		for _, file := range slices.Sorted(maps.Keys(records)) {
			events = append(events, flown(records[file], p.Instance.Name)...)
		}
	}
	if rack != nil && rack.Running() {
		for _, r := range Got(rack.Admin.Requests(ctx, 0)) {
			took := time.Duration(r.DurationMS * float64(time.Millisecond))
			e := history.Event{Lane: history.Rack, Name: r.Operation + " " + short(r.Object),
				Start: r.Time, End: r.Time.Add(took), Outcome: strconv.Itoa(r.Status),
				Failed: r.Status/100 != 2}
			if r.Deferred {
				e.Name += " (late)"
			}
			if len(r.Faults) > 0 {
				events = append(events, history.Event{Lane: history.Rack, Start: r.Time, End: r.Time,
					Mark: true, Name: "fault strikes " + r.Operation})
			}
			events = append(events, e)
		}
	}
	return slices.DeleteFunc(events, func(e history.Event) bool { return e.Start.Before(since) }), nil
}

// flown returns one event for each change, from its entry "begun" to its entry "done" or "failed".
func flown(changes []Change, node string) (events []history.Event) {
	begun := map[string]int{}
	for _, c := range changes {
		key := c.Event + c.Path
		if i, ok := begun[key]; ok {
			e := &events[i]
			e.End, e.Outcome, e.Failed = c.Time, c.Outcome, c.Outcome != "done"
			delete(begun, key)
			if c.Outcome != "begun" {
				continue
			}
			e.Outcome = "interrupted" // the change has no outcome, and begins again
		}
		e := history.Event{Lane: history.Disk, Start: c.Time,
			Name: strings.TrimSpace(fmt.Sprintf("%s %s %s", c.Event, short(c.Volume), node))}
		if c.Outcome == "begun" {
			begun[key] = len(events)
		} else {
			e.End = c.Time
		}
		events = append(events, e)
	}
	return events
}
