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
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

var must = csitest.Must

// instance is the id of a guest.
const instance = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// selinuxFlag is the mount flag that kubelet adds on a node with SELinux, to stage and to publish.
const selinuxFlag = `context="system_u:object_r:container_file_t:s0:c1,c2"`

// invalidLabel is a mount flag that the driver accepts, and that every kernel refuses: those with
// SELinux, because it is no label.
const invalidLabel = "context=canary"

// testGuest is a guest with an orchestrator's directory.
type testGuest struct {
	*guesttest.Guest
	t     *testing.T
	state string // the state directory, for those tests that give it one
	log   bytes.Buffer
}

func newGuest(t *testing.T) *testGuest {
	t.Helper()
	g := &testGuest{Guest: guesttest.New(t), t: t}
	must(t, os.MkdirAll(g.path(""), 0o755))
	return g
}

// node is a fresh process on the guest: it knows no more than the state directory holds.
func (g *testGuest) node() *Service {
	return &Service{
		SysfsRoot: g.Sys(""), DevRoot: g.Dev(""),
		InstanceID:    instance,
		DeviceTimeout: 50 * time.Millisecond, StateDir: g.state,
		Log: slog.New(slog.NewTextHandler(&g.log, nil)),
	}
}

// path is a path below the directory of the orchestrator.
func (g *testGuest) path(name string) string { return filepath.Join(g.Dir, "kubelet", name) }

// volume is a volume of the guest and where the orchestrator wants it.
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
	Tag     map[string]string // what publish_context says from the disk's ownership tag
	Whole   bool              // not made blank for filesystems, so it is read whole
}

// idPrefix begins the volumes' ids. It is random, because Linux takes two btrfs with one UUID for
// one filesystem, and other processes run these tests, too.
var idPrefix = "0b54" + uuid.NewString()[4:24]

func (g *testGuest) volume(d *guesttest.Disk, fsType string) testVolume {
	return testVolume{guest: g, disk: d, ID: fmt.Sprintf("%s%012x", idPrefix, g.Disks()),
		Name: d.Serial, FSType: fsType, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
}

// disk is the volume of a new disk of that many MiB.
func (g *testGuest) disk(mib int64, fsType string) testVolume {
	g.t.Helper()
	return g.volume(g.Attach(guesttest.Serial, mib*guesttest.MiB), fsType)
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

func (v testVolume) staging() string { return v.guest.path("staging " + v.disk.Serial) }

func (v testVolume) stageRequest() *csi.NodeStageVolumeRequest {
	return &csi.NodeStageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging(),
		VolumeCapability: v.capability(), PublishContext: v.published(), VolumeContext: v.Context}
}

func (v testVolume) publishRequest(target string) *csi.NodePublishVolumeRequest {
	return &csi.NodePublishVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging(),
		TargetPath: v.guest.path(target), VolumeCapability: v.capability(),
		PublishContext: v.published(), VolumeContext: v.Context}
}

// A process that has just started makes each of the calls below, so none relies on an earlier one.

func (v testVolume) stage() error {
	_, err := v.guest.node().NodeStageVolume(v.guest.t.Context(), v.stageRequest())
	return err
}

func (v testVolume) unstage() error {
	_, err := v.guest.node().NodeUnstageVolume(v.guest.t.Context(), v.unstageRequest())
	return err
}

func (v testVolume) publish(target string) error {
	_, err := v.guest.node().NodePublishVolume(v.guest.t.Context(), v.publishRequest(target))
	return err
}

func (v testVolume) publishReadOnly(target string) error {
	req := v.publishRequest(target)
	req.Readonly = true
	_, err := v.guest.node().NodePublishVolume(v.guest.t.Context(), req)
	return err
}

func (v testVolume) unpublish(target string) error {
	_, err := v.guest.node().NodeUnpublishVolume(v.guest.t.Context(),
		&csi.NodeUnpublishVolumeRequest{VolumeId: v.ID, TargetPath: v.guest.path(target)})
	return err
}

// smallTmpfs mounts a tmpfs of that size and returns its directory. A disk whose sparse file is
// there fails when more is written to it.
func smallTmpfs(t *testing.T, sizeBytes int64) (dir string) {
	t.Helper()
	dir = t.TempDir()
	must(t, unix.Mount("none", dir, "tmpfs", 0, fmt.Sprint("size=", sizeBytes)))
	t.Cleanup(func() { must(t, unix.Unmount(dir, 0)) })
	return dir
}

// sparse makes a sparse file in the directory.
func sparse(t *testing.T, dir string, sizeBytes int64) (path string) {
	t.Helper()
	path = filepath.Join(dir, "disk.img")
	must(t, errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, sizeBytes)))
	return path
}

func TestMain(m *testing.M) { namespace.Main(m) }
