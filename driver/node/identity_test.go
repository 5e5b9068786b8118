//go:build linux

package node

import (
	"os"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// A UUID as it is inherited from another volume's disk.
const inheritedUUID = "7d3c1f60-52c1-4f0e-8a57-2f5d1f0a9be1"

// expecting is the volume with what its disk's ownership tag says of the filesystem.
func (v testVolume) expecting(id string) testVolume {
	v.Tag = map[string]string{volume.CtxFilesystemUUID: id, volume.CtxOrigin: volume.OriginBlank,
		volume.CtxUse: volume.UseFilesystem}
	return v
}

func (v testVolume) hasUUID(t *testing.T, id string) {
	t.Helper()
	if got := uuidOf(t, v.disk); !strings.Contains(got, ` UUID="`+id+`"`) {
		t.Fatalf("the filesystem is %s, want the UUID %s", got, id)
	}
}

func TestTheFilesystemCarriesTheVolumesIdentity(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		newVolume := func(t *testing.T) testVolume {
			g := newGuest(t)
			return g.volume(g.Attach(guesttest.Serial, smallest(fsType)), fsType)
		}
		t.Run("a "+fsType+" is made with the volume's id", func(t *testing.T) {
			v := newVolume(t)
			must(t, v.stage())
			must(t, v.unstage())
			v.hasUUID(t, v.ID)
			v = v.expecting(v.ID)
			must(t, v.stage())
			v.checkStaged(t)
		})
		t.Run("a "+fsType+" is made with the UUID that is expected", func(t *testing.T) {
			v := newVolume(t).expecting(inheritedUUID)
			must(t, v.stage())
			v.checkStaged(t)
			v.hasUUID(t, inheritedUUID)
		})
		t.Run("a "+fsType+" of a volume whose id is no UUID has any", func(t *testing.T) {
			v := newVolume(t)
			v.ID = "a-static-volume"
			must(t, v.stage())
			v.checkStaged(t)
		})
		t.Run("a "+fsType+" with another UUID is refused, the bytes untouched", func(t *testing.T) {
			v := newVolume(t)
			must(t, v.stage())
			must(t, v.unstage())
			before := v.disk.Digest(t)
			for range 2 {
				err := v.expecting(inheritedUUID).stage()
				csitest.Want(t, err, codes.FailedPrecondition, csierr.WrongFilesystem)
				if !strings.Contains(err.Error(), v.ID) || !strings.Contains(err.Error(), inheritedUUID) {
					t.Fatalf("the message does not name both UUIDs: %v", err)
				}
			}
			if v.disk.Digest(t) != before {
				t.Fatal("the disk was written")
			}
			must(t, v.expecting(v.ID).stage())
		})
		t.Run("a "+fsType+" that mkfs made with another UUID is not mounted so", func(t *testing.T) {
			v := newVolume(t).expecting(inheritedUUID)
			tools(t, map[string]string{ // the last UUID counts
				"mke2fs": `"$real" -U random "$@" -U random`,
				"mkfs.xfs": `for a; do shift; case $a in uuid=*) a=crc=1;; esac; set -- "$@" "$a"; done
					exec "$real" "$@"`,
			})
			if fsType == volume.Btrfs {
				// Each mkfs.btrfs makes another one, and the driver itself gives it the volume's.
				must(t, v.stage())
				v.hasUUID(t, inheritedUUID)
				return
			}
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.WrongFilesystem)
			if got := guesttest.Mounts(t, v.guest.Dir); len(got) > 0 {
				t.Fatalf("mounted at %q", got)
			}
		})
		t.Run("a "+fsType+" is made beside a disk that shows its UUID already", func(t *testing.T) {
			v := newVolume(t).expecting(inheritedUUID)
			must(t, v.stage())
			must(t, v.unstage())
			w := v.guest.volume(v.guest.Attach(guesttest.OtherSerial, smallest(fsType)), fsType)
			w = w.expecting(inheritedUUID)
			must(t, w.stage())
			w.checkStaged(t)
			must(t, v.stage())
			v.checkStaged(t)
			w.hasUUID(t, inheritedUUID)
		})
		t.Run("a "+fsType+" whose format was cut off gets its UUID in the end", func(t *testing.T) {
			for _, script := range []string{"exit 1", `"$real" "$@" && exit 1`,
				`timeout -s KILL 0.008 "$real" "$@"; exit 1`} {
				v := newVolume(t).expecting(inheritedUUID)
				interruptFormat(t, script, v.stage)
				must(t, v.stage())
				v.checkStaged(t)
				v.hasUUID(t, inheritedUUID)
			}
		})
	}
	t.Run("what is no UUID is not expected", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4).expecting("random")
		csitest.Want(t, v.stage(), codes.InvalidArgument, csierr.FieldInvalid)
	})
	t.Run("an ext4 under growth is refused as well", func(t *testing.T) {
		v := grown(t, volume.Ext4)
		path := os.Getenv("PATH")
		tools(t, map[string]string{"resize2fs": "exit 1"})
		csitest.Want(t, v.stage(), codes.Internal, csierr.NodeToolFailed)
		must(t, os.Setenv("PATH", path))
		before := v.disk.Digest(t)
		csitest.Want(t, v.expecting(inheritedUUID).stage(), codes.FailedPrecondition,
			csierr.WrongFilesystem)
		if v.disk.Digest(t) != before {
			t.Fatal("the disk was written")
		}
	})
}
