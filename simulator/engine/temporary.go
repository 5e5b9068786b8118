package engine

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

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

// processOf returns what identifies a process: the boot of the machine, the PID namespace, the PID
// and the start time. It returns "" for one that has ended, and where /proc does not tell.
func processOf(pid int) string {
	boot, bootErr := os.ReadFile("/proc/sys/kernel/random/boot_id")
	space, spaceErr := os.Readlink("/proc/self/ns/pid")
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	// The program's name, in parentheses, may contain anything. The first field behind it is the
	// state, and the 20th is the start time.
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if errors.Join(bootErr, spaceErr, err) != nil || len(fields) < 20 ||
		fields[0] == "Z" || fields[0] == "X" {
		return ""
	}
	return fmt.Sprintf("%s %s %d %s", strings.TrimSpace(string(boot)), space, pid, fields[19])
}

// ended reports whether a process has ended for certain. Nobody here sees those of other PID
// namespaces.
func ended(process string) bool {
	was, us := strings.Fields(process), strings.Fields(processOf(os.Getpid()))
	if len(was) != 4 || len(us) != 4 {
		return false
	}
	pid, err := strconv.Atoi(was[2])
	return was[0] != us[0] || err == nil && was[1] == us[1] && processOf(pid) != process
}
