//go:build linux

package driver

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

const (
	mib = 1 << 20
	gib = 1 << 30
)

// guest is what an instance sees: a /sys and a /dev of its own, with loop devices as its disks.
type guest struct {
	t     *testing.T
	dir   string
	disks int
	state string // the state directory, for those tests that give it one
	log   bytes.Buffer
}

// guestDisk is a disk of a guest.
type guestDisk struct {
	Name, Serial, Loop, File string // Name is the kernel's, nvme3n1
	SizeBytes                int64
}

func newGuest(t *testing.T) *guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes loop devices and mounts; run it as root")
	}
	// A path with all that a mount table has to escape.
	g := &guest{t: t, dir: filepath.Join(t.TempDir(), "a guest\twith \\ and\nlines")}
	for _, dir := range []string{"sys/block", "dev", "kubelet"} {
		must(t, os.MkdirAll(filepath.Join(g.dir, dir), 0o755))
	}
	t.Cleanup(func() { unmountBelow(t, g.dir) })
	return g
}

// attach gives the guest a disk of that size whose bytes are in a sparse file.
func (g *guest) attach(serial string, sizeBytes int64, flags ...string) *guestDisk {
	g.t.Helper()
	file := filepath.Join(g.t.TempDir(), "disk.img")
	must(g.t, os.WriteFile(file, nil, 0o600))
	must(g.t, os.Truncate(file, sizeBytes))
	return g.attachFile(serial, file, flags...)
}

// attachFile gives the guest a disk whose bytes are in the file.
func (g *guest) attachFile(serial, file string, flags ...string) *guestDisk {
	g.t.Helper()
	// A sticky number that says nothing: the second disk comes before the first.
	g.disks++
	d := &guestDisk{Name: fmt.Sprintf("nvme%dn1", 7-g.disks%7), Serial: serial, File: file}
	d.Loop = strings.TrimSpace(run(g.t, "losetup",
		append(append([]string{"--find", "--show"}, flags...), file)...))
	loop := d.Loop                        // the test may give d to another disk
	run(g.t, "blockdev", "--setrw", loop) // an earlier device of the number may have been switched
	g.t.Cleanup(func() {
		unmountBelow(g.t, g.dir)
		run(g.t, "losetup", "--detach", loop)
	})
	d.SizeBytes = readTestNumber(g.t, filepath.Join("/sys/block", filepath.Base(d.Loop), "size")) * 512
	g.plug(d)
	return d
}

// plug shows a disk in the guest's trees, as the kernel would write it there.
func (g *guest) plug(d *guestDisk) {
	g.t.Helper()
	loop := filepath.Join("/sys/block", filepath.Base(d.Loop))
	dir := filepath.Join(g.dir, "sys/block", d.Name)
	must(g.t, os.MkdirAll(filepath.Join(dir, "device"), 0o755))
	for _, name := range []string{"dev", "size", "diskseq"} {
		b, err := os.ReadFile(filepath.Join(loop, name))
		must(g.t, err)
		must(g.t, os.WriteFile(filepath.Join(dir, name), b, 0o444))
	}
	var st unix.Stat_t
	must(g.t, unix.Stat(d.Loop, &st))
	node := filepath.Join(g.dir, "dev", d.Name)
	must(g.t, unix.Mknod(node, unix.S_IFBLK|0o660, int(st.Rdev)))
	// The rack fills the 20 bytes with NULs, and sysfs ends the line.
	var serial [volume.SerialBytes]byte
	copy(serial[:], d.Serial)
	must(g.t, os.WriteFile(filepath.Join(dir, "device/serial"), append(serial[:], '\n'), 0o444))
}

// unplug takes the disk out of the guest's trees.
func (g *guest) unplug(d *guestDisk) {
	g.t.Helper()
	must(g.t, os.RemoveAll(filepath.Join(g.dir, "sys/block", d.Name)))
	must(g.t, os.Remove(filepath.Join(g.dir, "dev", d.Name)))
}

// node is a fresh process on the guest: it knows no more than the state directory holds.
func (g *guest) node() *Node {
	return &Node{
		SysfsRoot: filepath.Join(g.dir, "sys"), DevRoot: filepath.Join(g.dir, "dev"),
		InstanceID:    "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01",
		DeviceTimeout: 50 * time.Millisecond, StateDir: g.state,
		Log: slog.New(slog.NewTextHandler(&g.log, nil)),
	}
}

// path is a path below the directory where a CO would have its own.
func (g *guest) path(name string) string { return filepath.Join(g.dir, "kubelet", name) }

// volume is a volume of the guest and where the CO wants it.
type testVolume struct {
	guest   *guest
	disk    *guestDisk
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

func (g *guest) volume(d *guestDisk, fsType string) testVolume {
	return testVolume{guest: g, disk: d, ID: "0b54dc0e-93a4-4f5f-8f5d-" + fmt.Sprintf("%012x",
		g.disks),
		Name: d.Serial, FSType: fsType, Mode: csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER}
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

// The calls below are made by a process that has just started, so none can lean on an earlier one.

func (v testVolume) stage() error {
	_, err := v.guest.node().NodeStageVolume(v.guest.t.Context(), v.stageRequest())
	return err
}

func (v testVolume) unstage() error {
	_, err := v.guest.node().NodeUnstageVolume(v.guest.t.Context(),
		&csi.NodeUnstageVolumeRequest{VolumeId: v.ID, StagingTargetPath: v.staging()})
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

// must ends the test on an error.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

func readTestNumber(t *testing.T, path string) int64 {
	t.Helper()
	n, err := readNumber(path)
	must(t, err)
	return int64(n)
}

// mounts lists the mount points below a directory, the last mounted first.
func mounts(t *testing.T, dir string) []string {
	t.Helper()
	table, err := readMountTable()
	must(t, err)
	var paths []string
	for _, m := range table {
		if strings.HasPrefix(m.Mountpoint, dir+"/") {
			paths = append([]string{m.Mountpoint}, paths...)
		}
	}
	return paths
}

// unmountBelow clears what a failed test left.
func unmountBelow(t *testing.T, dir string) {
	for _, path := range mounts(t, dir) {
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Errorf("clean up %q: %v", path, err)
		}
	}
}

// digest is a picture of a disk's bytes.
func digest(t *testing.T, d *guestDisk) string {
	t.Helper()
	run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.File)
	must(t, err)
	defer func() { _ = f.Close() }()
	sum := crc32.New(castagnoli)
	_, err = io.Copy(sum, f)
	must(t, err)
	return fmt.Sprint(sum.Sum32())
}
