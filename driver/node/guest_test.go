//go:build linux

package node

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

var must = csitest.Must

const instance = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// selinuxFlag is a mount flag that kubelet adds to all requests on a node with SELinux.
const selinuxFlag = `context="system_u:object_r:container_file_t:s0:c1,c2"`

// invalidLabel is a mount flag that the driver accepts and every kernel refuses: without SELinux a
// kernel refuses all labels, and with SELinux this one.
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

// mounts returns a function that checks that the mounts of the guest have not changed meanwhile.
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
// Linux takes two btrfs with one UUID for one filesystem, and test processes run at the same time.
var idPrefix = "0b54" + uuid.NewString()[4:24]

func (g *testGuest) volume(d *guesttest.Disk, fsType string) testVolume {
	return testVolume{guest: g, disk: d, ID: fmt.Sprintf("%s%012x", idPrefix, g.Disks()),
		Name: d.Serial, FSType: fsType, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
}

// disk returns a volume on a new disk, whose serial is guesttest.Serial unless another is given.
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

// Each method below makes its call with a new Service, so no call relies on the memory of an
// earlier one.

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

// up stages the volume and publishes it. down undoes both.
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

// smallTmpfs mounts a tmpfs of that size and returns its directory. Writes to a disk fail if its
// sparse file is in the tmpfs and the tmpfs is full.
func smallTmpfs(t *testing.T, sizeBytes int64) (dir string) {
	t.Helper()
	dir = t.TempDir()
	must(t, unix.Mount("none", dir, "tmpfs", 0, fmt.Sprint("size=", sizeBytes)))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	return dir
}

func TestMain(m *testing.M) { namespace.Main(m) }
