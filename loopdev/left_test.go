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

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// leaver is the environment variable that marks the process that
// TestDetachLeftReleasesOnlyTheDevicesOfADeadProcess kills. It names a file.
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
		t.Fatalf("the process says %q, %v; want its serial and its device", line, err)
	}
	if err := unix.Mount(dead[1], mountpoint, "ext4", 0, ""); err != nil {
		t.Error(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mountpoint, unix.MNT_DETACH) })

	own := attachIn(t, filepath.Join(dir, "own"))
	living := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: loopdev.Process() + ".1"})
	foreign := attach(t, loopdev.Config{Path: newFile(t, mib), Serial: serial(t),
		Owner: "p.1.1.1"}) // of another PID namespace
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
			t.Errorf("the device %s of %q is not what it was: %+v", d.Path, d.Owner, found)
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

// detachLeft calls DetachLeft and returns the serials of the devices. They may be of any test,
// and devices of another test may be busy.
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

func TestAnOrphanedDeviceIsReleasedByTheNameOfItsFile(t *testing.T) {
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
