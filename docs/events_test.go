package docs

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

var update = flag.Bool("update", false, "write the generated parts of the pages")

// generated matches the table of a page that the test below writes.
var generated = regexp.MustCompile("<!-- written by go test ./docs -run Tables -update -->\n" +
	"((?:\\|.*\n)*)<!-- end of the table -->\n")

// byController contains the events of the controller process, which calls the rack. The others are
// events of a node.
var byController = []flight.Event{flight.DiskCreated, flight.DiskDeleted, flight.DiskAttached,
	flight.DiskDetached, flight.SnapshotCreated, flight.SnapshotDeleted}

func TestTheTablesOfThePagesAreThoseOfTheDriver(t *testing.T) {
	events := "| event | message | who | meaning |\n|---|---|---|---|\n"
	for _, e := range flight.Events {
		who := "node"
		if slices.Contains(byController, e.Event) {
			who = "controller"
		}
		events += fmt.Sprintf("| `%s` | %s | %s | %s |\n", e.Event, e.Says, who, e.Meaning)
	}
	flags := "| of | without a value | with a value |\n|---|---|---|\n"
	for _, fsType := range volume.Filesystems {
		set := volume.FilesystemFlags[fsType]
		var values []string
		for _, name := range slices.Sorted(maps.Keys(set.Values)) {
			values = append(values, "`"+name+"=` "+set.Values[name].Words)
		}
		flags += fmt.Sprintf("| %s | `%s` | %s |\n", fsType, strings.Join(slices.Sorted(
			slices.Values(set.Words)), "`, `"), strings.Join(values, "; "))
	}
	for file, want := range map[string]string{"events.md": events, "configuration.md": flags} {
		page, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		parts := generated.FindSubmatch(page)
		if parts == nil {
			t.Fatalf("docs/%s has no place for its table", file)
		}
		if *update {
			text := strings.Replace(string(page), string(parts[1]), want, 1)
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		} else if diff := cmp.Diff(want, string(parts[1])); diff != "" {
			t.Errorf("the table of docs/%s is not the driver's: go test ./docs -run Tables -update "+
				"writes it (-driver +page):\n%s", file, diff)
		}
	}
}
