package docs

import (
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const root = ".."

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// try() returns a function that fails the test on err, and otherwise returns v: try(f())(t).
func try[V any](v V, err error) func(*testing.T) V {
	return func(t *testing.T) V {
		t.Helper()
		must(t, err)
		return v
	}
}

func TestReferencePagesListEveryParameterRouteAndField(t *testing.T) {
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
			page := try(os.ReadFile(c.page))(t)
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

// claims contains numbers in README.md, docs/proven.md and docs/data-safety.md. An entry has a text
// of one of these pages, the file that determines the number, and a text of that file.
var claims = [][3]string{
	{"14 steps and 15 requests", "conformance/main_test.go", "requests != 15"},
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

func TestNumbersInThePagesMatchTheCode(t *testing.T) {
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

// parameters() returns the table rows for the parameters of storage classes. It reads them from a
// file that a test of internal/volume compares with the driver.
func parameters(t *testing.T) []string {
	t.Helper()
	file := try(os.ReadFile(filepath.Join(root, "deploy/chart/parameters.yaml")))(t)
	var known struct {
		Parameters  []string `json:"parameters"`
		MkfsOptions map[string]struct {
			Filesystems []string `json:"filesystems"`
			Valid       string   `json:"valid"`
		} `json:"mkfsOptions"`
	}
	must(t, yaml.Unmarshal(file, &known))
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

var update = flag.Bool("update", false, "write the generated parts of the pages")

var generated = regexp.MustCompile("<!-- written by go test ./docs -run Tables -update -->\n" +
	"((?:\\|.*\n)*)<!-- end of the table -->\n")

// byController lists the events that the controller records. All other events come from a node.
var byController = []flight.Event{flight.DiskCreated, flight.DiskDeleted, flight.DiskAttached,
	flight.DiskDetached, flight.SnapshotCreated, flight.SnapshotDeleted}

func TestTablesOfEventsAndFlagsMatchTheDriver(t *testing.T) {
	events := "| event | message | who | meaning |\n|---|---|---|---|\n"
	for _, e := range flight.Events {
		who := "node"
		if slices.Contains(byController, e.Event) {
			who = "controller"
		}
		events += fmt.Sprintf("| `%s` | %s | %s | %s |\n", e.Event, e.Says, who, e.Meaning)
	}
	words, names := volume.CommonFlags()
	flags := fmt.Sprintf("| of | without a value | with a value |\n|---|---|---|\n"+
		"| all | `%s` | `%s=` |\n", strings.Join(slices.Sorted(slices.Values(words)), "`, `"),
		strings.Join(slices.Sorted(slices.Values(names)), "=`, `"))
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
		page := try(os.ReadFile(file))(t)
		parts := generated.FindSubmatch(page)
		if parts == nil {
			t.Fatalf("docs/%s has no place for its table", file)
		}
		if *update {
			text := strings.Replace(string(page), string(parts[1]), want, 1)
			must(t, os.WriteFile(file, []byte(text), 0o644))
		} else if diff := cmp.Diff(want, string(parts[1])); diff != "" {
			t.Errorf("the table of docs/%s is not the driver's: go test ./docs -run Tables -update "+
				"writes it (-driver +page):\n%s", file, diff)
		}
	}
}

func TestEveryLinkHasATarget(t *testing.T) {
	pages := try(Pages(root))(t)
	site, links := Site{Root: root, Pages: pages}, 0
	for _, page := range pages {
		for _, link := range page.Links() {
			links++
			if err := site.Check(page, link); err != nil {
				t.Error(err)
			}
		}
	}
	if len(pages) < 10 || links < 50 {
		t.Errorf("found %d pages with %d links, expected more", len(pages), links)
	}
}

func TestTheReadmeOfDocsLinksToEveryPage(t *testing.T) {
	pages := try(Pages(root))(t)
	index := try(Read(root, "docs/README.md"))(t)
	links := strings.Join(index.Links(), "\n") + "\n"
	for _, page := range pages {
		name, ours := strings.CutPrefix(page.Path, "docs/")
		if ours && name != "README.md" && !strings.Contains(links, name+"\n") {
			t.Errorf("docs/README.md does not list %s", page.Path)
		}
	}
}

func TestABrokenLinkIsReported(t *testing.T) {
	page := Parse("README.md", []byte("# Up & down: `a_b`\n\n## Same\n\n## Same\n\nText.\n"))
	if diff := cmp.Diff([]string{"up--down-a_b", "same", "same-1"}, page.Anchors()); diff != "" {
		t.Errorf("the anchors differ (-want +got):\n%s", diff)
	}
	site := Site{Root: root, Pages: []Page{page}}
	for link, good := range map[string]bool{
		"#same-1": true, "#same-2": false, "go.mod": true, "docs/gone.md": false, "docs/docs.go": true,
		"https://oxide.computer": true, "https://": false, "ftp://oxide.computer": false, "%zz": false,
		"docs/docs.go#same": false,
	} {
		if err := site.Check(page, link); (err == nil) != good {
			t.Errorf("Check(%q) = %v, want success %t", link, err, good)
		}
	}
}

func TestEveryCodeBlockStatesWhetherItRuns(t *testing.T) {
	pages := try(Pages(root))(t)
	count := map[string]int{}
	var onCluster []string
	for _, page := range pages {
		if !page.WithCommands() {
			continue
		}
		blocks, err := page.Blocks()
		if err != nil {
			t.Error(err)
		}
		for _, b := range blocks {
			count[b.Run]++
		}
		if len(RunBy(Cluster, blocks)) > 0 {
			onCluster = append(onCluster, page.Path)
		}
	}
	want := slices.Sorted(slices.Values(slices.Concat(ByHelm, OnCluster, OnColdRack)))
	if diff := cmp.Diff(want, onCluster); diff != "" {
		t.Errorf("the end-to-end suite runs other pages than those with blocks for it "+
			"(-suite +pages):\n%s", diff)
	}
	for _, runner := range []string{Here, Cluster, Rehearsal, RehearsalOn} {
		if count[runner] == 0 {
			t.Errorf("no block is run: %s", runner)
		}
	}
	run := count[Here] + count[Cluster] + count[Rehearsal] + count[RehearsalOn]
	index, err := os.ReadFile(filepath.Join(root, "docs/README.md"))
	share := fmt.Sprintf("%d of the %d blocks", run, run+count[""])
	if err != nil || !strings.Contains(string(index), share) {
		t.Errorf("docs/README.md does not say that tests run %s of code: %v", share, err)
	}
	t.Logf("FIGURE docs here=%d cluster=%d not-run=%d", count[Here], count[Cluster], count[""])
}

func TestACodeBlockThatDoesNotStateWhetherItRunsIsReported(t *testing.T) {
	for name, c := range map[string]struct{ page, want string }{
		"none":            {"Text:\n\n    true\n", "docs/p.md:3: the block has no class"},
		"another comment": {"<!-- ran -->\n    true\n", "no class"},
		"no reason":       {"<!-- not run: -->\n    true\n", "no class"},
		"another runner":  {"<!-- run: there -->\n    true\n", "no class"},
		"text between":    {"<!-- run: here -->\n\nText.\n\n    true\n", "no class"},
		"a fence":         {"<!-- run: here -->\n```\ntrue\n```\n", "four spaces"},
		"in a list":       {"1. Do:\n\n       true\n", "no class"},
		"a reason":        {"<!-- not run: it is output -->\n    true\n", ""},
		"here":            {"Text:\n<!-- run: here; prints: a --b -->\n    true\n", ""},
		"here in a list":  {"1. Do:\n   <!-- run: here -->\n\n       true\n", ""},
		"a drawing":       {"<!-- not run: a drawing -->\n```\n──▶\n```\n", ""},
	} {
		t.Run(name, func(t *testing.T) {
			blocks, err := Parse("docs/p.md", []byte(c.page)).Blocks()
			switch {
			case c.want == "" && (err != nil || len(blocks) != 1):
				t.Errorf("Blocks() = %v, %v, want a block", blocks, err)
			case c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want)):
				t.Errorf("Blocks() = %v, %v, want an error with %q", blocks, err, c.want)
			}
		})
	}
}
