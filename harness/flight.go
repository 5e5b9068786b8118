package harness

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"
)

// Change is an entry of the driver's flight recorder, from a file or from a line of the
// driver's log.
type Change struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"`
	Outcome  string    `json:"outcome"` // begun, done or failed; "" in a log
	Volume   string    `json:"volume"`
	Snapshot string    `json:"snapshot"`
	Instance string    `json:"instance"`
	Path     string    `json:"path"`
	Request  string    `json:"request"`
	Claim    string    `json:"claim"`
	Seen     bool      `json:"seen"`
}

// Changes reads the changes from a file of a volume, or from a log of JSON lines. A missing
// file has no changes.
func Changes(path string) ([]Change, error) {
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var changes []Change
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var c Change
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			return nil, fmt.Errorf("a line of %s: %w", path, err)
		}
		if c.Event != "" {
			changes = append(changes, c)
		}
	}
	return changes, lines.Err()
}

// flightDir is the directory of a node's flight record below the plugin's.
const flightDir = "volumes/flight"

// FlightFile returns the path at which a node's driver records the changes of a volume.
func (p *Plugin) FlightFile(volumeID string) string {
	return filepath.Join(p.Dir, flightDir, volumeID+".jsonl")
}

// CheckFlightDirs checks two rules in the flight recorders of several nodes, which hold for
// every history: every change is announced before it is made, and no volume is formatted
// twice.
func CheckFlightDirs(plugins ...*Plugin) error {
	formatted := map[string]int{}
	for _, p := range plugins {
		files, err := filepath.Glob(p.FlightFile("*"))
		if err != nil {
			return err
		}
		for _, path := range files {
			changes, err := Changes(path)
			if err != nil {
				return err
			}
			begun := map[string]int{}
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

// notAnnounced contains the events that are recorded without an announcement.
var notAnnounced = map[string]bool{"ProvenBlank": true, "FormatResumed": true,
	"FilesystemRepaired": true}

// turns contains the events that make something and the events that undo it.
var turns = map[string]struct {
	thing string
	made  bool
}{
	"Mounted": {"mount", true}, "Unmounted": {"mount", false},
	"Published": {"publication", true}, "Unpublished": {"publication", false},
	"DiskAttached": {"attachment", true}, "DiskDetached": {"attachment", false},
	"DiskCreated": {"disk", true}, "DiskDeleted": {"disk", false},
}

// CheckChanges checks that the order of changes is possible: nothing is made twice, and
// nothing is undone that was not made. If a change was begun and has no other outcome, both
// are possible: it was made, or it was not.
func CheckChanges(changes []Change) error {
	there := map[string]bool{}
	begun := map[bool]map[string]int{true: {}, false: {}}
	for i, c := range changes {
		turn, ok := turns[c.Event]
		if !ok {
			continue
		}
		key := turn.thing + " " + c.Volume
		switch turn.thing {
		case "attachment":
			key += " at " + c.Instance
		case "disk":
		default:
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
		// An earlier change that was begun may have been made.
		if there[key] == turn.made && own[key] < 2 && other[key] == 0 {
			return fmt.Errorf("change %d of %d, %s: the %s says what an earlier change has said, or one "+
				"before it is missing", i+1, len(changes), c.Event, key)
		}
		there[key], own[key], other[key] = turn.made, 0, 0
	}
	return nil
}

// Diagnosis contains those fields of the doctor's JSON output that tests read.
type Diagnosis struct {
	Chains []struct {
		Links   []struct{ Link, State, What string }
		Finding struct{ Link, Reason, Wrong, Do, Next string }
	}
}

// Unseen returns the links that the doctor could not check, with the reasons.
func (d Diagnosis) Unseen() []string {
	var unseen []string
	for _, c := range d.Chains {
		for _, l := range c.Links {
			if l.State == "unseen" {
				unseen = append(unseen, l.Link+": "+l.What)
			}
		}
	}
	return unseen
}
