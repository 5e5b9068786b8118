//go:build linux

package loopdev_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// leaver is an environment variable with the path of a file. It makes this test program attach the
// file and wait to be killed.
const leaver = "LOOPDEV_TEST_LEAVES"

func TestDetachLeftReleasesOnlyTheDevicesOfADeadProcess(t *testing.T) {
	if file := os.Getenv(leaver); file != "" {
		leave(t, file)
	}
	dir := t.TempDir()
	t.Cleanup(func() { releaseBelow(t, dir) })
	file, mountpoint := filepath.Join(dir, "disk"), filepath.Join(dir, "mounted")
	for _, err := range []error{os.WriteFile(file, nil, 0o600), os.Truncate(file, 8*mib),
		os.Mkdir(mountpoint, 0o755)} {
		must(t, err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", file).CombinedOutput(); err != nil {
		t.Fatalf("mkfs: %v: %s", err, out)
	}
	process := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	process.Env = append(os.Environ(), leaver+"="+file)
	process.Stderr = os.Stderr
	in, inErr := process.StdinPipe()
	out, outErr := process.StdoutPipe()
	must(t, errors.Join(inErr, outErr))
	defer in.Close()
	must(t, process.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	dead := strings.Fields(line)
	if err != nil || len(dead) != 2 {
		_ = process.Process.Kill()
		t.Fatalf("the process prints %q, %v; want its serial and its device", line, err)
	}
	if err := unix.Mount(dead[1], mountpoint, "ext4", 0, ""); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mountpoint, unix.MNT_DETACH) })

	own := attachIn(t, filepath.Join(dir, "own"))
	living := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: loopdev.Process() + ".1"})
	foreign := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: "p.1.1.1"}) // a process of another PID namespace
	rack := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t), Owner: "RACK"})
	// A living process keeps its device.
	if left := detachLeft(t); slices.Contains(left, dead[0]) {
		t.Errorf("released %s of a process that lives", dead[0])
	}
	must(t, process.Process.Kill())
	_ = process.Wait() // It was killed.
	if left := detachLeft(t); !slices.Contains(left, dead[0]) {
		t.Errorf("released %q, want %s of the process that was killed", left, dead[0])
	}
	if found := mustFind(t, dead[0]); len(found) > 0 {
		t.Errorf("the device of the process that was killed is there: %+v", found)
	}
	for _, d := range []loopdev.Device{own, living, foreign, rack} {
		if found := mustFind(t, d.Serial); len(found) != 1 || found[0].Sequence != d.Sequence ||
			found[0].Releasing {
			t.Errorf("the device %s of %q has changed: %+v", d.Path, d.Owner, found)
		}
	}
}

// leave attaches the file for this process, prints a line, and waits to be killed.
func leave(t *testing.T, file string) {
	d := attach(t, loopdev.Config{Path: file, Serial: serial(t), Owner: loopdev.Process()})
	if _, err := os.Stdout.WriteString(d.Serial + " " + d.Path + "\n"); err != nil {
		t.Fatal(err)
	}
	_, err := io.ReadAll(os.Stdin)
	t.Fatalf("the process was to be killed, and its input has ended: %v", err)
}

// detachLeft calls DetachLeft and returns the serials of the devices. It ignores errors, because
// devices of other tests may be busy.
func detachLeft(t *testing.T) (serials []string) {
	t.Helper()
	left, err := loopdev.DetachLeft(context.Background())
	if err != nil {
		t.Logf("DetachLeft: %v", err)
	}
	for _, d := range left {
		serials = append(serials, d.Serial)
	}
	return serials
}

func TestDetachLeftReleasesOrphanedDevicesByTheNameOfTheirFile(t *testing.T) {
	for name, released := range map[string]bool{
		// This owner names no living process.
		"p." + strings.Split(loopdev.Process(), ".")[1] + ".1.zzzzz.disk-1": true,
		loopdev.Process() + ".disk-1":                                       false,
		"disk-1":                                                            false,
	} {
		t.Run(name, func(t *testing.T) {
			served, end := serveAs(t, name, flakydisk.NewImage(8*mib))
			must(t, end())
			detachLeft(t)
			all, err := loopdev.List()
			must(t, err)
			left := slices.ContainsFunc(all, func(d loopdev.Device) bool {
				return d.Sequence == served.Sequence
			})
			if left == released {
				t.Errorf("the device of the file %q is there: %t, want %t", name, left, !released)
			}
		})
	}
}

func attachIn(t *testing.T, dir string) loopdev.Device {
	t.Helper()
	path := filepath.Join(dir, "disk")
	must(t, os.MkdirAll(dir, 0o755))
	must(t, os.Rename(newFile(t, mib), path))
	t.Cleanup(func() { releaseBelow(t, dir) })
	return attach(t, loopdev.Config{Path: path, Serial: serial(t)})
}

// attachNode attaches a loop device to a node of another loop device, under a path in dir.
func attachNode(t *testing.T, dir string, lower loopdev.Device) (upper loopdev.Device) {
	t.Helper()
	node := filepath.Join(dir, "node")
	must(t, unix.Mknod(node, unix.S_IFBLK|0o600, int(unix.Mkdev(lower.Major, lower.Minor))))
	out, err := exec.Command("losetup", "--find", "--show", node).CombinedOutput()
	if err != nil {
		t.Fatalf("losetup --find %s: %v: %s", node, err, out)
	}
	t.Cleanup(func() { releaseBelow(t, dir) })
	all, err := loopdev.List()
	must(t, err)
	return all[slices.IndexFunc(all, func(d loopdev.Device) bool {
		return d.Path == strings.TrimSpace(string(out))
	})]
}

func TestDetachBelowReleasesTheDevicesOfADirectoryAndNoOther(t *testing.T) {
	dir, elsewhere := filepath.Join(t.TempDir(), "work"), t.TempDir()
	inside := attachIn(t, filepath.Join(dir, "rack", "disks"))
	outside := attachIn(t, dir+"-2")
	upper := attachNode(t, dir, inside)
	must(t, os.Rename(newFile(t, mib), filepath.Join(dir, "file")))
	must(t, unix.Mount(dir, elsewhere, "", unix.MS_BIND, ""))
	c := loopdev.Config{Serial: (serial(t) + strings.Repeat("s", 51))[:51], Owner: "who made it",
		Path: filepath.Join(elsewhere, "file"), BlockSize: 4096, ReadOnly: true} // texts of full length
	hidden, err := loopdev.Attach(t.Context(), c)
	// The file stays open although its mount is gone, as after the end of a container.
	must(t, errors.Join(err, unix.Unmount(elsewhere, unix.MNT_DETACH)))
	if hidden.Serial != c.Serial || hidden.Owner != c.Owner || hidden.BlockSize != c.BlockSize ||
		!hidden.ReadOnly || hidden.SizeBytes != mib {
		t.Errorf("Attach(%+v) = %+v", c, hidden)
	}
	if path := mustFind(t, hidden.Serial)[0].BackingFile; strings.HasPrefix(path, dir+"/") {
		t.Fatalf("the kernel reports %s, want a path outside %s", path, dir)
	}
	found, err := loopdev.DetachBelow(t.Context(), dir)
	must(t, err)
	byPath := cmpopts.SortSlices(func(a, b loopdev.Device) bool { return a.Path < b.Path })
	if diff := cmp.Diff([]loopdev.Device{inside, upper, hidden}, found, byPath,
		cmpopts.IgnoreFields(loopdev.Device{}, "BackingFile")); diff != "" {
		t.Errorf("DetachBelow differs from what was attached below (-attached +found):\n%s", diff)
	}
	for _, d := range []loopdev.Device{inside, upper, hidden} {
		if left := mustFind(t, d.Serial); len(left) != 0 {
			t.Errorf("after DetachBelow there is %+v", left)
		}
	}
	if left := mustFind(t, outside.Serial); len(left) != 1 {
		t.Errorf("DetachBelow(%s) released %s", dir, outside.BackingFile)
	}
}

func TestOnReportsWhetherADeviceBacksAnother(t *testing.T) {
	own, foreign := attachIn(t, t.TempDir()), attachIn(t, t.TempDir())
	upper := attachNode(t, t.TempDir(), own) // as in a pod
	if !upper.On(own) || upper.On(foreign) || own.On(foreign) || own.On(own) {
		t.Errorf("%s with the number %x is on its own device: %t, on another one: %t; its own device is "+
			"on another one: %t", upper.Path, upper.BackingNumber, upper.On(own), upper.On(foreign),
			own.On(foreign))
	}
}
