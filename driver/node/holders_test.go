//go:build linux

package node

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// opening starts a process that has a file open in that way, "<" or "<>".
func opening(t *testing.T, how, path string) *neighbour {
	t.Helper()
	script := `exec 3` + how + `"$1"; echo ready; read -r x || true`
	return startNeighbour(t, "sh", "-c", script, "sh", path)
}

func TestNU5WhoHoldsADeviceIsNamed(t *testing.T) {
	g := statefulGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 16*guesttest.MiB), volume.Ext4)
	must(t, v.stage())
	must(t, unix.Unmount(v.staging(), 0)) // and there the driver dies
	holders := filepath.Join(g.Dir, "sys/block", v.disk.Name, "holders")
	must(t, os.MkdirAll(filepath.Join(holders, "dm-7"), 0o755))
	mapper, err := os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
	must(t, err)
	n := opening(t, "<", v.disk.Loop)
	v.held("dm-7", fmt.Sprintf("process %d (sh)", n.pid))
	v.held("dm-7") // a restarted driver still asks
	must(t, mapper.Close())
	must(t, v.unstage())
	if got := g.records(); len(got) != 0 {
		t.Errorf("records left: %q", got)
	}
}

func TestNU5ARawDeviceThatIsOpenForWritingIsNotReleased(t *testing.T) {
	g := statefulGuest(t)
	v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), "block")
	must(t, v.stage())
	must(t, v.publish("dev"))
	// As a container has it: by a node of its own, which is no mount.
	node := filepath.Join(g.Dir, "the pod's node")
	var st unix.Stat_t
	must(t, unix.Stat(v.disk.Loop, &st))
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(st.Rdev)))
	reader, writer := opening(t, "<", node), opening(t, "<>", node)
	must(t, v.unpublish("dev"))
	v.held(fmt.Sprintf("process %d (sh)", writer.pid))
	writer.leave()
	must(t, v.unstage()) // to read is harmless
	reader.leave()
}

func TestAMountWhoseWritesFailIsTakenDown(t *testing.T) {
	t.Run("what was not written is told beside whatever else fails", func(t *testing.T) {
		g := statefulGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		must(t, v.stage())
		must(t, os.WriteFile(filepath.Join(v.staging(), "x"), make([]byte, 4*guesttest.MiB), 0o600))
		must(t, os.Truncate(v.disk.File, 0))
		f, err := os.Open(filepath.Join(v.staging(), "x"))
		must(t, err)
		err = v.unstage()
		must(t, f.Close())
		csitest.Want(t, err, codes.Internal, csierr.StillMounted)
		if !strings.Contains(err.Error(), "could not be written out") {
			t.Errorf("the caller never hears that the writes of its workload are lost: %v", err)
		}
		_ = v.unstage() // now the filesystem may have noticed, or not
		must(t, v.unstage())
	})
	t.Run("nothing is told of a disk that was taken away", func(t *testing.T) {
		g := statefulGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 64*guesttest.MiB), volume.Ext4)
		must(t, v.stage())
		must(t, os.WriteFile(filepath.Join(v.staging(), "x"), make([]byte, 4*guesttest.MiB), 0o600))
		must(t, os.Truncate(v.disk.File, 0))
		g.Unplug(v.disk)
		must(t, v.unstage())
		if !strings.Contains(g.log.String(), "could not be written out") {
			t.Error("every write was done")
		}
	})
	t.Run("each workload of a raw device hears what was not written", func(t *testing.T) {
		g := statefulGuest(t)
		small := smallTmpfs(t, guesttest.MiB)
		v := g.volume(g.AttachFile(guesttest.Serial, sparse(t, small, 8*guesttest.MiB)), "block")
		n := g.node()
		_, err := n.NodeStageVolume(t.Context(), v.stageRequest())
		must(t, err)
		unpublish := func() error {
			_, err := n.NodeUnpublishVolume(t.Context(), &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID,
				TargetPath: g.path("dev")})
			return err
		}
		for range 2 {
			_, err := n.NodePublishVolume(t.Context(), v.publishRequest("dev"))
			must(t, err)
			device, err := os.OpenFile(g.path("dev"), os.O_WRONLY, 0)
			must(t, err)
			_, err = device.WriteAt(make([]byte, 4*guesttest.MiB), 0)
			must(t, errors.Join(err, device.Close()))
			csitest.Want(t, unpublish(), codes.Internal, csierr.NodeToolFailed)
			must(t, unpublish())
			must(t, unpublish())
		}
		for range 2 {
			_, err := n.NodeUnstageVolume(t.Context(), v.unstageRequest())
			must(t, err)
		}
	})
}

func TestAReadOnlySwitchThatADeadDriverLeftIsTakenBack(t *testing.T) {
	readOnly := func(v testVolume) bool {
		return strings.TrimSpace(guesttest.Run(t, "blockdev", "--getro", v.disk.Loop)) == "1"
	}
	for name, finish := range map[string]func(v testVolume) error{
		"by unpublish": func(v testVolume) error { return v.unpublish("dev") },
		"by unpublish, where the target's directory is gone": func(v testVolume) error {
			return v.unpublish("no/such/dev")
		},
		"by unstage": testVolume.unstage,
	} {
		t.Run(name, func(t *testing.T) {
			g := statefulGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), "block")
			must(t, v.stage())
			must(t, v.publishReadOnly("dev"))
			must(t, unix.Unmount(g.path("dev"), 0)) // and there the driver dies
			if !readOnly(v) {
				t.Fatal("the device can be written already")
			}
			must(t, finish(v))
			if readOnly(v) {
				t.Fatal("the device is still read-only")
			}
		})
	}
	t.Run("but not while another workload has the volume", func(t *testing.T) {
		g := statefulGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), "block")
		v.Mode = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
		must(t, v.stage())
		must(t, v.publishReadOnly("dev"))
		must(t, v.publishReadOnly("other"))
		must(t, unix.Unmount(g.path("dev"), 0))
		must(t, v.unpublish("dev"))
		if !readOnly(v) {
			t.Fatal("the other workload's device can be written")
		}
		csitest.Want(t, v.unstage(), codes.Internal, csierr.StillMounted)
		must(t, v.unpublish("other"))
		must(t, v.unstage())
		if readOnly(v) {
			t.Fatal("the device is still read-only")
		}
	})
}
