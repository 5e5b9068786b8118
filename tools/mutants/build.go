package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

var spaces = regexp.MustCompile(`\s+`)

// switches is a file that is added to each package with mutants.
const switches = `package %s

import (
	"os"
	"sync"
)

var (
	activeMutant   = os.Getenv("MUTANT")
	reachedFile    = os.Getenv("MUTANTS_REACHED")
	reachedMutants sync.Map
)

func mutant(id string) bool {
	if reachedFile != "" {
		if _, known := reachedMutants.LoadOrStore(id, true); !known {
			f, err := os.OpenFile(reachedFile, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
			if err != nil {
				panic(err)
			}
			_, _ = f.WriteString(id + "\n")
			_ = f.Close()
		}
	}
	return id == activeMutant
}
`

// buildTests builds the test binaries of the packages in dirs, with all mutants of the packages. It
// leaves out mutants that the compiler refuses.
func buildTests(ctx context.Context, work string, packages []*pkg, dirs []string, sites []site) (
	binaries []test, left []site, err error) {
	for i := 0; i < len(dirs); {
		overlay, lines, err := writeOverlay(work, packages, sites)
		if err != nil {
			return nil, nil, err
		}
		dir, err := filepath.Abs(dirs[i])
		if err != nil {
			return nil, nil, err
		}
		b := test{binary: filepath.Join(work, fmt.Sprintf("%d.test", i)), dir: dir}
		cmd := exec.CommandContext(ctx, "go", "test", "-c", "-overlay", overlay, "-o", b.binary, ".")
		cmd.Dir = dir
		out, err := cmd.CombinedOutput()
		if err == nil {
			i++
			if _, err := os.Stat(b.binary); err == nil { // a package without tests has none
				binaries = append(binaries, b)
			}
			continue
		}
		left := without(sites, lines, dir, string(out))
		if len(left) == len(sites) {
			return nil, nil, fmt.Errorf("build the tests with mutants: %w\n%s", err, out)
		}
		sites = left
	}
	return binaries, sites, nil
}

var place = regexp.MustCompile(`(?m)^(\S+\.go):(\d+):\d+: `)

// without leaves out the mutants on the lines that the compiler reports. dir is the compiler's
// directory.
func without(sites []site, lines map[string]map[int][]string, dir, out string) []site {
	var bad []string
	for _, m := range place.FindAllStringSubmatch(out, -1) {
		path := m[1]
		if !filepath.IsAbs(path) {
			path = filepath.Join(dir, path)
		}
		if line, err := strconv.Atoi(m[2]); err == nil {
			bad = append(bad, lines[path][line]...)
		}
	}
	return slices.DeleteFunc(slices.Clone(sites), func(s site) bool { return slices.Contains(bad, s.id) })
}

// writeOverlay writes the changed files to another place, and returns the mutants on each of their
// lines.
func writeOverlay(work string, packages []*pkg, sites []site) (string, map[string]map[int][]string,
	error) {
	list := struct{ Replace map[string]string }{map[string]string{}}
	lines := map[string]map[int][]string{}
	write := func(path, text string) error {
		aside := filepath.Join(work, fmt.Sprintf("%d.go", len(list.Replace)))
		list.Replace[path] = aside
		return os.WriteFile(aside, []byte(text), 0o600)
	}
	for _, p := range packages {
		err := write(filepath.Join(p.dir, "zz_mutants.go"), fmt.Sprintf(switches, p.name))
		if err != nil {
			return "", nil, err
		}
		for name, text := range p.text {
			path := filepath.Join(p.dir, name)
			mine := slices.DeleteFunc(slices.Clone(sites), func(s site) bool {
				return s.pkg != p || s.file != name
			})
			if len(mine) == 0 {
				continue
			}
			changed, of := withMutants(text, mine)
			lines[path] = of
			if err := write(path, changed); err != nil {
				return "", nil, err
			}
		}
	}
	b, err := json.Marshal(list)
	if err != nil {
		return "", nil, err
	}
	path := filepath.Join(work, "overlay.json")
	return path, lines, os.WriteFile(path, b, 0o600)
}

// withMutants returns a file's text with its mutants, and the mutants on each line.
func withMutants(text []byte, sites []site) (string, map[int][]string) {
	slices.SortFunc(sites, func(a, b site) int { return a.start - b.start })
	var changed strings.Builder
	lines := map[int][]string{}
	done := 0
	for _, s := range sites {
		changed.Write(text[done:s.start])
		first := strings.Count(changed.String(), "\n") + 1
		changed.WriteString(s.with(s.id))
		last := strings.Count(changed.String(), "\n") + 1
		for line := first; line <= last; line++ {
			lines[line] = append(lines[line], s.id)
		}
		done = s.end
	}
	changed.Write(text[done:])
	return changed.String(), lines
}
