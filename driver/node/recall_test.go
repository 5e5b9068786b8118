//go:build linux

package node

import (
	"log/slog"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestADestroyedFilesystemThatThisNodeHasMountedIsNotTakenForAStrangers(t *testing.T) {
	const advice = "do not delete the volume"
	for name, stageBefore := range map[string]bool{"mounted here before": true, "never": false} {
		t.Run(name, func(t *testing.T) {
			g := statefulGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
			recorder := &flight.Recorder{Log: slog.New(slog.DiscardHandler),
				Dir: filepath.Join(g.state, flight.DirName)}
			ctx := flight.With(t.Context(), recorder, flight.Fields{Volume: v.ID})
			if stageBefore {
				_, err := g.node().NodeStageVolume(ctx, v.stageRequest())
				must(t, err)
				must(t, v.unstage())
			} else {
				guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
			}
			v.disk.WriteAt(t, 0, make([]byte, 4<<10)) // its superblock
			_, err := g.node().NodeStageVolume(ctx, v.stageRequest())
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
			if strings.Contains(err.Error(), advice) != stageBefore {
				t.Error(err)
			}
		})
	}
}
