//go:build linux

package node

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestInvalidRequestsAreRefused(t *testing.T) {
	const bad, unfit = codes.InvalidArgument, codes.FailedPrecondition
	const id, nul, other = racktest.Disk, "/a\x00b", "0b54dc0e-93a4-4f5f-8f5d-000000000002"
	const manyWriters = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	type mounted = csi.VolumeCapability_MountVolume
	stage := func(edit func(*csi.NodeStageVolumeRequest)) proto.Message {
		return csitest.With(&csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: "/tmp/nowhere",
			VolumeCapability: testVolume{Mode: writer}.capability(),
			PublishContext:   map[string]string{volume.CtxDiskName: guesttest.Serial}}, edit)
	}
	stageAt := func(path string) proto.Message {
		return stage(func(r *csi.NodeStageVolumeRequest) { r.StagingTargetPath = path })
	}
	stageAs := func(mode csi.VolumeCapability_AccessMode_Mode, fsType string) proto.Message {
		return stage(func(r *csi.NodeStageVolumeRequest) {
			r.VolumeCapability = testVolume{Mode: mode, FSType: fsType}.capability()
		})
	}
	contexts := func(published, vol string, fsType ...string) proto.Message {
		return stage(func(r *csi.NodeStageVolumeRequest) {
			r.VolumeCapability = testVolume{Mode: writer, FSType: strings.Join(fsType, "")}.capability()
			r.VolumeContext = csitest.Pairs(vol)
			maps.Copy(r.PublishContext, csitest.Pairs(published))
		})
	}
	publish := func(edit func(*csi.NodePublishVolumeRequest, *mounted)) proto.Message {
		r := &csi.NodePublishVolumeRequest{VolumeId: id, StagingTargetPath: "/tmp/nowhere",
			TargetPath: "/tmp/nowhere-else", VolumeCapability: testVolume{Mode: writer}.capability(),
			PublishContext: map[string]string{volume.CtxDiskName: guesttest.Serial}}
		edit(r, r.GetVolumeCapability().GetMount())
		return r
	}
	publishAt := func(target, staging string) proto.Message {
		return publish(func(r *csi.NodePublishVolumeRequest, _ *mounted) {
			r.TargetPath, r.StagingTargetPath = target, staging
		})
	}
	for _, c := range []struct {
		name    string
		request proto.Message
		code    codes.Code
		reason  csierr.Reason
	}{
		{"stage at a relative path (NS-2)", stageAt("a/b"), bad, csierr.PathInvalid},
		{"stage at the root directory (NS-2)", stageAt("/x/.."), bad, csierr.PathInvalid},
		{"stage at a path longer than Linux has (NS-2)", stageAt("/" + strings.Repeat("a/", 2048)), bad,
			csierr.PathInvalid},
		{"stage at a path with a NUL", stageAt(nul), bad, csierr.PathInvalid},
		{"stage for many nodes (NS-3)", stageAs(manyWriters, ""), unfit, csierr.CapabilityUnsupported},
		{"stage a filesystem that volumes do not have (NS-3)", stageAs(writer, "ntfs"), unfit,
			csierr.CapabilityUnsupported},
		{"stage without the disk's name (NS-4)", stage(func(r *csi.NodeStageVolumeRequest) {
			r.PublishContext = nil
		}), bad, csierr.DiskNameMissing},
		{"a size that is no number", contexts("sizeBytes=-1", ""), bad, csierr.FieldInvalid},
		{"a publish_context of another volume", contexts("diskId="+other, ""), bad, csierr.FieldInvalid},
		{"a volume_context of another volume", contexts("", "diskId="+other), bad, csierr.FieldInvalid},
		{"contexts that name two disks", contexts("", "diskName=csi-another000000000"), bad,
			csierr.FieldInvalid},
		{"contexts of disks with different blocks", contexts("blockSize=512", "blockSize=4096"), bad,
			csierr.FieldInvalid},
		{"a block size that is no number", contexts("blockSize=big", ""), bad, csierr.FieldInvalid},
		{"a filesystem's UUID that is no UUID", contexts("filesystemUUID=random", ""), bad,
			csierr.FieldInvalid},
		{"a filesystem of a volume for raw use", contexts("use=block", ""), unfit, csierr.UseDiffers},
		{"a raw device of a volume for filesystems", contexts("use=filesystem", "", "block"), unfit,
			csierr.UseDiffers},
		{"a raw device that its publish_context does not allow", contexts("", "use=block", "block"),
			unfit, csierr.UseUnknown},
		{"mkfs options that are not allowed", contexts("", "mkfsOptions=journalDevice=/dev/sda"), bad,
			csierr.MkfsOptions},
		{"mkfs options of another filesystem", contexts("", "mkfsOptions=reflink=true"), bad,
			csierr.MkfsOptions},
		{"publish without a capability, and without a staging path (NP-1)",
			publish(func(r *csi.NodePublishVolumeRequest, _ *mounted) {
				r.VolumeCapability, r.StagingTargetPath = nil, ""
			}), bad, csierr.CapabilityInvalid},
		{"publish at a relative target (NP-2)", publishAt("a", "/s"), bad, csierr.PathInvalid},
		{"publish from a relative staging path (NP-2)", publishAt("/t", "a"), bad, csierr.PathInvalid},
		{"publish at a target with a NUL", publishAt(nul, "/s"), bad, csierr.PathInvalid},
		{"publish from a staging path with a NUL", publishAt("/t", nul), bad, csierr.PathInvalid},
		{"publish without a staging path (NP-3)", publishAt("/t", ""), unfit, csierr.NotStaged},
		{"publish for many nodes (NP-4)", publish(func(r *csi.NodePublishVolumeRequest, _ *mounted) {
			r.VolumeCapability.AccessMode.Mode = manyWriters
		}), unfit, csierr.CapabilityUnsupported},
		{"publish without the disk's name", publish(func(r *csi.NodePublishVolumeRequest, _ *mounted) {
			r.PublishContext = nil
		}), bad, csierr.DiskNameMissing},
		{"publish with a mount flag that is not for volumes",
			publish(func(_ *csi.NodePublishVolumeRequest, m *mounted) {
				m.MountFlags = []string{"remount"}
			}), unfit, csierr.MountFlags},
		{"unstage a relative path (NU-1)", &csi.NodeUnstageVolumeRequest{VolumeId: id,
			StagingTargetPath: "x"}, bad, csierr.PathInvalid},
		{"unstage a path with a NUL", &csi.NodeUnstageVolumeRequest{VolumeId: id, StagingTargetPath: nul},
			bad, csierr.PathInvalid},
		{"unpublish a relative path (UP-1)", &csi.NodeUnpublishVolumeRequest{VolumeId: id,
			TargetPath: "x"}, bad, csierr.PathInvalid},
		{"unpublish a path with a NUL", &csi.NodeUnpublishVolumeRequest{VolumeId: id, TargetPath: nul},
			bad, csierr.PathInvalid},
		{"statistics of a path with a NUL", &csi.NodeGetVolumeStatsRequest{VolumeId: id, VolumePath: nul},
			bad, csierr.PathInvalid},
		{"statistics with a NUL in the staging path", &csi.NodeGetVolumeStatsRequest{VolumeId: id,
			VolumePath: "/v", StagingTargetPath: nul}, bad, csierr.PathInvalid},
		{"statistics of a relative path show no volume (VS-2)", &csi.NodeGetVolumeStatsRequest{
			VolumeId: id, VolumePath: "some/path"}, codes.NotFound, csierr.VolumeNotAtPath},
		{"health of a path with a NUL", &csi.NodeGetVolumeHealthRequest{VolumeId: id,
			VolumePublishPath: nul}, bad, csierr.PathInvalid},
		{"health with a NUL in the staging path", &csi.NodeGetVolumeHealthRequest{VolumeId: id,
			StagingTargetPath: nul}, bad, csierr.PathInvalid},
	} {
		t.Run(c.name, func(t *testing.T) {
			service := &Service{SysfsRoot: t.TempDir()}
			csitest.Want(t, csitest.Call(t.Context(), service, c.request), c.code, c.reason)
		})
	}
}

func TestStageFailsIfItsDeviceIsMissing(t *testing.T) {
	t.Run("the error for a missing disk lists the serials found (NS-5)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Name = "csi-another000000000"
		csitest.Want(t, v.stage(), codes.NotFound, csierr.DeviceNotFound, guesttest.Serial)
	})
	t.Run("the wait ends at the caller's deadline (NS-5)", func(t *testing.T) {
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

func TestStageRefusesADifferentRequestForAStagedVolume(t *testing.T) { // NS-8
	v := newGuest(t).disk(8, volume.Ext4)
	must(t, v.stage())
	for _, change := range []func(*testVolume){
		func(v *testVolume) { v.FSType = volume.XFS },
		func(v *testVolume) { v.Flags = []string{"noexec"} },
		func(v *testVolume) { v.FSType = "block" },
	} {
		other := v
		change(&other)
		csitest.Want(t, other.stage(), codes.AlreadyExists, csierr.StagedDifferently)
	}
	v.FSType = "block"
	csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.DeviceHeld)
}

func TestStageMountsAsRequested(t *testing.T) { // D-30
	t.Run("mount flags are applied (NS-15)", func(t *testing.T) {
		v := newGuest(t).disk(16, volume.Ext4)
		v.Flags = []string{"noatime", "nosuid,nodev", "sync", "data=journal", "defaults"}
		must(t, v.stage())
		table := csitest.Got(mount.ReadTable())(t)
		top := table.Top(v.staging())
		if got := mount.Flags(top); !slices.Equal(got, []string{"noatime", "nodev", "nosuid", "sync"}) {
			t.Fatalf("flags are %q", got)
		}
		if !strings.Contains(top.VFSOptions, "data=journal") {
			t.Fatalf("the filesystem's option is missing: %s", top.VFSOptions)
		}
		must(t, v.stage())
	})
	t.Run("kubelet's SELinux label reaches the kernel", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		v.Flags = []string{selinuxFlag}
		err := v.stage()
		if _, off := os.Stat("/sys/fs/selinux/enforce"); off != nil {
			csitest.Want(t, err, codes.FailedPrecondition, csierr.MountFlags) // the kernel refuses the flag
			return
		}
		must(t, err)
		table := csitest.Got(mount.ReadTable())(t)
		if top := table.Top(v.staging()); !strings.Contains(top.VFSOptions, selinuxFlag) {
			t.Fatalf("the label is missing: %s", top.VFSOptions)
		}
	})
	t.Run("a path of a thousand bytes is accepted (B-4)", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		long := strings.Repeat(strings.Repeat("ü", 100)+"/", 5)[:1000]
		v.Staging = v.guest.path(long)
		must(t, os.MkdirAll(filepath.Dir(v.Staging), 0o755))
		v.up(long + "-pod")
		v.down(long + "-pod")
	})
	t.Run("a second stage finds a staging path behind a symbolic link", func(t *testing.T) {
		v := newGuest(t).disk(8, volume.Ext4)
		real := v.guest.path("real")
		must(t, errors.Join(os.Mkdir(real, 0o755), os.Symlink(real, v.guest.path("link"))))
		v.Staging = v.guest.path("link/staging")
		must(t, errors.Join(v.stage(), v.stage()))
		if got := guesttest.Mounts(t, v.guest.Dir); !slices.Equal(got, []string{real + "/staging"}) {
			t.Fatalf("mounts: %q", got)
		}
	})
	t.Run("a staging path that is no directory is refused (NS-2)", func(t *testing.T) {
		v := newGuest(t).disk(64, volume.Ext4)
		same := v.disk.Same(t)
		must(t, os.WriteFile(v.staging(), nil, 0o600))
		csitest.Want(t, v.stage(), codes.InvalidArgument, csierr.PathInvalid)
		must(t, errors.Join(os.Remove(v.staging()), os.Symlink(t.TempDir(), v.staging())))
		csitest.Want(t, v.stage(), codes.InvalidArgument, csierr.PathInvalid)
		same()
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
	t.Run("a read-only disk is mounted and published read-only (E-6)", func(t *testing.T) {
		for _, fsType := range volume.Filesystems {
			v := newGuest(t).disk(512, fsType)
			must(t, errors.Join(v.stage(), v.unstage()))
			v.guest.Unplug(v.disk)
			v.disk = v.guest.AttachFile(guesttest.Serial, v.disk.File, guesttest.ReadOnly)
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceReadOnly)
			v.Tag = map[string]string{volume.CtxReadOnly: "true"}
			must(t, errors.Join(v.stage(), v.stage()))
			csitest.Want(t, v.publish("pod"), codes.FailedPrecondition, csierr.DeviceReadOnly)
			must(t, v.publishReadOnly("pod"))
			v.down("pod")
		}
	})
}

func TestARefusedMountFlagIsNamedByItsPosition(t *testing.T) { // B-15, NS-15
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			v := newGuest(t).disk(512, fsType)
			v.Flags = []string{"noatime", "nodev," + invalidLabel}
			err := v.stage()
			csitest.Want(t, err, codes.FailedPrecondition, csierr.MountFlags)
			if text := err.Error(); !strings.Contains(text, "mount flag 2") ||
				strings.Contains(text+v.guest.log.String(), "canary") {
				t.Errorf("got %s, and the log %s", text, &v.guest.log)
			}
			v.guest.hasMounts(0)
			v.Flags = []string{"noatime"}
			must(t, v.stage())
			must(t, v.unstage())
		})
	}
}

func (v testVolume) isReadOnly(want bool) {
	v.guest.t.Helper()
	got := strings.TrimSpace(guesttest.Run(v.guest.t, "blockdev", "--getro", v.disk.Loop)) == "1"
	if got != want {
		v.guest.t.Fatalf("the device is read-only: %t", got)
	}
}

func TestStageMakesAReadOnlyDeviceWritableOnlyAfterItsChecks(t *testing.T) { // NS-10
	v := statefulGuest(t).disk(16, volume.XFS)
	guesttest.Run(t, "mke2fs", "-q", "-t", "ext4", v.disk.Loop)
	guesttest.Run(t, "blockdev", "--setro", v.disk.Loop)
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DiskNotBlank)
	v.FSType = volume.Ext4
	holder := csitest.Got(os.OpenFile(v.disk.Loop, os.O_RDONLY|unix.O_EXCL, 0))(t)
	csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.DeviceHeld)
	v.isReadOnly(true)
	must(t, holder.Close())
	v.Whole = true // its history is unknown, so the driver may have set the switch
	must(t, v.stage())
	v.isReadOnly(false)
}

func TestStageNamesAFilesystemFeatureThatTheKernelRefuses(t *testing.T) {
	refused := 0
	for _, c := range []struct{ fsType, mkfs, want string }{
		{volume.Ext4, "mke2fs -q -t ext4 -O casefold", "casefold"},
		{volume.Ext4, "mke2fs -q -F -t ext4 -b 65536", "s_feature_incompat: filetype extents"},
		{volume.XFS, "mkfs.xfs -q -m crc=0", "sb_versionnum: "},
		{volume.XFS, "mkfs.xfs -q -n version=ci", "asciici"},
	} {
		t.Run(c.mkfs, func(t *testing.T) {
			v := newGuest(t).disk(smallest(volume.XFS), c.fsType)
			words := strings.Fields(c.mkfs)
			guesttest.Run(t, words[0], append(words[1:], v.disk.Loop)...)
			same := v.disk.Same(t)
			err := v.stage()
			if err == nil {
				return // this kernel supports the feature
			}
			refused++
			csitest.Want(t, err, codes.FailedPrecondition, csierr.FilesystemFeature, c.want)
			v.Flags = []string{"noatime"}
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.FilesystemFeature)
			v.Flags = []string{"grpid"} // ext4 and xfs parse this flag, so it may be the cause
			csitest.Want(t, v.stage(), codes.FailedPrecondition, csierr.MountFlags)
			same()
		})
	}
	if refused == 0 {
		t.Error("this kernel has every feature; add one to the table")
	}
}

func TestTheErrorForALostSuperblockWarnsAgainstDeletingTheVolume(t *testing.T) {
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

func TestTwoVolumesAreNotMountedAtOnePath(t *testing.T) {
	v := newGuest(t).disk(16, volume.Ext4)
	must(t, os.Mkdir(v.staging(), 0o755))
	f, err := os.Open(v.staging())
	must(t, err)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX)) // as a call that mounts there does
	same := v.disk.Same(t)
	csitest.Want(t, v.stage(), codes.Aborted, csierr.DeviceLocked)
	same()
	must(t, f.Close())
	must(t, v.stage())
	must(t, os.Mkdir(v.guest.path("pod"), 0o755))
	f = csitest.Got(os.Open(v.guest.path("pod")))(t)
	must(t, unix.Flock(int(f.Fd()), unix.LOCK_EX))
	csitest.Want(t, v.publish("pod"), codes.Aborted, csierr.DeviceLocked)
	must(t, f.Close())
	must(t, v.publish("pod"))
	// claimPath reads the mount table again, so it finds a mount that another call made meanwhile.
	for path, reason := range map[string]csierr.Reason{v.staging(): csierr.StagedDifferently,
		v.guest.path("pod"): csierr.PublishedDifferently} {
		_, err = claimPath(path, reason)
		csitest.Want(t, err, codes.AlreadyExists, reason)
	}
}

var must = csitest.Must

const instance = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// selinuxFlag is a mount flag that kubelet adds to all requests on a node with SELinux.
const selinuxFlag = `context="system_u:object_r:container_file_t:s0:c1,c2"`

// invalidLabel is a mount flag that the driver accepts and every kernel refuses. A kernel without
// SELinux refuses all labels. A kernel with SELinux refuses this label, because it is invalid.
const invalidLabel = "context=canary"

type testGuest struct {
	*guesttest.Guest
	t     *testing.T
	state string // the state directory, if a test sets one
	log   bytes.Buffer
}

func newGuest(t *testing.T) *testGuest {
	t.Helper()
	g := &testGuest{Guest: guesttest.New(t), t: t}
	must(t, os.MkdirAll(g.path(""), 0o755))
	return g
}

func statefulGuest(t *testing.T) *testGuest {
	g := newGuest(t)
	g.state = filepath.Join(g.Dir, "state", "volumes")
	return g
}

// node returns a new Service, as after a restart: it knows only what is in the state directory.
func (g *testGuest) node() *Service {
	return &Service{SysfsRoot: g.Sys(""), DevRoot: g.Dev(""), InstanceID: instance,
		DeviceTimeout: 50 * time.Millisecond, StateDir: g.state,
		Log: slog.New(slog.NewTextHandler(&g.log, nil))}
}

// mounts returns a function that checks that the guest's mounts have not changed since this call.
func (g *testGuest) mounts() (same func()) {
	before := guesttest.Mounts(g.t, g.Dir)
	return func() {
		g.t.Helper()
		if after := guesttest.Mounts(g.t, g.Dir); !slices.Equal(after, before) {
			g.t.Fatalf("mounts: %q, were %q", after, before)
		}
	}
}

func (g *testGuest) hasMounts(n int) {
	g.t.Helper()
	if got := guesttest.Mounts(g.t, g.Dir); len(got) != n {
		g.t.Fatalf("want %d mounts, got %q", n, got)
	}
}

func absent(t *testing.T, path string) {
	t.Helper()
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("%q is there: %v", path, err)
	}
}

func holds(t *testing.T, file, text string) {
	t.Helper()
	if b, err := os.ReadFile(file); err != nil || string(b) != text {
		t.Fatalf("%q holds %q, %v", file, b, err)
	}
}

func (g *testGuest) path(name string) string { return filepath.Join(g.Dir, "kubelet", name) }

// testVolume is a volume of the guest. Its fields determine the requests of its calls.
type testVolume struct {
	guest   *testGuest
	disk    *guesttest.Disk
	ID      string
	Name    string // of the disk
	FSType  string // "block" for raw block
	Mode    csi.VolumeCapability_AccessMode_Mode
	Flags   []string
	Context map[string]string // volume_context
	Static  bool              // no size in publish_context
	Tag     map[string]string // added to publish_context, as from the ownership tag
	Whole   bool              // its history is unknown, so the driver reads the whole disk
	Staging string            // the staging path, if it is not the usual one
}

// idPrefix begins the volumes' ids, which are also UUIDs of filesystems. It is random, because
// Linux treats two btrfs with one UUID as one filesystem, and test processes run at the same time.
var idPrefix = "0b54" + uuid.NewString()[4:24]

func (g *testGuest) volume(d *guesttest.Disk, fsType string) testVolume {
	return testVolume{guest: g, disk: d, ID: fmt.Sprintf("%s%012x", idPrefix, g.Disks()),
		Name: d.Serial, FSType: fsType, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
}

func (g *testGuest) disk(mib int64, fsType string, serial ...string) testVolume {
	g.t.Helper()
	serial = append(serial, guesttest.Serial)
	return g.volume(g.Attach(serial[0], mib*guesttest.MiB), fsType)
}

func (v testVolume) capability() *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: v.Mode}}
	if v.FSType == "block" {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
		return c
	}
	c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{
		FsType: v.FSType, MountFlags: v.Flags}}
	return c
}

func (v testVolume) published() map[string]string {
	m := map[string]string{volume.CtxDiskName: v.Name}
	if v.FSType == "block" {
		m[volume.CtxUse] = volume.UseBoth
	}
	if !v.Static {
		m[volume.CtxSizeBytes] = fmt.Sprint(v.disk.SizeBytes)
		if !v.Whole && v.FSType != "block" {
			m[volume.CtxOrigin], m[volume.CtxUse] = volume.OriginBlank, volume.UseFilesystem
		}
	}
	maps.Copy(m, v.Tag)
	return m
}

func (v testVolume) staging() string {
	if v.Staging != "" {
		return v.Staging
	}
	return v.guest.path("staging " + v.disk.Serial)
}

func (v testVolume) stageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging(),
		VolumeCapability: v.capability(), PublishContext: v.published(), VolumeContext: v.Context}
}

func (v testVolume) publishRequest(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging(),
		TargetPath: v.guest.path(target), VolumeCapability: v.capability(),
		PublishContext: v.published(), VolumeContext: v.Context}
}

func (v testVolume) unstageRequest() *csi.NodeUnstageVolumeRequest {
	return &csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging()}
}

func (v testVolume) unpublishRequest(target string) *csi.NodeUnpublishVolumeRequest {
	return &csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.guest.path(target)}
}

// Each method below makes its call with a new Service, as after a restart.

func (v testVolume) ask(request proto.Message) error {
	return csitest.Call(v.guest.t.Context(), v.guest.node(), request)
}

func (v testVolume) stage() error   { return v.ask(v.stageRequest()) }
func (v testVolume) unstage() error { return v.ask(v.unstageRequest()) }

func (v testVolume) publish(target string) error { return v.ask(v.publishRequest(target)) }

func (v testVolume) publishReadOnly(target string) error {
	return v.ask(csitest.With(v.publishRequest(target),
		func(r *csi.NodePublishVolumeRequest) { r.Readonly = true }))
}

func (v testVolume) unpublish(target string) error { return v.ask(v.unpublishRequest(target)) }

func (v testVolume) up(target string) {
	v.guest.t.Helper()
	must(v.guest.t, v.stage())
	must(v.guest.t, v.publish(target))
}

func (v testVolume) down(target string) {
	v.guest.t.Helper()
	must(v.guest.t, v.unpublish(target))
	must(v.guest.t, v.unstage())
}

// smallTmpfs mounts a tmpfs for a disk's sparse file. When it is full, writes to the disk fail.
func smallTmpfs(t *testing.T, sizeBytes int64) (dir string) {
	t.Helper()
	dir = t.TempDir()
	must(t, unix.Mount("none", dir, "tmpfs", 0, fmt.Sprint("size=", sizeBytes)))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	return dir
}

func TestMain(m *testing.M) { namespace.Main(m) }
