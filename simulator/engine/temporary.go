package engine

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

// temporaryPrefix begins the name of a directory that nobody named, which ends with its rack.
const temporaryPrefix = "oxide-simulator-"

// removeLeft removes the directories that killed racks have left, with their devices and mounts.
// What cannot be removed stays for the next start.
func (r *Simulation) removeLeft(ctx context.Context) {
	found, _ := filepath.Glob(filepath.Join(os.TempDir(), temporaryPrefix+"*")) // no pattern of others
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

// abandoned reports whether a directory was made by this user's simulator, in a process that has
// ended.
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

// removeTemporary removes the directory, if no process has its records open.
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

// thisProcess returns what identifies this process: the machine, its boot, and what identifies the
// process until the next one. It returns "" where the system does not tell.
func thisProcess() string {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	machine, unnamed := os.Hostname()
	process := loopdev.Process()
	if err != nil || unnamed != nil || process == "" {
		return ""
	}
	return machine + " " + strings.TrimSpace(string(boot)) + " " + process
}

// ended reports whether a process has ended for certain. One of another machine, with which this
// one shares the directory, may live.
func ended(process string) bool {
	of, now := strings.Fields(process), strings.Fields(thisProcess())
	if len(of) != len(now) || len(of) == 0 || of[0] != now[0] {
		return false
	}
	gone, err := loopdev.Ended(of[2])
	return of[1] != now[1] || err == nil && gone
}
