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

// Change is an entry of the driver's flight recorder, in a file or in a line of its log.
type Change struct {
	Time     time.Time `json:"time"`
	Event    string    `json:"event"`
	Outcome  string    `json:"outcome"` // begun, done or failed; "" in a log, which has what was done
	Volume   string    `json:"volume"`
	Snapshot string    `json:"snapshot"`
	Instance string    `json:"instance"`
	Path     string    `json:"path"`
	Request  string    `json:"request"`
	Claim    string    `json:"claim"`
	Seen     bool      `json:"seen"`
}

// Changes reads the changes from a file of a volume, or from a log of JSON lines. There are none in
// a file that is not there.
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

// FlightFile is where a node's driver records the changes of a volume.
func (p *Plugin) FlightFile(volumeID string) string {
	return filepath.Join(p.Dir, "volumes", "flight", volumeID+".jsonl")
}

// CheckFlightDirs demands of the flight recorders of several nodes, that any history leaves behind:
// no change is said that was not announced, and no volume was formatted twice.
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

// notAnnounced are the events that have no begin.
var notAnnounced = map[string]bool{"ProvenBlank": true, "FormatResumed": true,
	"FilesystemRepaired": true}

// turns are the events that make something and those that undo it.
var turns = map[string]struct {
	thing string
	made  bool
}{
	"Mounted": {"mount", true}, "Unmounted": {"mount", false},
	"Published": {"publication", true}, "Unpublished": {"publication", false},
	"DiskAttached": {"attachment", true}, "DiskDetached": {"attachment", false},
	"DiskCreated": {"disk", true}, "DiskDeleted": {"disk", false},
}

// CheckChanges demands that changes make sense one after the other: nothing comes twice, and
// nothing goes that did not come. A change that is begun and has no other outcome was made or not.
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
		// An earlier one that is begun may have been made.
		if there[key] == turn.made && own[key] < 2 && other[key] == 0 {
			return fmt.Errorf("change %d of %d, %s: the %s says what an earlier change has said, or one "+
				"before it is missing", i+1, len(changes), c.Event, key)
		}
		there[key], own[key], other[key] = turn.made, 0, 0
	}
	return nil
}
