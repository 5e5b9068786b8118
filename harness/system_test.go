//go:build linux

package harness

import (
	"errors"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestARunDoesNotUseADirectoryOnANodevFilesystem(t *testing.T) {
	dir, err := os.MkdirTemp("/var/tmp", "nodev-")
	csitest.Must(t, err)
	if err := unix.Mount("tmpfs", dir, "tmpfs", unix.MS_NODEV, ""); err != nil {
		t.Fatalf("mount a tmpfs, which takes root: %v", err)
	}
	t.Cleanup(func() {
		if err := errors.Join(unix.Unmount(dir, 0), os.Remove(dir)); err != nil {
			t.Error(err)
		}
	})
	t.Setenv("TMPDIR", dir)
	if got, err := runParent(RunParents()); err != nil || got != "/var/tmp" {
		t.Errorf("runParent = %q, %v, want /var/tmp", got, err)
	}
	t.Setenv("OXIDE_SANITY_DIR", dir)
	if got, err := runParent(RunParents()); err == nil || !strings.Contains(err.Error(), "mounted nodev") {
		t.Errorf("runParent = %q, %v, want a refusal: OXIDE_SANITY_DIR was chosen", got, err)
	}
}
