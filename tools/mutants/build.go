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

// switches is what a package with mutants has besides.
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

// build makes the test binaries of the packages in dirs, the first of which is p, with all mutants.
// Those that the compiler refuses are left out.
func (p *pkg) build(ctx context.Context, work string, dirs []string, sites []site) (
	binaries []test, left []site, err error) {
	for i := 0; i < len(dirs); {
		overlay, lines, err := p.overlay(work, sites)
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
		left := p.without(sites, lines, string(out))
		if len(left) == len(sites) {
			return nil, nil, fmt.Errorf("build the tests with mutants: %w\n%s", err, out)
		}
		sites = left
	}
	return binaries, sites, nil
}

var place = regexp.MustCompile(`(?m)^\S*?([\w.]+\.go):(\d+):\d+: `)

// without leaves out the mutants on the lines that the compiler complains about.
func (p *pkg) without(sites []site, lines map[string]map[int][]string, out string) []site {
	var bad []string
	for _, m := range place.FindAllStringSubmatch(out, -1) {
		line, err := strconv.Atoi(m[2])
		if err == nil {
			bad = append(bad, lines[m[1]][line]...)
		}
	}
	return slices.DeleteFunc(slices.Clone(sites), func(s site) bool { return slices.Contains(bad, s.id) })
}

// overlay writes the changed files aside, and says which mutants each of their lines has.
func (p *pkg) overlay(work string, sites []site) (string, map[string]map[int][]string, error) {
	list := struct{ Replace map[string]string }{map[string]string{}}
	lines := map[string]map[int][]string{}
	write := func(name, text string) error {
		aside := filepath.Join(work, name)
		list.Replace[filepath.Join(p.dir, name)] = aside
		return os.WriteFile(aside, []byte(text), 0o600)
	}
	if err := write("zz_mutants.go", fmt.Sprintf(switches, p.name)); err != nil {
		return "", nil, err
	}
	for name, text := range p.text {
		mine := slices.DeleteFunc(slices.Clone(sites), func(s site) bool { return s.file != name })
		slices.SortFunc(mine, func(a, b site) int { return a.start - b.start })
		var changed strings.Builder
		lines[name] = map[int][]string{}
		done := 0
		for _, s := range mine {
			changed.Write(text[done:s.start])
			first := strings.Count(changed.String(), "\n") + 1
			changed.WriteString(s.with(s.id))
			last := strings.Count(changed.String(), "\n") + 1
			for line := first; line <= last; line++ {
				lines[name][line] = append(lines[name][line], s.id)
			}
			done = s.end
		}
		changed.Write(text[done:])
		if len(mine) > 0 {
			if err := write(name, changed.String()); err != nil {
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
