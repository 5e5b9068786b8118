package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

const (
	dirVersion  = "2"
	recordsFile = "rack.db"
	// markFile is the name of a file in every directory of a simulator. Its lines are markText, the
	// version and, in a temporary directory, the process that made the directory.
	markFile = "oxide-simulator.mark"
	markText = "This directory belongs to oxide-simulator. It removes files here."
)

type mark struct{ version, process string }

// readMark reads a directory's mark file. The error is fs.ErrNotExist if the file is missing or
// empty: a full disk may have left an empty file.
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

// readSmall reads a regular file of at most 1 KiB. It does not block if the file is a pipe.
func readSmall(path string) (string, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return "", err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && (!info.Mode().IsRegular() || info.Size() > 1<<10) {
		err = fmt.Errorf("%s is not a small file", path)
	}
	if err != nil {
		return "", err
	}
	text, err := io.ReadAll(f)
	return string(text), err
}

// write writes a new mark file, or replaces an empty one.
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

// prepareDir accepts dir if dir is missing, empty, or has the mark and records of this version. It
// refuses any other dir without a change to its files. process is "" unless dir is temporary.
func prepareDir(dir, process string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make the directory: %w", err)
	}
	found, err := readMark(dir)
	unmarked := errors.Is(err, fs.ErrNotExist)
	if unmarked {
		found, err = mark{dirVersion, process}, claimDir(dir)
	}
	if err != nil {
		return err
	}
	if found.version != dirVersion {
		return fmt.Errorf("%s says version %.20q and this simulator reads version %q; "+
			"use the simulator that made the directory, or another directory",
			dir, found.version, dirVersion)
	}
	_, missing := os.Lstat(filepath.Join(dir, recordsFile))
	for _, kind := range dataplane.Kinds {
		files, err := os.ReadDir(filepath.Join(dir, kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("read the directory: %w", err)
		}
		if len(files) > 0 && missing != nil {
			return fmt.Errorf("it has %s, and the records of them (%s) are missing: put a copy of %s "+
				"there, or start with another directory; nothing was changed", kind, recordsFile, recordsFile)
		}
	}
	if err := makePrivate(dir); err != nil || !unmarked {
		return err
	}
	return found.write(dir)
}

// makePrivate takes away other users' permission to write in the directory. It returns an error if
// the directory contains links, pipes, or files of other users, so that the rack opens, renames and
// removes only its own files. It does not check the guest views.
func makePrivate(dir string) error {
	owner := os.Geteuid()
	if of, err := os.Stat(dir); err == nil && owner == 0 {
		owner = int(of.Sys().(*syscall.Stat_t).Uid) // root can serve another user's directory
	}
	for _, depth := range []string{".", "*", "*/*"} {
		names, _ := fs.Glob(os.DirFS(dir), depth) // the pattern is valid
		for _, name := range names {
			path := dir + "/" + name
			info, err := os.Lstat(path)
			if errors.Is(err, syscall.ENOTCONN) || strings.HasPrefix(name, "lost+found/") {
				continue // the mount point of a killed FUSE server, or a file that fsck has saved
			}
			if err != nil {
				return fmt.Errorf("read the directory: %w", err)
			}
			st, mode := info.Sys().(*syscall.Stat_t), info.Mode()
			switch {
			case st.Uid != 0 && int(st.Uid) != os.Geteuid() && int(st.Uid) != owner:
				return fmt.Errorf("%s belongs to user %d, who could change what the rack has there: give a "+
					"directory that does not exist, or give it to user %d", path, st.Uid, os.Geteuid())
			case mode.IsDir() && mode.Perm()&0o022 != 0:
				if err := os.Chmod(path, mode&^0o022); err != nil {
					return fmt.Errorf("keep others from writing in the directory: %w; give one of your own in it",
						err)
				}
			case mode.IsRegular() && st.Nlink > 1 && !strings.HasPrefix(name, recordsFile):
				return fmt.Errorf("%s also has another name: put a copy in its place", path)
			case !mode.IsDir() && !mode.IsRegular() && mode&os.ModeDevice == 0:
				return fmt.Errorf("%s is %s, and a rack has only files and directories: move it away",
					path, mode)
			}
		}
	}
	return nil
}

// claimDir verifies that an unmarked directory is empty. It permits empty guest views, which may be
// mounted before the rack starts, and a file with the rack's identity, which a user may provide.
func claimDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read the directory: %w", err)
	}
	for _, e := range entries {
		if e.Name() == "lost+found" || e.Name() == dataplane.IdentityFile || e.Name() == markFile {
			continue
		}
		if awaits, err := awaitsGuests(dir, e); err != nil {
			return err
		} else if !awaits {
			return fmt.Errorf("it holds %q and no %s, so it is not a simulator's; "+
				"give an empty directory or one that does not exist", e.Name(), markFile)
		}
	}
	return nil
}

// awaitsGuests reports whether entry is the directory of the guest views and all views are empty.
func awaitsGuests(dir string, entry fs.DirEntry) (awaits bool, err error) {
	if entry.Name() != "guests" || !entry.IsDir() {
		return false, nil
	}
	awaits = true
	err = fs.WalkDir(os.DirFS(dir), "guests", func(path string, e fs.DirEntry, err error) error {
		if awaits = err == nil && e.IsDir() && strings.Count(path, "/") < 2; err == nil && !awaits {
			err = fs.SkipAll
		}
		return err
	})
	if err != nil {
		return false, fmt.Errorf("read the guests' views: %w", err)
	}
	return awaits, nil
}

// WriteDurably writes a file. The file is on disk when the call returns.
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

// temporaryPrefix begins the name of a temporary directory, which Close removes.
const temporaryPrefix = "oxide-simulator-"

// removeLeft removes the temporary directories of killed simulators, with their devices and mounts.
// If it cannot remove a directory, the next start tries again.
func (r *Simulation) removeLeft(ctx context.Context) {
	found, _ := filepath.Glob(filepath.Join(os.TempDir(), temporaryPrefix+"*")) // the pattern is valid
	for _, dir := range found {
		if !abandoned(dir) {
			continue
		}
		if err := removeTemporary(ctx, dir); err != nil {
			r.log.Warn("the directory of a rack that was killed stays", slog.String("dir", dir),
				slog.String("error", err.Error()))
		}
	}
}

// abandoned reports whether a simulator of this user made the directory and has ended.
func abandoned(dir string) bool {
	info, err := os.Lstat(dir)
	if err != nil || !info.IsDir() || info.Mode().Perm() != 0o700 {
		return false
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	m, err := readMark(dir)
	return ok && int(st.Uid) == os.Geteuid() && err == nil &&
		m.version == dirVersion && ended(m.process)
}

// removeTemporary removes a temporary directory, if no process has its records open.
func removeTemporary(ctx context.Context, dir string) error {
	records, err := store.Open(filepath.Join(dir, recordsFile), true)
	switch {
	case err == nil:
		defer records.Close()
	case !errors.Is(err, store.ErrDamaged):
		return err
	}
	plane, err := dataplane.Open(dataplane.Config{Dir: dir, Log: slog.New(slog.DiscardHandler),
		Volatile: true, Devices: dataplane.DevicesIfPossible})
	if err == nil {
		err = errors.Join(plane.Reconcile(ctx, nil, nil), plane.Close())
	}
	if err != nil {
		return err
	}
	return dataplane.RemoveTree(dir)
}

// thisProcess returns the host's name, the boot ID, and an ID of this process that no other process
// since the boot has. It returns "" on a system that does not report these IDs.
func thisProcess() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	machine, unnamed := os.Hostname()
	process := loopdev.Process()
	if err != nil || unnamed != nil || process == "" {
		return ""
	}
	return machine + " " + strings.TrimSpace(string(boot)) + " " + process
}

// ended reports whether a process has ended. For a process of another host it returns false.
func ended(process string) bool {
	of, now := strings.Fields(process), strings.Fields(thisProcess())
	if len(of) != len(now) || len(of) == 0 || of[0] != now[0] {
		return false
	}
	gone, err := loopdev.Ended(of[2])
	return of[1] != now[1] || err == nil && gone
}
