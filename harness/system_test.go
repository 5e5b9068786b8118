//go:build linux

package harness

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestRunDirectoriesAreNotOnFilesystemsMountedWithNodev(t *testing.T) {
	dir := Need(os.MkdirTemp("/var/tmp", "nodev-"))(t)
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, ""); err != nil {
		t.Fatalf("mount a tmpfs, which requires root: %v", err)
	}
	t.Cleanup(func() { csitest.Must(t, errors.Join(unix.Unmount(dir, 0), os.Remove(dir))) })
	t.Setenv("TMPDIR", dir)
	if got, err := runParent(RunParents()); err != nil || got != "/var/tmp" {
		t.Errorf("runParent = %q, %v, want /var/tmp", got, err)
	}
	t.Setenv("OXIDE_SANITY_DIR", dir)
	csitest.Says(t, csitest.Err(runParent(RunParents())), "mounted nodev") // there is no fallback
}

func TestOnlyDirectoriesOfKilledRunsAreRemoved(t *testing.T) {
	old := time.Now().Add(-time.Hour)
	for name, c := range map[string]struct{ locked, failed, stays bool }{
		"killed": {}, "failed": {failed: true, stays: true}, "running": {locked: true, stays: true},
	} {
		t.Run(name, func(t *testing.T) {
			dir := Need(os.MkdirTemp(shm, "oxide-sanity-"))(t)
			defer os.RemoveAll(dir)
			if c.failed {
				csitest.Must(t, os.WriteFile(filepath.Join(dir, failedMark), nil, 0o600))
			}
			if c.locked {
				defer Need(LockDir(dir))(t).Close()
			}
			csitest.Must(t, os.Chtimes(dir, old, old))
			removeKilled()
			if _, err := os.Stat(dir); (err == nil) != c.stays {
				t.Errorf("after removeKilled: %v", err)
			}
		})
	}
}
