//go:build linux

package node

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/filesystem"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestAFilesystemThatWasFilledWithoutAMountIsNotFormatted(t *testing.T) {
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
	files := t.TempDir()
	must(t, os.WriteFile(filepath.Join(files, "hello"), []byte("rack"), 0o600))
	guesttest.Run(t, "mke2fs", "-q", "-t", volume.Ext4, "-d", files, v.disk.Loop)
	for _, slot := range filesystem.RecordOffsets(v.disk.SizeBytes) {
		v.disk.WriteAt(t, slot, v.formatRecord(t))
	}
	must(t, v.stage())
	if b, err := os.ReadFile(filepath.Join(v.staging(), "hello")); string(b) != "rack" {
		t.Fatalf("the file holds %q, %v", b, err)
	}
}
