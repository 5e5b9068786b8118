package images

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// hash returns a name for the given strings: equal strings have equal names.
func hash(inputs ...string) string {
	sum := sha256.New()
	for _, input := range inputs {
		// The length distinguishes "ab", "c" from "a", "bc".
		fmt.Fprintf(sum, "%d:%s", len(input), input)
	}
	return hex.EncodeToString(sum.Sum(nil))[:12]
}

// hashTree returns a name for a tree's paths and contents. Permissions do not count.
func hashTree(tree fs.FS) (string, error) {
	var inputs []string
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		inputs = append(inputs, path, string(content))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("hash what an image is made of: %w", err)
	}
	return hash(inputs...), nil
}

// keep returns the path of a file or directory in the cache. Its name contains the hash of its
// inputs. If it is missing, keep removes older ones, calls build with a temporary path, and renames
// the result.
func (b *Builder) keep(dir, name, inputs, extension string, build func(partial string) error) (
	string, error) {
	dir = filepath.Join(b.Cache, dir)
	path := filepath.Join(dir, name+"-"+inputs+extension)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the directory of %s: %w", dir, err)
	}
	old, err := filepath.Glob(filepath.Join(dir, name+"-????????????"+extension))
	if err != nil {
		return "", err
	}
	for _, file := range old {
		if err := os.RemoveAll(file); err != nil {
			return "", fmt.Errorf("remove what an older version has left: %w", err)
		}
	}
	if err := build(path + ".partial"); err != nil {
		return "", err
	}
	if err := os.Rename(path+".partial", path); err != nil {
		return "", fmt.Errorf("keep what was built: %w", err)
	}
	return path, nil
}

// scratch creates a directory for a build, on the file system of the files that go into it.
func (b *Builder) scratch() (string, error) {
	parent := filepath.Join(b.Cache, "build")
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make a directory to build in: %w", err)
	}
	dir, err := os.MkdirTemp(parent, "")
	if err != nil {
		return "", fmt.Errorf("make a directory to build in: %w", err)
	}
	return dir, nil
}

// Tidy removes incomplete builds of a run that was killed. Nobody else may build at the same time.
func (b *Builder) Tidy() error {
	left, err := filepath.Glob(filepath.Join(b.Cache, "*", "*.partial"))
	if err != nil {
		return err
	}
	for _, path := range append(left, filepath.Join(b.Cache, "build")) {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove what a run that was killed left: %w", err)
		}
	}
	return nil
}

// place puts a file of the cache where a build finds it. Both are on one file system.
func place(from, to string) error {
	if err := os.Link(from, to); err != nil {
		return fmt.Errorf("place a file for a build: %w", err)
	}
	return nil
}
