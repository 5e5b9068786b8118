package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestAReferencePageListsEverythingOfItsProgram(t *testing.T) {
	for _, c := range []struct {
		page, from, to string // the part of the page; empty means the whole page
		words          []string
	}{
		{"configuration.md", "", "", parameters(t)},
		{"howto/simulator.md", "", "", adminListener(t)},
		{"events.md", "## Fields", "## Read", append(tags(reflect.TypeFor[flight.Fields]()),
			tags(reflect.TypeFor[flight.Entry]())...)},
	} {
		t.Run(c.page, func(t *testing.T) {
			page, err := os.ReadFile(c.page)
			if err != nil {
				t.Fatal(err)
			}
			_, part, found := strings.Cut(string(page), c.from)
			if c.to != "" {
				part, _, found = strings.Cut(part, c.to)
			}
			if !found || len(c.words) < 10 {
				t.Fatalf("found the part from %q to %q: %v, and %d words to look for; expected the part, and "+
					"at least 10 words", c.from, c.to, found, len(c.words))
			}
			for _, word := range c.words {
				if !strings.Contains(part, word) {
					t.Errorf("docs/%s does not have %s", c.page, word)
				}
			}
		})
	}
}

// claims are sentences with numbers in README.md, docs/proven.md and docs/data-safety.md, each with
// a file and the line there that has the number.
var claims = [][3]string{
	{"14 steps and 15 requests", "conformance/demo_test.go", "requests != 15"},
	{"[rules 16 to 22]", "docs/data-safety.md", "22. **Reading what others"},
	{"12 disks per instance", "internal/volume/name.go", "DefaultMaxDisks = 12"},
	{"follows fifteen rules", "docs/data-safety.md", "15. **The driver undoes"},
	{"4 roots besides its own, 16 MiB", "driver/mount/namespaces_linux.go", "maxRoots = 4 //"},
	{"16 MiB and 2 s", "driver/mount/namespaces_linux.go", "maxTableBytes = 16 << 20"},
	{"for all 32 MiB and 5 s", "driver/mount/namespaces_linux.go", "maxViewsBytes = 32 << 20"},
	{"at most 500 bytes of a path", "driver/mount/namespaces_linux.go", "%.500q in the mount"},
	{"is read at most 21 times", "driver/mount/table_linux.go", "for range 20 {"},
	{"response up to 5 s longer", "internal/rack/transport.go", "patience = 5 * time.Second"},
	{"within 5 seconds of the look", "internal/rack/look.go", "LookLimit = 5 * time.Second"},
	{"open** for a minute", "driver/controller/changes.go", "LateLimit = time.Minute"},
	{"64 callers", "proofs/model/crowd_test.go", "callers = 64"},
	{"have three other disks", "harness/proof/bystanders_linux.go", "three disks of an instance"},
}

func TestTheNumbersInSentencesAreThoseOfTheCode(t *testing.T) {
	read := func(files ...string) (text string) {
		for _, file := range files {
			content, err := os.ReadFile(filepath.Join(root, file))
			if err != nil {
				t.Error(err)
			}
			text += strings.Join(strings.Fields(string(content)), " ")
		}
		return text
	}
	pages := read("README.md", "docs/proven.md", "docs/data-safety.md")
	for _, claim := range claims {
		if !strings.Contains(pages, claim[0]) || !strings.Contains(read(claim[1]), claim[2]) {
			t.Errorf("the pages say %q because %s has %q, and one of both has changed", claim[0],
				claim[1], claim[2])
		}
	}
}

// parameters returns the rows of a storage class's parameters. A test of internal/volume compares
// the file with the driver.
func parameters(t *testing.T) []string {
	t.Helper()
	file, err := os.ReadFile(filepath.Join(root, "deploy/chart/parameters.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	var known struct {
		Parameters  []string `json:"parameters"`
		MkfsOptions map[string]struct {
			Filesystems []string `json:"filesystems"`
			Valid       string   `json:"valid"`
		} `json:"mkfsOptions"`
	}
	if err := yaml.Unmarshal(file, &known); err != nil {
		t.Fatal(err)
	}
	var rows []string
	for _, name := range known.Parameters {
		rows = append(rows, fmt.Sprintf("| `%s` |", name))
	}
	for name, option := range known.MkfsOptions {
		rows = append(rows, fmt.Sprintf("| `%s` | %s | %s |", name,
			strings.Join(option.Filesystems, ", "), option.Valid))
	}
	return rows
}

// adminListener returns the routes, fields and phases of the simulator's admin listener.
func adminListener(t *testing.T) []string {
	t.Helper()
	var words []string
	for _, route := range adminapi.Routes {
		path, _, _ := strings.Cut(route.Path, "/{id}")
		path, _, _ = strings.Cut(path, "/{name}")
		words = append(words, route.Method, path)
	}
	for _, known := range []reflect.Type{reflect.TypeFor[adminapi.Switches](),
		reflect.TypeFor[adminapi.Fault](), reflect.TypeFor[adminapi.DiskFault]()} {
		words = append(words, tags(known)...)
	}
	for _, phase := range []adminapi.Phase{adminapi.Before, adminapi.Instead, adminapi.After,
		adminapi.Twice, adminapi.Deferred, adminapi.Unwind, adminapi.Reread} {
		words = append(words, "| `"+string(phase)+"` |")
	}
	return words
}

// tags returns the names that the fields of a type have in JSON.
func tags(known reflect.Type) []string {
	var names []string
	for i := range known.NumField() {
		name, _, _ := strings.Cut(known.Field(i).Tag.Get("json"), ",")
		if name != "" && name != "-" {
			names = append(names, "`"+name+"`")
		}
	}
	return names
}
