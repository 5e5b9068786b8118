package simulator

import (
	"flag"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write docs/operations.md and docs/console.png")

const coveragePage = "../docs/operations.md"

// coverage returns the page that lists which operations of the rack the simulator serves.
func coverage() (page string, served int) {
	type group struct{ served, lacking []string }
	groups := map[string]*group{}
	for _, op := range routes {
		path, _, _ := strings.Cut(strings.Join(op.path, "/"), "/{")
		key := "/" + path
		if groups[key] == nil {
			groups[key] = &group{}
		}
		if op.serve != nil {
			served++
			groups[key].served = append(groups[key].served, "`"+op.name+"`")
		} else {
			groups[key].lacking = append(groups[key].lacking, "`"+op.name+"`")
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, `# Operations of the simulated rack

<!-- Written by go test ./simulator -run Coverage -update from simulator/operations.txt. -->

The [simulator](howto/simulator.md) serves %d of the %d operations that a rack has at version
%s of its API, and answers 501 to the others. Disks, snapshots, images and instances have
real bytes and devices. The other objects are records: the simulator makes a rack's checks, but no
packet follows a route, a firewall rule or an external address.

| path up to its first parameter | served | 501 |
|---|---|---|
`, served, len(routes), apiVersion)
	var keys []string
	for key := range groups {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	for _, key := range keys {
		g := groups[key]
		fmt.Fprintf(&b, "| `%s` | %s | %s |\n", key, strings.Join(g.served, ", "),
			strings.Join(g.lacking, ", "))
	}
	return b.String(), served
}

func TestTheCoveragePageListsEveryOperation(t *testing.T) {
	want, served := coverage()
	fmt.Printf("FIGURE operations served=%d of=%d\n", served, len(routes))
	if *update {
		if err := os.WriteFile(coveragePage, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	howto, err := os.ReadFile("../docs/howto/simulator.md")
	text := strings.Join(strings.Fields(string(howto)), " ")
	if says := fmt.Sprintf("%d of the %d operations", served, len(routes)); !strings.Contains(text,
		says) {
		t.Errorf("docs/howto/simulator.md does not say %q (%v)", says, err)
	}
	aliases, err := os.ReadFile("server.go")
	for _, spec := range []any{Config{}, InstanceSpec{}, ImageSpec{}, DiskSpec{}} {
		for f := range reflect.TypeOf(spec).Fields() {
			if !strings.Contains(string(aliases), f.Name) {
				t.Errorf("the alias of %T does not mention %s (%v)", spec, f.Name, err)
			}
		}
	}
	got, err := os.ReadFile(coveragePage)
	if err != nil || string(got) != want {
		t.Errorf("%s is not what the operations are (%v): go test ./simulator -run Coverage -update "+
			"writes it", coveragePage, err)
	}
}

func TestEveryOperationOfTheRackHasARoute(t *testing.T) {
	names := map[string]bool{}
	for _, op := range routes {
		names[op.name] = true
		path := "/" + regexp.MustCompile(`{[^}]*}`).
			ReplaceAllString(strings.Join(op.path, "/"), "x")
		got, _, err := route(op.method, path)
		if err != nil || got.name != op.name {
			t.Errorf("%s %s leads to %+v (%v), want %s", op.method, path, got, err, op.name)
		}
	}
	for name := range served {
		if !names[name] {
			t.Errorf("%s is served but no operation of the rack", name)
		}
	}
}
