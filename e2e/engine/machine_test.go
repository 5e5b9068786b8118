//go:build linux

package engine

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/moby/sys/mountinfo"
)

func TestMountsBelowADirectoryAreUnmounted(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Fatal("only root can mount: run the tests as root, as make test does")
	}
	dir := t.TempDir()
	inner := filepath.Join(dir, "outer", "inner")
	// One mount covers another, as an engine leaves them that was killed twice.
	for _, path := range []string{filepath.Dir(inner), inner, inner} {
		if err := os.MkdirAll(path, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := syscall.Mount("none", path, "tmpfs", 0, ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := unmountBelow(t.Context(), dir); err != nil {
		t.Fatal(err)
	}
	left, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil || len(left) != 0 {
		t.Errorf("after unmountBelow there are %d mounts, %v", len(left), err)
	}
}
