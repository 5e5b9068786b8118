//go:build linux

package node

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

func TestNodeStageVolumeRefusesIncompleteRequests(t *testing.T) {
	good := &csi.NodeStageVolumeRequest{
		VolumeId: "0b54dc0e-93a4-4f5f-8f5d-000000000001", StagingTargetPath: "/tmp/nowhere",
		VolumeCapability: testVolume{
			Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}.capability(),
		PublishContext: map[string]string{volume.CtxDiskName: guesttest.Serial},
	}
	for _, c := range []struct {
		name   string
		change func(*csi.NodeStageVolumeRequest)
		code   codes.Code
		reason csierr.Reason
	}{
		{"NS-2 with a relative path", func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = "a/b" },
			codes.InvalidArgument, csierr.PathInvalid},
		{"NS-2 at the root directory", func(r *csi.NodeStageVolumeRequest) {
			r.StagingTargetPath = "/x/.."
		}, codes.InvalidArgument, csierr.PathInvalid},
		{"NS-2 with a path longer than Linux has", func(r *csi.NodeStageVolumeRequest) {
			r.StagingTargetPath = "/" + strings.Repeat("a/", 2048)
		}, codes.InvalidArgument, csierr.PathInvalid},
		{"NS-3 for many nodes", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeCapability.AccessMode.Mode = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
		}, codes.FailedPrecondition, csierr.CapabilityUnsupported},
		{"NS-3 with a filesystem volumes do not have", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeCapability.GetMount().FsType = "ntfs"
		}, codes.FailedPrecondition, csierr.CapabilityUnsupported},
		{"NS-4 without the disk's name", func(r *csi.NodeStageVolumeRequest) { r.PublishContext = nil },
			codes.InvalidArgument, csierr.DiskNameMissing},
		{"with a size that is no number", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxSizeBytes] = "-1"
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with a publish_context of another volume", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxDiskID] = "0b54dc0e-93a4-4f5f-8f5d-000000000002"
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with a volume_context of another volume", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeContext = map[string]string{volume.CtxDiskID: "0b54dc0e-93a4-4f5f-8f5d-000000000002"}
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with contexts that name two disks", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeContext = map[string]string{volume.CtxDiskName: "csi-another000000000"}
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with contexts of disks with different blocks", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxBlockSize] = "512"
			r.VolumeContext = map[string]string{volume.CtxBlockSize: "4096"}
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with a block size that is no number", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxBlockSize] = "big"
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"with what is no UUID in place of the filesystem's", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxFilesystemUUID] = "random"
		}, codes.InvalidArgument, csierr.FieldInvalid},
		{"as a filesystem of a volume for raw use", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxUse] = volume.UseBlock
		}, codes.FailedPrecondition, csierr.UseDiffers},
		{"as a raw device of a volume for filesystems", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext[volume.CtxUse] = volume.UseFilesystem
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{
				Block: &csi.VolumeCapability_BlockVolume{}}
		}, codes.FailedPrecondition, csierr.UseDiffers},
		{"as a raw device that no controller published", func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext = nil
			r.VolumeContext = map[string]string{volume.CtxDiskName: guesttest.Serial,
				volume.CtxUse: volume.UseBlock}
			r.VolumeCapability.AccessType = &csi.VolumeCapability_Block{
				Block: &csi.VolumeCapability_BlockVolume{}}
		}, codes.FailedPrecondition, csierr.UseUnknown},
		{"with mkfs options that are not allowed", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeContext = map[string]string{volume.CtxMkfsOptions: "journalDevice=/dev/sda"}
		}, codes.InvalidArgument, csierr.MkfsOptions},
		{"with mkfs options of another filesystem", func(r *csi.NodeStageVolumeRequest) {
			r.VolumeContext = map[string]string{volume.CtxMkfsOptions: "reflink=true"}
		}, codes.InvalidArgument, csierr.MkfsOptions},
	} {
		t.Run(c.name, func(t *testing.T) {
			req := proto.Clone(good).(*csi.NodeStageVolumeRequest)
			c.change(req)
			_, err := (&Service{SysfsRoot: t.TempDir()}).NodeStageVolume(t.Context(), req)
			csitest.Want(t, err, c.code, c.reason)
		})
	}
}

func TestNodeStageVolumeFindsTheRightDeviceOrNone(t *testing.T) {
	t.Run("NS-5 the error for a missing disk lists the serials that were found",
		func(t *testing.T) {
			v := newGuest(t).disk(8, volume.Ext4)
			v.Name = "csi-another000000000"
			csitest.Want(t, v.stage(), codes.NotFound, csierr.DeviceNotFound, guesttest.Serial)
		})
	t.Run("NS-5 a device without its node is not found", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, os.Remove(filepath.Join(v.guest.Dir, "dev", v.disk.Name)))
		csitest.Want(t, v.stage(), codes.NotFound, csierr.DeviceNotFound)
	})
	t.Run("NS-5 a device that appears late is waited for", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		v.guest.Unplug(v.disk)
		n := v.guest.node()
		n.DeviceTimeout = time.Minute
		done := make(chan error)
		go func() {
			_, err := n.NodeStageVolume(t.Context(), v.stageRequest())
			done <- err
		}()
		select {
		case err := <-done:
			t.Fatalf("the call did not wait: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		v.guest.Plug(v.disk)
		must(t, <-done)
	})
	t.Run("NS-5 the wait ends at the caller's deadline", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		v.guest.Unplug(v.disk)
		n := v.guest.node()
		n.DeviceTimeout = time.Hour
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		csitest.Want(t, csitest.Call(ctx, n, v.stageRequest()), codes.DeadlineExceeded,
			csierr.DeadlineExceeded, "found: none")
	})
}

func TestNodeStageVolumeIsIdempotent(t *testing.T) {
	for _, fsType := range volume.Filesystems {
		t.Run("NS-7 ten calls make one "+fsType+" filesystem and one mount", func(t *testing.T) {
			v := newGuest(t).disk(512, fsType)
			v.Flags = []string{"noatime,nodev"}
			must(t, v.stage())
			id := guesttest.Run(t, "blkid", "-p", "-s", "UUID", v.disk.Loop)
			for range 9 {
				must(t, v.stage())
			}
			if again := guesttest.Run(t, "blkid", "-p", "-s", "UUID", v.disk.Loop); again != id {
				t.Fatalf("filesystem %s became %s", id, again)
			}
			v.guest.hasMounts(1)
			must(t, v.unstage())
			must(t, v.stage())
			if again := guesttest.Run(t, "blkid", "-p", "-s", "UUID", v.disk.Loop); again != id {
				t.Fatalf("filesystem %s became %s after unstage", id, again)
			}
		})
	}
	for _, c := range []struct {
		name  string
		other func(*testVolume)
	}{
		{"filesystem", func(v *testVolume) { v.FSType = volume.XFS }},
		{"flags", func(v *testVolume) { v.Flags = []string{"noexec"} }},
		{"access type", func(v *testVolume) { v.FSType = "block" }},
	} {
		t.Run("NS-8 a second call with another "+c.name+" is refused", func(t *testing.T) {
			v := newGuest(t).disk(8, volume.Ext4)
			must(t, v.stage())
			c.other(&v)
			csitest.Want(t, v.stage(), codes.AlreadyExists, csierr.StagedDifferently)
		})
	}
	t.Run("NS-12 staging a block volume mounts nothing", func(t *testing.T) {
		v := newGuest(t).disk(8, "block")
		same := v.disk.Same(t)
		must(t, v.stage())
		v.guest.hasMounts(0)
		same()
	})
}

func TestNodeStageVolumeMountsAsAsked(t *testing.T) { // D-30
	t.Run("NS-6 a device whose size or blocks are not the disk's is refused", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Tag = map[string]string{volume.CtxBlockSize: "4096"}
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceDiffers)
		v.Tag, v.disk.SizeBytes = nil, 2*v.disk.SizeBytes
		csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceWrongSize)
	})
	t.Run("NS-15 mount flags are applied, and appear in no log and no error", func(t *testing.T) {
		v := newGuest(t).disk(16, volume.Ext4)
		v.Flags = []string{"noatime", "nosuid,nodev", "sync", "data=journal", "defaults"}
		must(t, v.stage())
		table, err := mount.ReadTable()
		must(t, err)
		top := table.Top(v.staging())
		if got := mount.Flags(top); !slices.Equal(got, []string{"noatime", "nodev", "nosuid", "sync"}) {
			t.Fatalf("flags are %q", got)
		}
		if !strings.Contains(top.VFSOptions, "data=journal") {
			t.Fatalf("the filesystem's option is missing: %s", top.VFSOptions)
		}
		must(t, v.stage())
		must(t, v.unstage())
		for _, flag := range []string{"canary=1", "bind,canary", `context="canary`} {
			v.Flags = []string{flag}
			if err := v.stage(); err == nil || strings.Contains(err.Error(), "canary") {
				t.Fatalf("stage with flag %q: %v", flag, err)
			}
		}
		if strings.Contains(v.guest.log.String(), "canary") {
			t.Fatal("a flag stands in the log")
		}
		v.guest.hasMounts(0)
	})
	t.Run("kubelet's SELinux label reaches the kernel", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Flags = []string{selinuxFlag}
		err := v.stage()
		if _, off := os.Stat("/sys/fs/selinux/enforce"); off != nil {
			csitest.Want(t, err, codes.FailedPrecondition, csierr.MountFlags) // the kernel refuses it
			return
		}
		must(t, err)
		table, err := mount.ReadTable()
		must(t, err)
		if top := table.Top(v.staging()); !strings.Contains(top.VFSOptions, selinuxFlag) {
			t.Fatalf("the label is missing: %s", top.VFSOptions)
		}
	})
	t.Run("B-4 a path of a thousand bytes works", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		long := v.guest.path(strings.Repeat(strings.Repeat("ü", 100)+"/", 5)[:1000])
		must(t, os.MkdirAll(filepath.Dir(long), 0o755))
		stage, publish := v.stageRequest(), v.publishRequest("")
		stage.StagingTargetPath, publish.StagingTargetPath = long, long
		publish.TargetPath = long + "-pod"
		n := v.guest.node()
		must(t, csitest.Call(t.Context(), n, stage))
		must(t, csitest.Call(t.Context(), n, publish))
		must(t, csitest.Call(t.Context(), n, &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID,
			TargetPath: publish.TargetPath}))
		must(t, v.unstageAt(long))
	})
	t.Run("a staging path over a symbolic link is found again", func(t *testing.T) {
		g := newGuest(t)
		v := g.volume(g.Attach(guesttest.Serial, 8*guesttest.MiB), volume.Ext4)
		must(t, os.MkdirAll(g.path("real"), 0o755))
		must(t, os.Symlink(g.path("real"), g.path("link")))
		req := v.stageRequest()
		req.StagingTargetPath = g.path("link/staging")
		for range 2 {
			must(t, csitest.Call(t.Context(), g.node(), req))
		}
		if got := guesttest.Mounts(t, g.Dir); !slices.Equal(got, []string{g.path("real/staging")}) {
			t.Fatalf("mounts: %q", got)
		}
	})
	t.Run("NS-2 a staging path that is a file is refused", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		must(t, os.WriteFile(v.staging(), nil, 0o600))
		csitest.Want(t, v.stage(), codes.InvalidArgument, csierr.PathInvalid)
	})
	t.Run("mkfs options reach the filesystem", func(t *testing.T) {
		v := newGuest(t).disk(64, volume.Ext4)
		v.Context = map[string]string{volume.CtxMkfsOptions: "label=data,inodeSize=512,fsBlockSize=2048"}
		must(t, v.stage())
		out := guesttest.Run(t, "dumpe2fs", "-h", v.disk.Loop)
		for _, want := range []string{"volume name:   data", "Inode size:\t          512",
			"Block size:               2048", "Reserved block count:     0",
			"Errors behavior:          Remount read-only"} {
			if !strings.Contains(out, want) {
				t.Errorf("dumpe2fs does not say %q:\n%s", want, out)
			}
		}
	})
	t.Run("B-12 a caller that is gone does not cut off mkfs", func(t *testing.T) {
		v := newGuest(t).disk(64, volume.Ext4)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		must(t, csitest.Call(ctx, v.guest.node(), v.stageRequest()))
		must(t, v.stage())
	})
	t.Run("E-6 a read-only disk is mounted read-only and published so only", func(t *testing.T) {
		for _, fsType := range volume.Filesystems {
			g := newGuest(t)
			writable := g.volume(g.Attach(guesttest.Serial, 512*guesttest.MiB), fsType)
			must(t, writable.stage())
			must(t, writable.unstage())
			g.Unplug(writable.disk)

			v := g.volume(g.AttachFile(guesttest.Serial, writable.disk.File, guesttest.ReadOnly), fsType)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceReadOnly)
			req := v.stageRequest()
			req.PublishContext[volume.CtxReadOnly] = "true"
			for range 2 {
				must(t, csitest.Call(t.Context(), g.node(), req))
			}
			publish := v.publishRequest("pod")
			publish.PublishContext = req.PublishContext
			csitest.Want(t, csitest.Call(t.Context(), g.node(), publish), codes.FailedPrecondition,
				csierr.DeviceReadOnly)
			publish.Readonly = true
			must(t, csitest.Call(t.Context(), g.node(), publish))
			must(t, v.unpublish("pod"))
			must(t, v.unstage())
		}
	})
}

func TestARefusedMountFlagIsNamedByItsPosition(t *testing.T) { // B-15
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			v := newGuest(t).disk(512, fsType)
			v.Flags = []string{"noatime", "nodev," + invalidLabel}
			err := v.stage()
			csitest.Want(t, err, codes.FailedPrecondition, csierr.MountFlags)
			if text := err.Error(); !strings.Contains(text, "mount flag 2") ||
				strings.Contains(text, "canary") {
				t.Errorf("got %s", text)
			}
			v.Flags = []string{"noatime"}
			must(t, v.stage())
			must(t, v.unstage())
		})
	}
}

// readOnly reports whether the volume's device is switched to read-only.
func (v testVolume) readOnly() bool {
	return strings.TrimSpace(guesttest.Run(v.guest.t, "blockdev", "--getro", v.disk.Loop)) == "1"
}

func TestStageClearsAReadOnlySwitchOnlyAfterItsChecks(t *testing.T) { // NS-10
	setUp := func(t *testing.T) testVolume {
		v := statefulGuest(t).disk(16, volume.Ext4)
		guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
		guesttest.Run(t, "blockdev", "--setro", v.disk.Loop)
		return v
	}
	for name, refused := range map[string]struct {
		change func(*testVolume)
		reason csierr.Reason
	}{
		"NS-10 a disk that holds something else": {func(v *testVolume) { v.FSType = volume.XFS },
			csierr.DiskNotBlank},
		"a disk that somebody has": {func(v *testVolume) {
			holder, err := os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0)
			must(t, err)
			v.guest.t.Cleanup(func() { must(t, holder.Close()) })
		}, csierr.DeviceHeld},
		"a disk that the driver never shows as a device": {func(v *testVolume) {
			v.Tag = map[string]string{volume.CtxUse: volume.UseFilesystem}
		}, csierr.DeviceReadOnly},
	} {
		t.Run(name, func(t *testing.T) {
			v := setUp(t)
			refused.change(&v)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, refused.reason)
			if !v.readOnly() {
				t.Error("the refused call has made it writable")
			}
		})
	}
	t.Run("and taken back where the driver may have left it", func(t *testing.T) {
		v := setUp(t)
		v.Whole = true
		must(t, v.stage())
		if v.readOnly() {
			t.Error("it is still read-only")
		}
	})
}

func TestStageRefusesASymbolicLinkBeforeItFormats(t *testing.T) {
	v := newGuest(t).disk(64, volume.Ext4)
	must(t, os.Symlink(t.TempDir(), v.staging()))
	same := v.disk.Same(t)
	csitest.Want(t, v.stage(), codes.InvalidArgument, csierr.PathInvalid)
	same()
}

// A feature that the driver knows is refused by name where this node's kernel lacks it.
func TestAFeatureThatTheKernelRefusesIsNamed(t *testing.T) {
	refused := 0
	for _, c := range []struct{ fsType, mkfs, want string }{
		{volume.Ext4, "mke2fs -q -t ext4 -O casefold", "casefold"},
		{volume.Ext4, "mke2fs -q -F -t ext4 -b 65536", "s_feature_incompat: filetype extents"},
		{volume.XFS, "mkfs.xfs -q -m crc=0", "sb_versionnum: "},
		{volume.XFS, "mkfs.xfs -q -n version=ci", "asciici"},
	} {
		t.Run(c.mkfs, func(t *testing.T) {
			g := newGuest(t)
			v := g.volume(g.Attach(guesttest.Serial, smallest(volume.XFS)), c.fsType)
			words := strings.Fields(c.mkfs)
			guesttest.Run(t, words[0], append(words[1:], v.disk.Loop)...)
			same := v.disk.Same(t)
			err := v.stage()
			if err == nil {
				return // this kernel has it
			}
			refused++
			csitest.Want(t, err, codes.FailedPrecondition, csierr.FilesystemFeature, c.want)
			v.Flags = []string{"noatime"}
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.FilesystemFeature)
			v.Flags = []string{"grpid"} // of ext4 and xfs, and may be the cause
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.MountFlags)
			same()
		})
	}
	if refused == 0 {
		t.Error("this kernel has every feature; add one to the table")
	}
}

func TestTheErrorOfADestroyedSuperblockSaysIfItWasMountedHere(t *testing.T) {
	const advice = "do not delete the volume"
	for name, stageBefore := range map[string]bool{"mounted here before": true, "never": false} {
		t.Run(name, func(t *testing.T) {
			v := statefulGuest(t).disk(64, volume.Ext4)
			recorder := &flight.Recorder{Log: slog.New(slog.DiscardHandler),
				Dir: filepath.Join(v.guest.state, flight.DirName)}
			ctx := flight.With(t.Context(), recorder, flight.Fields{Volume: v.ID})
			if stageBefore {
				must(t, csitest.Call(ctx, v.guest.node(), v.stageRequest()))
				must(t, v.unstage())
			} else {
				guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
			}
			v.disk.WriteAt(t, 0, make([]byte, 4<<10)) // its superblock
			err := csitest.Call(ctx, v.guest.node(), v.stageRequest())
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank)
			if strings.Contains(err.Error(), advice) != stageBefore {
				t.Error(err)
			}
		})
	}
}

// both makes two calls at once and returns how many succeed. A call that fails must have the reason
// taken, or DeviceLocked.
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

func TestStageIsAbortedWhileAnotherCallMountsAtItsPath(t *testing.T) {
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
