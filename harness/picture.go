package harness

import (
	"context"
	"fmt"
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

// Lane returns the driver's lane in a history.
func (p *Plugin) Lane() string {
	_, number, _ := strings.Cut(filepath.Base(p.Dir), "-")
	return strings.TrimSpace(fmt.Sprintf("driver %s: %s %s", number, p.options.Mode,
		p.Instance.Name))
}

// record records a call in the driver's history. Calls of the identity service only ask whether
// a driver is ready, again and again.
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

// about returns the objects that a request names.
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

// short returns the part of a UUID by which people tell objects apart.
func short(id string) string {
	if len(id) == 36 {
		return id[:8]
	}
	return id
}

// Events returns what the drivers recorded of their changes since that time, and the
// requests of the rack, which may be nil. A rack that was killed has lost its earlier requests.
func Events(ctx context.Context, rack *Rack, since time.Time, plugins ...*Plugin) (
	events []history.Event, err error) {
	read := map[string]bool{}
	for _, p := range plugins {
		state := p.options.Env["OXIDE_STATE_DIR"]
		files, err := filepath.Glob(filepath.Join(state, "flight", "*.jsonl"))
		if err != nil || state == "" || read[state] {
			continue // a controller has no records, and two drivers may share them
		}
		read[state] = true
		for _, file := range files {
			changes, err := Changes(file)
			if err != nil {
				return nil, err
			}
			events = append(events, flown(changes, p.Instance.Name)...)
		}
	}
	if rack != nil && rack.Running() {
		requests, err := rack.Admin.Requests(ctx, 0)
		if err != nil {
			return nil, err
		}
		for _, r := range requests {
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

// flown returns a node's changes of a volume as events. A change that was begun lasts until its
// outcome.
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
			e.Outcome = "interrupted" // the change begins again
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
