//go:build linux

package node

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// both runs two calls at once and returns the number of those that succeed. The other has to say
// that the path is taken, or about to be.
func both(t *testing.T, taken csierr.Reason, a, b func() error) (succeeded int) {
	t.Helper()
	first := async.Start(func() (struct{}, error) { return struct{}{}, a() })
	second := b()
	_, err := first()
	for _, err := range []error{err, second} {
		switch csierr.ReasonOf(err) {
		case "":
			must(t, err)
			succeeded++
		case taken, csierr.DeviceLocked:
		default:
			t.Error(err)
		}
	}
	return succeeded
}

func TestTwoVolumesAreNotMountedAtOnePath(t *testing.T) {
	for range 10 {
		v := statefulGuest(t).disk(16, volume.Ext4)
		w := v.guest.volume(v.guest.Attach(guesttest.OtherSerial, 16*guesttest.MiB), volume.Ext4)
		one := func(path string, succeeded int) {
			t.Helper()
			table, err := mount.ReadTable()
			must(t, err)
			if n := len(table.At(path)); n != succeeded || n > 1 {
				t.Fatalf("%d volumes at the path, and %d calls with OK", n, succeeded)
			}
		}
		must(t, os.Mkdir(v.staging(), 0o755))
		one(v.staging(), both(t, csierr.StagedDifferently, v.stage, func() error {
			req := w.stageRequest()
			req.StagingTargetPath = v.staging()
			_, err := v.guest.node().NodeStageVolume(t.Context(), req)
			return err
		}))
		must(t, v.unstage())
		must(t, w.unstageAt(v.staging()))
		must(t, v.stage())
		must(t, w.stage())
		one(v.guest.path("pod"), both(t, csierr.PublishedDifferently,
			func() error { return v.publish("pod") }, func() error { return w.publish("pod") }))
		must(t, v.unpublish("pod"))
		must(t, w.unpublish("pod"))
		must(t, v.unstage())
		must(t, w.unstage())
	}
}

func TestACallWaitsForNoOtherThatMountsAtItsPath(t *testing.T) {
	v := newGuest(t).disk(16, volume.Ext4)
	must(t, os.Mkdir(v.staging(), 0o755))
	f, err := os.Open(v.staging())
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	same := v.disk.Same(t)
	csitest.Want(t, v.stage(), codes.Aborted, csierr.DeviceLocked)
	same()
	must(t, f.Close())
	must(t, v.stage())
}
