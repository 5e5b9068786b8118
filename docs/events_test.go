package docs

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
)

var update = flag.Bool("update", false, "write the generated parts of the pages")

// The table of events is between these lines.
const (
	tableBegins = "<!-- events, written by go test ./docs -run Events -update -->\n"
	tableEnds   = "<!-- end of events -->\n"
)

// byController contains the events of the controller process, which calls the rack. The others are
// events of a node.
var byController = []flight.Event{flight.DiskCreated, flight.DiskDeleted, flight.DiskAttached,
	flight.DiskDetached, flight.SnapshotCreated, flight.SnapshotDeleted}

func TestThePageOfEventsListsEveryEventOfTheDriver(t *testing.T) {
	page, err := os.ReadFile("events.md")
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := bytes.Cut(page, []byte(tableBegins))
	got, after, ends := bytes.Cut(rest, []byte(tableEnds))
	if !found || !ends {
		t.Fatal("docs/events.md has no place for the table of events")
	}
	var want strings.Builder
	want.WriteString("| event | message | who | meaning |\n|---|---|---|---|\n")
	for _, e := range flight.Events {
		who := "node"
		for _, event := range byController {
			if e.Event == event {
				who = "controller"
			}
		}
		fmt.Fprintf(&want, "| `%s` | %s | %s | %s |\n", e.Event, e.Says, who, e.Meaning)
	}
	if *update {
		text := string(before) + tableBegins + want.String() + tableEnds + string(after)
		if err := os.WriteFile("events.md", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(want.String(), string(got)); diff != "" {
		t.Errorf("the table of docs/events.md is not the driver's: go test ./docs -run Events -update "+
			"writes it (-driver +page):\n%s", diff)
	}
}
