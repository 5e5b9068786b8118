// Package guesttest shows tests of the driver's node side what an instance shows: a /sys and a /dev
// of its own, with loop devices as its disks.
package guesttest

import (
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

// Sizes of disks in bytes.
const (
	MiB = 1 << 20
	GiB = 1 << 30
)

// Serials of disks.
const (
	Serial      = "csi-0123456789abcdef"
	OtherSerial = "csi-fedcba9876543210"
)

// Guest is one instance.
type Guest struct {
	t     testing.TB
	Dir   string // holds sys and dev
	disks int
}

// Disk is a disk of a guest.
type Disk struct {
	Name, Serial, Loop, File string // Name is the kernel's, nvme3n1
	SizeBytes                int64
}

// New makes a guest without disks. The end of the test unmounts what is mounted below its
// directory.
func New(t testing.TB) *Guest {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test makes loop devices and mounts; run it as root")
	}
	// A path with all that a mount table has to escape.
	g := &Guest{t: t, Dir: filepath.Join(t.TempDir(), "a guest\twith \\ and\nlines")}
	for _, dir := range []string{g.Sys("block"), g.Dev("")} {
		csitest.Must(t, os.MkdirAll(dir, 0o755))
	}
	t.Cleanup(func() { UnmountBelow(t, g.Dir) })
	return g
}

// Sys returns a path in the guest's /sys.
func (g *Guest) Sys(name string) string { return filepath.Join(g.Dir, "sys", name) }

// Dev returns a path in the guest's /dev.
func (g *Guest) Dev(name string) string { return filepath.Join(g.Dir, "dev", name) }

// Disks returns how many disks were attached so far.
func (g *Guest) Disks() int { return g.disks }

// Attach gives the guest a disk of that size whose bytes are in a sparse file. The flags are
// losetup's.
func (g *Guest) Attach(serial string, sizeBytes int64, flags ...string) *Disk {
	g.t.Helper()
	file := filepath.Join(g.t.TempDir(), "disk.img")
	csitest.Must(g.t, os.WriteFile(file, nil, 0o600))
	csitest.Must(g.t, os.Truncate(file, sizeBytes))
	return g.AttachFile(serial, file, flags...)
}

// AttachFile gives the guest a disk whose bytes are in the file.
func (g *Guest) AttachFile(serial, file string, flags ...string) *Disk {
	g.t.Helper()
	// Names come in no useful order: the second disk comes before the first.
	g.disks++
	d := &Disk{Name: fmt.Sprintf("nvme%dn1", 7-g.disks%7), Serial: serial, File: file}
	d.Loop = strings.TrimSpace(Run(g.t, "losetup",
		append(append([]string{"--find", "--show"}, flags...), file)...))
	loop := d.Loop                        // the test may give d to another disk
	Run(g.t, "blockdev", "--setrw", loop) // an earlier device of the number may have been switched
	g.t.Cleanup(func() {
		UnmountBelow(g.t, g.Dir)
		Run(g.t, "losetup", "--detach", loop)
	})
	sectors, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(loop), "size"))
	csitest.Must(g.t, err)
	n, err := strconv.ParseInt(strings.TrimSpace(string(sectors)), 10, 64)
	csitest.Must(g.t, err)
	d.SizeBytes = n * 512
	g.Plug(d)
	return d
}

// Plug shows a disk in the guest's trees, as the kernel would write it there.
func (g *Guest) Plug(d *Disk) {
	g.t.Helper()
	loop := filepath.Join("/sys/block", filepath.Base(d.Loop))
	dir := g.Sys(filepath.Join("block", d.Name))
	csitest.Must(g.t, os.MkdirAll(filepath.Join(dir, "device"), 0o755))
	for _, name := range []string{"dev", "size", "diskseq"} {
		b, err := os.ReadFile(filepath.Join(loop, name))
		csitest.Must(g.t, err)
		csitest.Must(g.t, os.WriteFile(filepath.Join(dir, name), b, 0o444))
	}
	var st unix.Stat_t
	csitest.Must(g.t, unix.Stat(d.Loop, &st))
	csitest.Must(g.t, unix.Mknod(g.Dev(d.Name), unix.S_IFBLK|0o660, int(st.Rdev)))
	// The rack fills the 20 bytes with NULs, and sysfs ends the line.
	var serial [volume.SerialBytes]byte
	copy(serial[:], d.Serial)
	csitest.Must(g.t, os.WriteFile(filepath.Join(dir, "device/serial"), append(serial[:], '\n'),
		0o444))
}

// Unplug takes the disk out of the guest's trees.
func (g *Guest) Unplug(d *Disk) {
	g.t.Helper()
	csitest.Must(g.t, os.RemoveAll(g.Sys(filepath.Join("block", d.Name))))
	csitest.Must(g.t, os.Remove(g.Dev(d.Name)))
}

// ReadAt reads from the disk.
func (d *Disk) ReadAt(t testing.TB, offset, n int64) []byte {
	t.Helper()
	Run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.Loop)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	b := make([]byte, n)
	_, err = f.ReadAt(b, offset)
	csitest.Must(t, err)
	return b
}

// WriteAt writes to the disk, durably.
func (d *Disk) WriteAt(t testing.TB, offset int64, b []byte) {
	t.Helper()
	f, err := os.OpenFile(d.Loop, os.O_WRONLY, 0)
	csitest.Must(t, err)
	_, err = f.WriteAt(b, offset)
	csitest.Must(t, err)
	csitest.Must(t, f.Sync())
	csitest.Must(t, f.Close())
}

// Digest returns a checksum of a disk's bytes.
func (d *Disk) Digest(t testing.TB) string {
	t.Helper()
	Run(t, "blockdev", "--flushbufs", d.Loop)
	f, err := os.Open(d.File)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	sum := crc32.NewIEEE()
	_, err = io.Copy(sum, f)
	csitest.Must(t, err)
	return fmt.Sprint(sum.Sum32())
}

// Run runs a program, ends the test if it fails, and returns what it wrote.
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
	table, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	csitest.Must(t, err)
	var paths []string
	for _, m := range table {
		paths = append([]string{m.Mountpoint}, paths...)
	}
	return paths
}

// UnmountBelow unmounts what a failed test left.
func UnmountBelow(t testing.TB, dir string) {
	for _, path := range Mounts(t, dir) {
		if err := unix.Unmount(path, unix.UMOUNT_NOFOLLOW); err != nil {
			t.Errorf("clean up %q: %v", path, err)
		}
	}
}

// Sysfs writes a tree of block devices: name to serial, as the kernel writes them. A device whose
// serial is "-" has none.
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
