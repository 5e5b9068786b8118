package main

import (
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
)

// walls contains the tables.
type walls struct {
	module string
	// levels contains the position of each top directory in the table of rooms; the highest is first.
	levels map[string]int
	rooms  map[string]*room // by the directory of the package
	// libraries contains the names of the libraries by their import paths.
	libraries map[string]string
	free      map[string]string // anyPackage, anyTest or "", by the library's name
	never     []never
}

// The cells of a library that needs no room's permission.
const (
	anyPackage = "any package"
	anyTest    = "any test"
)

// room lists the imports that a package may have: directories of packages, and names of libraries.
type room struct {
	imports, tests []string
	promise        string
}

// never lists the libraries that a package must not link, not even through others.
type never struct {
	from      string
	libraries []string
	promise   string
}

// parse reads the tables. The name of a package is the end of its path.
func parse(document, module string) (*walls, error) {
	w := &walls{module: module, levels: map[string]int{}, rooms: map[string]*room{}, libraries: map[string]string{},
		free: map[string]string{}}
	levels, err := table(document, "room", "its one job")
	if err != nil {
		return nil, err
	}
	for i, row := range levels {
		for _, top := range list(row[0]) {
			w.levels[top] = i + 1
		}
	}
	libraries, err := table(document, "library", "import paths", "imported by", "what for")
	if err != nil {
		return nil, err
	}
	for _, row := range libraries {
		for _, path := range list(row[1]) {
			if w.libraries[path] != "" {
				return nil, fmt.Errorf("two libraries have the import path %s", path)
			}
			w.libraries[path] = row[0]
		}
		w.free[row[0]] = row[2]
	}
	rooms, err := table(document, "package", "its one job", "imports", "its tests, too", "promise")
	if err != nil {
		return nil, err
	}
	for _, row := range rooms {
		name := strings.Trim(row[0], "`")
		if w.rooms[name] != nil {
			return nil, fmt.Errorf("two rows are about %s", name)
		}
		if row[4] == "" {
			return nil, fmt.Errorf("the row of %s gives no promise", name)
		}
		w.rooms[name] = &room{promise: row[4]}
	}
	for _, row := range rooms {
		r := w.rooms[strings.Trim(row[0], "`")]
		if r.imports, err = w.names(row[2]); err == nil {
			r.tests, err = w.names(row[3])
		}
		if err != nil {
			return nil, fmt.Errorf("the row of %s: %w", row[0], err)
		}
	}
	links, err := table(document, "package", "never links", "promise")
	if err != nil {
		return nil, err
	}
	for _, row := range links {
		names, err := w.names(row[0] + ", " + row[1])
		if err != nil {
			return nil, fmt.Errorf("what %s never links: %w", row[0], err)
		}
		w.never = append(w.never, never{names[0], names[1:], row[2]})
	}
	return w, nil
}

// table returns the cells of the one table with this header.
func table(document string, header ...string) ([][]string, error) {
	var rows [][]string
	within := false
	for line := range strings.Lines(document) {
		line, isRow := strings.CutPrefix(strings.TrimSpace(line), "|")
		cells := strings.Split(strings.TrimSuffix(line, "|"), "|")
		for i := range cells {
			cells[i] = strings.TrimSpace(cells[i])
		}
		switch {
		case isRow && slices.Equal(cells, header):
			within = true
		case !isRow:
			within = false
		case within && len(cells) != len(header):
			return nil, fmt.Errorf("%q has %d cells, want %d", line, len(cells), len(header))
		case within && strings.Trim(cells[0], "-") != "":
			rows = append(rows, cells)
		}
	}
	if len(rows) == 0 {
		return nil, fmt.Errorf("no table has the columns %q", header)
	}
	return rows, nil
}

// list returns the items of a cell.
func list(cell string) []string {
	var items []string
	for item := range strings.SplitSeq(cell, ",") {
		if item = strings.Trim(item, " `"); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// names returns the packages and libraries that a cell names.
func (w *walls) names(cell string) ([]string, error) {
	items := list(cell)
	for i, item := range items {
		if w.rooms[item] != nil {
			continue
		}
		var found []string
		if _, ok := w.free[item]; ok {
			found = append(found, item)
		}
		for name := range w.rooms {
			if strings.HasSuffix(name, "/"+item) {
				found = append(found, name)
			}
		}
		if len(found) != 1 {
			slices.Sort(found)
			return nil, fmt.Errorf("%q names %q, want one package or library: write more of the path",
				item, found)
		}
		items[i] = found[0]
	}
	return items, nil
}

// target returns the directory of the package with an import path, or the name of the library. It
// returns "" for packages of the standard library that no row names, and the path itself for
// anything else.
func (w *walls) target(of string) string {
	if dir, ok := strings.CutPrefix(of, w.module+"/"); ok {
		return dir
	}
	for at := of; at != "."; at = path.Dir(at) {
		if name := w.libraries[at]; name != "" {
			return name
		}
	}
	if first, _, _ := strings.Cut(of, "/"); !strings.Contains(first, ".") {
		return ""
	}
	return of
}

// refusal returns why an import is refused, or "".
func (w *walls) refusal(i imported) string {
	to, r := w.target(i.path), w.rooms[i.from]
	switch {
	case r == nil: // check reports the package.
		return ""
	case to == "", to == i.from, slices.Contains(r.imports, to), w.free[to] == anyPackage,
		i.test && (slices.Contains(r.tests, to) || w.free[to] == anyTest):
		return ""
	}
	return fmt.Sprintf("%s: %s must not import %s, which its row in %s does not name (%s). "+
		"Do without, or add it to the row if the promise still holds", i.at, i.from, to, document,
		r.promise)
}

// check returns the imports that are refused, and the names in the tables that nothing needs.
func (w *walls) check(t tree) []string {
	type edge struct {
		from, to string
		test     bool
	}
	var problems []string
	used := map[edge]bool{}
	for _, i := range t.imports {
		if problem := w.refusal(i); problem != "" {
			problems = append(problems, problem)
		}
		used[edge{i.from, w.target(i.path), i.test}] = true
		used[edge{to: w.target(i.path)}] = true
	}
	needless := func(what string) {
		problems = append(problems, fmt.Sprintf("%s: %s. Remove it", document, what))
	}
	for _, name := range slices.Sorted(maps.Keys(w.rooms)) {
		r := w.rooms[name]
		for _, to := range slices.Concat(r.imports, r.tests) {
			if w.rooms[to] != nil && w.level(to) < w.level(name) {
				problems = append(problems, fmt.Sprintf("%s: %s must not import %s, whose room is above "+
					"in %s", document, name, to, overview))
			}
		}
		if !slices.Contains(t.packages, name) {
			needless("the row of " + name + " is about no package")
		}
		for _, to := range r.imports {
			if !used[edge{name, to, false}] || w.free[to] == anyPackage {
				needless("the row of " + name + " need not name " + to)
			}
		}
		for _, to := range r.tests {
			if !used[edge{name, to, true}] || w.free[to] != "" || slices.Contains(r.imports, to) {
				needless("the row of " + name + " need not name " + to + " for tests")
			}
		}
	}
	for _, path := range slices.Sorted(maps.Keys(w.libraries)) {
		if !used[edge{to: w.libraries[path]}] {
			needless("no package imports the library " + w.libraries[path])
		}
	}
	for _, name := range t.packages {
		if w.rooms[name] == nil {
			problems = append(problems, fmt.Sprintf("%s has no row in %s, so it may import nothing: "+
				"add one", name, document))
		} else if w.level(name) == 0 {
			problems = append(problems, fmt.Sprintf("%s is in no room of %s", name, overview))
		}
	}
	return problems
}

// level returns the place of a package's room, or 0 for a package in none.
func (w *walls) level(name string) int {
	top, _, _ := strings.Cut(name, "/")
	return w.levels[top]
}

// linked returns the libraries that a package links although it must not.
func (w *walls) linked(n never, paths []string) []string {
	var problems []string
	for _, of := range paths {
		if to := w.target(of); slices.Contains(n.libraries, to) {
			problems = append(problems, fmt.Sprintf("%s: %s links %s (%s), which it never may: %s", document,
				n.from, to, of, n.promise))
		}
	}
	return problems
}
