//go:build linux

package node

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestAnUnstageEndsTheReadOfTheVolumesDisk(t *testing.T) {
	before := goleak.IgnoreCurrent()
	g := newGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.GiB), volume.Ext4)
	v.Whole = true
	n := g.node()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	csitest.Want(t, csitest.Call(ctx, n, v.stageRequest()), codes.Aborted, csierr.DiskProofPending)
	must(t, csitest.Call(t.Context(), n, v.unstageRequest()))
	goleak.VerifyNone(t, before)
}

// A read of a disk that is detached meanwhile fails, but the disk has not failed.
func TestADiskThatIsDetachedWhileItIsReadIsNotFound(t *testing.T) {
	v := newGuest(t).disk(64, volume.Ext4)
	v.Whole = true
	goOn := stopOnce(t, "blkid", v.stage)
	v.guest.Unplug(v.disk)
	must(t, os.Truncate(v.disk.File, 0))
	guesttest.Run(t, "losetup", "--set-capacity", v.disk.Loop)
	csitest.Want(t, goOn(), codes.NotFound, csierr.DeviceNotFound)
}

// TestDiscardsDecideNothing tries disks whose bytes stay when they are discarded, as on a rack, and
// disks whose bytes become zero.
func TestDiscardsDecideNothing(t *testing.T) {
	for _, fsType := range []string{volume.Ext4, volume.XFS, volume.Btrfs} {
		for zeroed, option := range map[bool]guesttest.Option{false: guesttest.NoDiscards,
			true: guesttest.BlockSize(512)} {
			t.Run(fmt.Sprint(fsType, " zeroed ", zeroed), func(t *testing.T) {
				g := newGuest(t)
				v := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB, option), fsType)
				v.disk.WriteAt(t, 0, bytes.Repeat([]byte("foreign"), guesttest.MiB))
				out, err := exec.Command("blkdiscard", "--force", v.disk.Loop).CombinedOutput()
				if (err == nil) != zeroed {
					t.Fatalf("blkdiscard: %v %s", err, out)
				}
				if !zeroed {
					csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
					guesttest.Run(t, "blkdiscard", "--zeroout", v.disk.Loop)
				}
				must(t, v.stage())
				hello := filepath.Join(v.staging(), "hello")
				must(t, os.WriteFile(hello, []byte("rack"), 0o600))
				if err := exec.Command("fstrim", v.staging()).Run(); (err == nil) != zeroed {
					t.Errorf("fstrim: %v", err)
				}
				must(t, v.unstage())
				must(t, v.stage())
				holds(t, hello, "rack")
				must(t, v.unstage())
				force := map[string]string{volume.Ext4: "-F"}[fsType]
				guesttest.Run(t, "mkfs."+fsType, cmp.Or(force, "-f"), v.disk.Loop) // it discards first
				must(t, v.stage())
				must(t, v.unstage())
			})
		}
	}
}
