// Package guesttest simulates an instance for tests of the node service: it makes a /sys and a /dev
// in a directory, and loop devices as disks. It is for tests only and needs root.
package guesttest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Units of sizes, in bytes.
const (
	MiB = 1 << 20
	GiB = 1 << 30
)

// Serials of disks.
const (
	Serial      = "csi-0123456789abcdef"
	OtherSerial = "csi-fedcba9876543210"
)

// Guest is a simulated instance.
type Guest struct {
	t     testing.TB
	Dir   string // contains sys and dev
	files string // contains the disks' files, in memory, so that no flush waits for a disk
	disks int
}

// Disk is a loop device that a guest shows as an NVMe disk.
type Disk struct {
	Name, Serial, Loop, File string // Name is the guest's name for it, such as nvme3n1
	SizeBytes                int64
}

var left sync.Once

// New makes a guest without disks, and unmounts everything below g.Dir when the test ends.
func New(t testing.TB) *Guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes loop devices and mounts; run it as root")
	}
	left.Do(func() {
		if all, err := loopdev.DetachLeft(t.Context()); err != nil {
			t.Logf("release %d loop devices of killed tests: %v", len(all), err)
		}
	})
	// The path has every character that a mount table escapes.
	g := &Guest{t: t, Dir: filepath.Join(t.TempDir(), "a guest\twith \\ and\nlines"),
		files: t.TempDir()}
	if os.Getenv("TMPDIR") == "" { // TMPDIR overrides the directory in memory
		csitest.Must(t, unix.Mount("none", g.files, "tmpfs", 0, ""))
		t.Cleanup(func() { csitest.Must(t, unix.Unmount(g.files, unix.MNT_DETACH)) })
	}
	for _, dir := range []string{g.Sys("block"), g.Dev("")} {
		csitest.Must(t, os.MkdirAll(dir, 0o755))
	}
	t.Cleanup(func() { unmountBelow(t, g.Dir) })
	return g
}

// Sys returns a path in the guest's /sys.
func (g *Guest) Sys(name string) string { return filepath.Join(g.Dir, "sys", name) }

// Dev returns a path in the guest's /dev.
func (g *Guest) Dev(name string) string { return filepath.Join(g.Dir, "dev", name) }

// Disks returns how many disks the guest has had so far.
func (g *Guest) Disks() int { return g.disks }

// Attach adds a disk of that size, which is backed by a new sparse file.
func (g *Guest) Attach(serial string, sizeBytes int64, options ...Option) *Disk {
	g.t.Helper()
	return g.AttachFile(serial, g.Sparse(sizeBytes), options...)
}

// Sparse makes a sparse file in memory, and returns its path.
func (g *Guest) Sparse(sizeBytes int64) string {
	g.t.Helper()
	file := csitest.Got(os.CreateTemp(g.files, "disk-*.img"))(g.t)
	csitest.Must(g.t, errors.Join(file.Truncate(sizeBytes), file.Close()))
	return file.Name()
}

// Option changes how a disk's loop device is made.
type Option func(*loopdev.Config)

// ReadOnly is an Option: the loop device refuses writes.
func ReadOnly(c *loopdev.Config) { c.ReadOnly = true }

// NoDiscards is an Option: the loop device refuses discards, so its bytes stay, as on a rack.
func NoDiscards(c *loopdev.Config) { c.NoDiscards = true }

// BlockSize returns an Option: the loop device has blocks of that many bytes.
func BlockSize(bytes int) Option { return func(c *loopdev.Config) { c.BlockSize = bytes } }

// AttachFile adds a disk that is backed by the file.
func (g *Guest) AttachFile(serial, file string, options ...Option) *Disk {
	g.t.Helper()
	// As on an instance, the names do not follow the order of attachment.
	g.disks++
	d := &Disk{Name: fmt.Sprintf("nvme%dn1", 7-g.disks%7), Serial: serial, File: file}
	// btrfs would treat two loop devices with the same serial as one device.
	config := loopdev.Config{Path: file, Serial: "guest-" + rand.Text()[:16], Owner: loopdev.Process()}
	for _, option := range options {
		option(&config)
	}
	attached := csitest.Got(loopdev.Attach(g.t.Context(), config))(g.t)
	d.Loop = attached.Path
	g.t.Cleanup(func() { // not d: the test may assign another disk to *d
		unmountBelow(g.t, g.Dir)
		err := attached.Detach(context.WithoutCancel(g.t.Context()))
		if err != nil && !errors.Is(err, loopdev.ErrBusy) {
			g.t.Error(err)
		}
	})
	sectors, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(d.Loop), "size"))
	csitest.Must(g.t, err)
	n := csitest.Got(strconv.ParseInt(strings.TrimSpace(string(sectors)), 10, 64))(g.t)
	d.SizeBytes = n * 512
	g.Plug(d)
	return d
}

// Plug adds the disk's device node and sysfs files to the guest.
func (g *Guest) Plug(d *Disk) {
	g.t.Helper()
	loop := filepath.Join("/sys/block", filepath.Base(d.Loop))
	dir := g.Sys(filepath.Join("block", d.Name))
	csitest.Must(g.t, os.MkdirAll(filepath.Join(dir, "device"), 0o755))
	for _, name := range []string{"dev", "size", "diskseq"} {
		b := csitest.Got(os.ReadFile(filepath.Join(loop, name)))(g.t)
		csitest.Must(g.t, os.WriteFile(filepath.Join(dir, name), b, 0o444))
	}
	var st unix.Stat_t
	csitest.Must(g.t, unix.Stat(d.Loop, &st))
	csitest.Must(g.t, unix.Mknod(g.Dev(d.Name), unix.S_IFBLK|0o660, int(st.Rdev)))
	var serial [volume.SerialBytes]byte
	copy(serial[:], d.Serial)
	csitest.Must(g.t, os.WriteFile(filepath.Join(dir, "device/serial"), append(serial[:], '\n'),
		0o444))
}

// Unplug removes the disk from the guest's sysfs and device directory.
func (g *Guest) Unplug(d *Disk) {
	g.t.Helper()
	csitest.Must(g.t, os.RemoveAll(g.Sys(filepath.Join("block", d.Name))))
	csitest.Must(g.t, os.Remove(g.Dev(d.Name)))
}

// ReadAt drops the kernel's cache of the disk and reads from it.
func (d *Disk) ReadAt(t testing.TB, offset, n int64) []byte {
	t.Helper()
	Run(t, "blockdev", "--flushbufs", d.Loop)
	f := csitest.Got(os.Open(d.Loop))(t)
	defer func() { _ = f.Close() }()
	b := make([]byte, n)
	csitest.Must(t, csitest.Err(f.ReadAt(b, offset)))
	return b
}

// WriteAt writes to the disk and syncs it.
func (d *Disk) WriteAt(t testing.TB, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(d.Loop, os.O_WRONLY, 0)
	csitest.Must(t, err)
	_, err = f.WriteAt(b, offset)
	csitest.Must(t, errors.Join(err, f.Sync(), f.Close()))
}

// Same returns a function that checks that the disk's bytes have not changed since this call.
func (d *Disk) Same(t testing.TB) (check func()) {
	t.Helper()
	before := d.digest(t)
	return func() {
		t.Helper()
		if d.digest(t) != before {
			t.Error("the disk has changed")
		}
	}
}

func (d *Disk) digest(t testing.TB) string {
	t.Helper()
	Run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.File)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	sum, page := crc32.NewIEEE(), make([]byte, 64<<10)
	for at := int64(0); ; at += int64(len(page)) {
		at, err = unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return fmt.Sprint(sum.Sum32())
		}
		csitest.Must(t, err)
		at &^= int64(len(page) - 1) // the digest must not depend on the holes
		n, err := f.ReadAt(page, at)
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if read := page[:n]; len(bytes.Trim(read, "\x00")) > 0 {
			_, _ = fmt.Fprint(sum, at)
			_, _ = sum.Write(read)
		}
	}
}

// Copy copies the disk's file, as a snapshot and a restore do, and returns the path of the copy.
func (d *Disk) Copy(t testing.TB) string {
	t.Helper()
	dir := csitest.Got(os.MkdirTemp(filepath.Dir(d.File), "copy-"))(t)
	to := filepath.Join(dir, "disk.img")
	Run(t, "cp", "--sparse=always", d.File, to)
	return to
}

// Run runs a program and returns its output. It ends the test if the program fails.
func Run(t testing.TB, name string, args ...string) string {
	t.Helper()
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %q: %v\n%s", name, args, err, out)
	}
	return string(out)
}

// Mounts lists the mount points below a directory, the last mounted first.
func Mounts(t testing.TB, dir string) []string {
	t.Helper()
	table := csitest.Got(mountinfo.GetMounts(mountinfo.PrefixFilter(dir)))(t)
	var paths []string
	for _, m := range table {
		paths = append([]string{m.Mountpoint}, paths...)
	}
	return paths
}

func unmountBelow(t testing.TB, dir string) {
	for _, path := range Mounts(t, dir) {
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Errorf("clean up %q: %v", path, err)
		}
	}
}

// Sysfs makes a directory like /sys and returns its path. The directory has a block device for each
// name in serials. A device with the serial "-" has no serial file.
func Sysfs(t testing.TB, serials map[string]string) string {
	t.Helper()
	root := t.TempDir()
	csitest.Must(t, os.MkdirAll(filepath.Join(root, "block"), 0o755))
	minor := 0
	for name, serial := range serials {
		minor++
		dir := filepath.Join(root, "block", name)
		csitest.Must(t, os.MkdirAll(filepath.Join(dir, "device"), 0o755))
		files := map[string]string{"dev": fmt.Sprintf("259:%d\n", minor), "size": "2097152\n"}
		if serial != "-" {
			files["device/serial"] = serial + strings.Repeat("\x00", 20-len(serial)) + "\n"
		}
		for file, text := range files {
			csitest.Must(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o444))
		}
	}
	return root
}
