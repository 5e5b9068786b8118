//go:build linux

package node

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestAVolumeLivesFromStageToUnstage(t *testing.T) {
	for _, fsType := range []string{"", volume.Ext4, volume.Ext3, volume.XFS, volume.Btrfs} {
		t.Run("a filesystem volume of type "+fsType+" keeps its data over two lives", func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach("csi-0123456789abcdef", guesttest.GiB), fsType)
			must(t, v.stage())
			must(t, v.publish("pod"))
			file := filepath.Join(g.path("pod"), "hello")
			must(t, os.WriteFile(file, []byte("rack"), 0o600))
			must(t, v.unpublish("pod"))
			must(t, v.unstage())
			if left := guesttest.Mounts(t, g.Dir); len(left) > 0 {
				t.Fatalf("mounts left: %q", left)
			}

			must(t, v.stage())
			must(t, v.publish("pod"))
			if got, err := os.ReadFile(file); err != nil || string(got) != "rack" {
				t.Fatalf("the second life reads %q, %v", got, err)
			}
			must(t, v.unpublish("pod"))
			must(t, v.unstage())
		})
	}
	t.Run("a block volume keeps its data over two lives", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach("csi-0123456789abcdef", 64*guesttest.MiB), "block")
		must(t, v.stage())
		must(t, v.publish("dev"))
		f, err := os.OpenFile(g.path("dev"), os.O_WRONLY, 0)
		must(t, err)
		_, err = f.WriteString("raw rack")
		must(t, err)
		must(t, f.Close())
		must(t, v.unpublish("dev"))
		must(t, v.unstage())
		if b, err := os.ReadFile(v.disk.File); err != nil || !strings.HasPrefix(string(b), "raw rack") {
			t.Fatalf("the disk begins with %q, %v", b[:8], err)
		}
	})
}
