package engine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
)

const (
	// dirVersion is the version of the layout of a simulator's directory.
	dirVersion  = "2"
	versionFile = "VERSION"
	recordsFile = "rack.db"
)

// prepareDir verifies that dir is a simulator's directory of this version, before anything in it
// is changed.
func prepareDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	path := filepath.Join(dir, versionFile)
	version, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return claimDir(dir, path)
	}
	if err != nil {
		return fmt.Errorf("read the directory's version: %w", err)
	}
	if found := strings.TrimSpace(string(version)); found != dirVersion {
		return fmt.Errorf("%s says version %.20q and this simulator reads version %q; "+
			"use the simulator that made the directory, or another directory",
			path, found, dirVersion)
	}
	return nil
}

// claimDir marks an empty directory as a simulator's. It refuses a directory that is not empty,
// with two exceptions: empty guest views, which may be mounted before the rack starts, and an
// identity, which the caller may choose.
func claimDir(dir, versionPath string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read the directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() == "lost+found" || e.Name() == dataplane.IdentityFile ||
			strings.HasPrefix(e.Name(), versionFile) {
			continue
		}
		if awaits, err := awaitsGuests(dir, e); err != nil {
			return err
		} else if !awaits {
			return fmt.Errorf("it holds %q and no %s, so it is not a simulator's; "+
				"give an empty directory or one that does not exist", e.Name(), versionFile)
		}
	}
	temp := versionPath + ".tmp"
	if err := WriteDurably(temp, dirVersion+"\n"); err != nil {
		return err
	}
	if err := os.Rename(temp, versionPath); err != nil {
		return fmt.Errorf("write the directory's version: %w", err)
	}
	return dataplane.FlushDir(dir)
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
func WriteDurably(path, text string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
