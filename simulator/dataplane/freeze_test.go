//go:build linux

package dataplane

import (
	"bufio"
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/simulator/simtest"
)

// isFrozen tries a freeze, which fails if the filesystem is already frozen.
func isFrozen(t *testing.T, dir string) bool {
	t.Helper()
	f, err := os.Open(dir)
	simtest.NoError(t, err)
	defer f.Close()
	err = unix.IoctlSetInt(int(f.Fd()), ioctlFreeze, 0)
	if errors.Is(err, unix.EBUSY) {
		return true
	}
	simtest.NoError(t, err)
	simtest.NoError(t, thawMount(f))
	return false
}

// thawAtEnd thaws the filesystem after a test that freezes it, so that no process hangs whatever
// the test finds.
func thawAtEnd(t *testing.T, dir string) {
	t.Helper()
	f, err := os.Open(dir)
	simtest.NoError(t, err)
	t.Cleanup(func() {
		_ = thawMount(f)
		f.Close()
	})
}

func TestAFreezeHoldsAndIsUndone(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p := newPlane(t)
			spec := mountedDisk(t, p, fsType)
			thawAtEnd(t, spec.dir)
			thaw, err := p.freezer.freeze(*p.guests.disk(spec.DiskID).loop, spec.DiskID)
			simtest.NoError(t, err)
			if !isFrozen(t, spec.dir) {
				t.Error("the filesystem is not frozen")
			}
			simtest.NoError(t, thaw())
			if isFrozen(t, spec.dir) {
				t.Error("the filesystem stays frozen")
			}
			simtest.NoError(t, os.WriteFile(filepath.Join(spec.dir, "f"), nil, 0o600))
		})
	}
}

func TestAMountInAnotherNamespaceIsFound(t *testing.T) {
	for _, fsType := range []string{"ext4", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p := newPlane(t)
			spec := mountedDisk(t, p, fsType)
			loop := *p.guests.disk(spec.DiskID).loop
			dir := filepath.Join(t.TempDir(), "a name with spaces")
			simtest.NoError(t, os.Mkdir(dir, 0o700))
			// The mount is removed here, and has another path in the new namespace.
			inside := exec.CommandContext(t.Context(), "unshare", "--mount", "sh", "-c",
				`mount --move "$1" "$2" || mount --bind "$1" "$2" && umount "$1"
				echo mounted; read -r word; true`, "sh", spec.dir, dir)
			in, err := inside.StdinPipe()
			simtest.NoError(t, err)
			out, err := inside.StdoutPipe()
			simtest.NoError(t, err)
			simtest.NoError(t, inside.Start())
			_, err = bufio.NewReader(out).ReadString('\n')
			simtest.NoError(t, err)
			simtest.Command(t, "umount", spec.dir)
			mount, err := p.freezer.findMount(loop)
			simtest.NoError(t, err)
			if mount == nil {
				t.Fatal("the mount in the other namespace was not found")
			}
			mount.Close()
			in.Close()
			simtest.NoError(t, inside.Wait())
			if mount, err = p.freezer.findMount(loop); mount != nil || err != nil {
				t.Errorf("after the namespace ended: %v, %v", mount, err)
			}
		})
	}
}

func TestFindMountDistinguishesAMountFromOneThatCoversIt(t *testing.T) {
	p := newPlane(t)
	below, above := mountedDisk(t, p, "ext4"), mountedDisk(t, p, "ext4")
	simtest.Command(t, "umount", above.dir)
	simtest.Mount(t, nodeOf(t, p, above.InstanceID), below.dir)
	mount, err := p.freezer.findMount(*p.guests.disk(below.DiskID).loop)
	if mount != nil || err != nil {
		t.Errorf("findMount of what is covered = %v, %v, want none", mount, err)
	}
	mount, err = p.freezer.findMount(*p.guests.disk(above.DiskID).loop)
	if mount == nil || err != nil {
		t.Fatalf("findMount of what covers it = %v, %v", mount, err)
	}
	mount.Close()
	simtest.Command(t, "umount", below.dir)
}

func TestASnapshotDoesNotEndTheFreezeOfAnotherProgram(t *testing.T) {
	p := newPlaneOn(t, "ext4")
	spec := mountedDisk(t, p, "ext4")
	thawAtEnd(t, spec.dir)
	simtest.Command(t, "fsfreeze", "--freeze", spec.dir)
	simtest.NoError(t, p.SnapshotDisk(t.Context(), newID(), spec.DiskID))
	if !isFrozen(t, spec.dir) {
		t.Error("the snapshot ended somebody else's freeze")
	}
	simtest.Command(t, "fsfreeze", "--unfreeze", spec.dir)
}

func TestAnInterruptedSnapshotThawsTheFilesystem(t *testing.T) {
	p := newPlaneOn(t, "ext4")
	spec := mountedDisk(t, p, "ext4")
	thawAtEnd(t, spec.dir)
	ctx, cancel := context.WithCancel(t.Context())
	d := p.guests.disk(spec.DiskID)
	src, err := os.Open(p.DiskPath(spec.DiskID))
	simtest.NoError(t, err)
	defer src.Close()
	dst, err := os.Create(filepath.Join(t.TempDir(), "copy"))
	simtest.NoError(t, err)
	defer dst.Close()
	cancel()
	if _, err := p.copyFrozen(ctx, dst, src, d); !errors.Is(err, context.Canceled) {
		t.Errorf("copyFrozen = %v, want context.Canceled", err)
	}
	if isFrozen(t, spec.dir) || exists(p.freezer.note(spec.DiskID)) {
		t.Error("the filesystem stays frozen, or the note of it")
	}
}

// TestTheGuardThawsTheFilesystemOfAKilledSnapshot kills a process while it holds a filesystem
// frozen.
func TestTheGuardThawsTheFilesystemOfAKilledSnapshot(t *testing.T) {
	if dir := os.Getenv("SIMULATOR_TEST_FREEZE"); dir != "" {
		freezeUntilKilled(t, dir, os.Getenv("SIMULATOR_TEST_DISK"))
		return
	}
	p := newPlane(t)
	spec := mountedDisk(t, p, "ext4")
	thawAtEnd(t, spec.dir)
	child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
	child.Env = append(os.Environ(),
		"SIMULATOR_TEST_FREEZE="+p.dir, "SIMULATOR_TEST_DISK="+spec.DiskID)
	out, err := child.StdoutPipe()
	simtest.NoError(t, err)
	simtest.NoError(t, child.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "frozen\n" {
		t.Fatalf("the child says %q, %v", line, err)
	}
	if !isFrozen(t, spec.dir) {
		t.Error("the filesystem is not frozen")
	}
	simtest.NoError(t, child.Process.Kill())
	_ = child.Wait() // the process was killed
	simtest.Eventually(t, "the guard thaws", func() bool { return !isFrozen(t, spec.dir) })
	simtest.NoError(t, os.WriteFile(filepath.Join(spec.dir, "f"), nil, 0o600))
}

func freezeUntilKilled(t *testing.T, dir, diskID string) {
	p, err := Open(Config{Dir: dir, Log: slog.New(slog.DiscardHandler)})
	simtest.NoError(t, err)
	for _, loop := range devicesOf(t, p) {
		if loop.BackingFile == p.DiskPath(diskID) {
			_, err := p.freezer.freeze(loop, diskID)
			simtest.NoError(t, err)
			_, err = os.Stdout.WriteString("frozen\n")
			simtest.NoError(t, err)
			select {}
		}
	}
	t.Fatal("the disk has no device")
}

func TestReconcileThawsTheFilesystemThatAKilledSnapshotLeft(t *testing.T) {
	p := newPlane(t)
	spec := mountedDisk(t, p, "ext4")
	thawAtEnd(t, spec.dir)
	// The guard was killed as well.
	simtest.Command(t, "fsfreeze", "--freeze", spec.dir)
	simtest.NoError(t, os.WriteFile(p.freezer.note(spec.DiskID), nil, 0o600))
	simtest.NoError(t, p.freezer.thawLeftovers(devicesOf(t, p), p.DiskPath))
	if isFrozen(t, spec.dir) || exists(p.freezer.note(spec.DiskID)) {
		t.Error("the filesystem stays frozen, or the note of it")
	}
}

func TestReconcileThawsAFilesystemThatWasUnmountedWhileFrozen(t *testing.T) {
	for _, fsType := range []string{"ext4", "xfs", "btrfs"} {
		t.Run(fsType, func(t *testing.T) {
			p := newPlane(t)
			spec := mountedDisk(t, p, fsType)
			simtest.Command(t, "fsfreeze", "--freeze", spec.dir)
			simtest.Command(t, "umount", spec.dir)
			simtest.NoError(t, os.WriteFile(p.freezer.note(spec.DiskID), nil, 0o600))
			simtest.NoError(t, p.freezer.thawLeftovers(devicesOf(t, p), p.DiskPath))
			loop := *p.guests.disk(spec.DiskID).loop
			simtest.NoError(t, p.Unplug(spec.InstanceID, spec.DiskID))
			for _, d := range devicesOf(t, p) {
				if d.Sequence == loop.Sequence {
					t.Error("the filesystem still keeps its device")
				}
			}
		})
	}
}
