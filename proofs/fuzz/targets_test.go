package fuzz

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// root is the module's directory, relative to the directory of this package.
const root = "../.."

// leastSeeds is the minimum number of seeds that the tree must have for each target.
const leastSeeds = 3

// target is a fuzz target of the module.
type target struct {
	// dir is the directory of its package below root, with slashes.
	dir, name string
}

// corpus returns the directory of its seeds.
func (t target) corpus() string {
	return filepath.Join(root, t.dir, "testdata", "fuzz", t.name)
}

// seeds lists the names of its seeds.
func (t target) seeds() ([]string, error) {
	entries, err := os.ReadDir(t.corpus())
	var names []string
	for _, entry := range entries {
		names = append(names, entry.Name())
	}
	return names, err
}

var declaration = regexp.MustCompile(`(?m)^func (Fuzz\w+)\(\w+ \*testing\.F\)`)

// targets finds every fuzz target in the module's sources.
func targets() ([]target, error) {
	var found []target
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		name := entry.Name()
		switch {
		case err != nil:
			return err
		case entry.IsDir() && path != root && (strings.HasPrefix(name, ".") || name == "testdata"):
			return filepath.SkipDir
		case entry.IsDir(), !strings.HasSuffix(name, "_test.go"):
			return nil
		}
		text, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		dir, err := filepath.Rel(root, filepath.Dir(path))
		if err != nil {
			return err
		}
		for _, match := range declaration.FindAllSubmatch(text, -1) {
			found = append(found, target{filepath.ToSlash(dir), string(match[1])})
		}
		return nil
	})
	if err == nil && len(found) == 0 {
		err = fmt.Errorf("no fuzz target below %s", root)
	}
	return found, err
}

func TestEveryTargetHasItsSeedsInTheTree(t *testing.T) {
	all, err := targets()
	if err != nil {
		t.Fatal(err)
	}
	known := map[string]bool{}
	for _, one := range all {
		known[filepath.Clean(one.corpus())] = true
		seeds, err := one.seeds()
		if err != nil {
			t.Errorf("%s in %s: %v", one.name, one.dir, err)
		}
		if len(seeds) < leastSeeds {
			t.Errorf("%s in %s has %d seeds, %d at least", one.name, one.dir, len(seeds), leastSeeds)
		}
	}
	corpora, err := filepath.Glob(filepath.Join(root, "*", "testdata", "fuzz", "*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, corpus := range corpora {
		if !known[filepath.Clean(corpus)] {
			t.Errorf("%s holds seeds of no target", corpus)
		}
	}
}
