package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const (
	// dirVersion is the version of the layout of a simulator's directory.
	dirVersion  = "2"
	recordsFile = "rack.db"
	// markFile is in every directory of a simulator, and markText its first line. A line with the
	// version follows, and in a directory that nobody named one with its process.
	markFile = "oxide-simulator.mark"
	markText = "This directory belongs to oxide-simulator. It removes files here."
	// olderMark is what a directory has instead that an older simulator made.
	olderMark = "VERSION"
)

// mark is what the mark of a directory says.
type mark struct{ version, process string }

// readMark reads a directory's mark. Without one, and for an empty one that a full disk has left,
// the error is fs.ErrNotExist.
func readMark(dir string) (m mark, err error) {
	path := filepath.Join(dir, markFile)
	text, err := readSmall(path)
	if err == nil && text == "" {
		err = fs.ErrNotExist
	}
	if err != nil {
		return m, err
	}
	lines := append(strings.Split(text, "\n"), "", "", "")
	if lines[0] != markText {
		return m, fmt.Errorf("%s is not a simulator's mark: give another directory", path)
	}
	m.version = strings.TrimPrefix(lines[1], "version ")
	m.process = strings.TrimPrefix(lines[2], "process ")
	return m, nil
}

// readSmall reads a short regular file.
func readSmall(path string) (string, error) {
	info, err := os.Lstat(path)
	if err == nil && (!info.Mode().IsRegular() || info.Size() > 1<<10) {
		err = fmt.Errorf("%s is no small file", path)
	}
	if err != nil {
		return "", err
	}
	text, err := os.ReadFile(path)
	return string(text), err
}

// write makes the mark in a directory that has none.
func (m mark) write(dir string) error {
	path := filepath.Join(dir, markFile)
	if text, err := readSmall(path); err == nil && text == "" {
		if err := os.Remove(path); err != nil {
			return fmt.Errorf("mark the directory: %w", err)
		}
	}
	text := markText + "\nversion " + m.version + "\n"
	if m.process != "" {
		text += "process " + m.process + "\n"
	}
	if err := writeDurably(path, text, os.O_EXCL); err != nil {
		return err
	}
	return dataplane.FlushDir(dir)
}

// prepareDir verifies that dir is a simulator's directory of this version, with its records, before
// anything in it is changed. process is that of a directory that nobody named.
func prepareDir(dir, process string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	found, err := readMark(dir)
	if errors.Is(err, fs.ErrNotExist) {
		found, err = claimDir(dir, process)
	}
	if err != nil {
		return err
	}
	if found.version != dirVersion {
		return fmt.Errorf("%s says version %.20q and this simulator reads version %q; "+
			"use the simulator that made the directory, or another directory",
			dir, found.version, dirVersion)
	}
	if _, err := os.Lstat(filepath.Join(dir, recordsFile)); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	for _, kind := range dataplane.Kinds {
		files, err := os.ReadDir(filepath.Join(dir, kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("read the directory: %w", err)
		}
		if len(files) > 0 {
			return fmt.Errorf("it has %s, and the records of them (%s) are missing: put a copy of %s "+
				"there, or start with another directory; nothing was changed", kind, recordsFile, recordsFile)
		}
	}
	return nil
}

// claimDir marks an empty directory as a simulator's, or one of an older simulator, which has the
// records of a rack. It refuses a directory that is not empty, with two exceptions: empty guest
// views, which may be mounted before the rack starts, and an identity, which the caller may choose.
func claimDir(dir, process string) (mark, error) {
	m := mark{dirVersion, process}
	if older, err := readSmall(filepath.Join(dir, olderMark)); err == nil {
		switch ofRack, err := store.Verify(filepath.Join(dir, recordsFile)); {
		case ofRack:
			if m.version = strings.TrimSpace(older); m.version != dirVersion {
				return m, nil
			}
			return m, m.write(dir)
		case err != nil && !errors.Is(err, fs.ErrNotExist):
			return m, err
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return m, fmt.Errorf("read the directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() == "lost+found" || e.Name() == dataplane.IdentityFile || e.Name() == markFile {
			continue
		}
		if awaits, err := awaitsGuests(dir, e); err != nil {
			return m, err
		} else if !awaits {
			return m, fmt.Errorf("it holds %q and no %s, so it is not a simulator's; "+
				"give an empty directory or one that does not exist", e.Name(), markFile)
		}
	}
	return m, m.write(dir)
}

// awaitsGuests reports whether an entry is the directory of the guest views and all views are
// empty.
func awaitsGuests(dir string, entry fs.DirEntry) (bool, error) {
	if entry.Name() != "guests" || !entry.IsDir() {
		return false, nil
	}
	views, err := os.ReadDir(filepath.Join(dir, "guests"))
	if err != nil {
		return false, fmt.Errorf("read the guests' views: %w", err)
	}
	for _, view := range views {
		if !view.IsDir() {
			return false, nil
		}
		inside, err := os.ReadDir(filepath.Join(dir, "guests", view.Name()))
		if err != nil {
			return false, fmt.Errorf("read a guest's view: %w", err)
		}
		if len(inside) > 0 {
			return false, nil
		}
	}
	return true, nil
}

// WriteDurably writes a file, which is on disk when it returns.
func WriteDurably(path, text string) error { return writeDurably(path, text, os.O_TRUNC) }

func writeDurably(path, text string, flag int) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|flag, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
