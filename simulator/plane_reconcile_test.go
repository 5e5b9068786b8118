package simulator

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// killed opens the directory of a data plane that was not closed, as after a kill.
func killed(t *testing.T, p *plane, guests ...string) *plane {
	t.Helper()
	p.die()
	p.working.Wait()
	after, err := openPlane(p.dir, p.log)
	need(t, err)
	for _, id := range guests {
		need(t, after.addGuest(guestSpec{id, "web-1"}))
	}
	t.Cleanup(func() { _ = after.close() })
	return after
}

func TestReconcileAdoptsWhatIsAsItShouldBe(t *testing.T) {
	before := newPlane(t)
	spec := mountedDisk(t, before, "ext4")
	node, loop := nodeOf(t, before, spec.InstanceID), *before.pluggedDisk(spec.DiskID).loop
	later := newDisk(t, before, spec.InstanceID, "later")
	need(t, before.plug(later, deviceFault{Delay: time.Hour}))

	p := killed(t, before, spec.InstanceID)
	need(t, p.reconcile(t.Context(), []deviceSpec{spec.deviceSpec, later},
		[]string{spec.DiskID, later.DiskID}, nil))
	if got := *p.pluggedDisk(spec.DiskID).loop; got != loop {
		t.Errorf("the device is %+v, was %+v", got, loop)
	}
	if !exists(node) {
		t.Errorf("%s is gone from under its guest", node)
	}
	need(t, os.WriteFile(filepath.Join(spec.dir, "f"), []byte("still works"), 0o600))
	if names := seen(t, p, spec.InstanceID); len(names) != 2 {
		t.Errorf("the guest sees %v, want the mounted one and the one that was on its way", names)
	}
	if n := len(devicesOf(t, p)); n != 2 {
		t.Errorf("there are %d devices, want the two from before", n)
	}
	command(t, "umount", spec.dir)
	need(t, p.unplug(spec.InstanceID, spec.DiskID))
}

func TestReconcileAdoptsWhatAnotherMountNamespaceAttached(t *testing.T) {
	before := newPlane(t)
	spec := newDisk(t, before, newGuest(t, before), "elsewhere")
	// As in a container that is gone, the file was reached by a path that nobody has now.
	elsewhere := t.TempDir()
	command(t, "mount", "--bind", before.dir, elsewhere)
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{
		Path:   filepath.Join(elsewhere, "disks", spec.DiskID+".img"),
		Serial: spec.serial(), BlockSize: spec.BlockSize, SizeLimit: spec.SizeBytes,
	})
	need(t, err)
	command(t, "umount", "--lazy", elsewhere)

	p := killed(t, before, spec.InstanceID)
	need(t, p.reconcile(t.Context(), []deviceSpec{spec}, []string{spec.DiskID}, nil))
	if got := *p.pluggedDisk(spec.DiskID).loop; got.Sequence != loop.Sequence {
		t.Errorf("the device is %+v, want the one that was there: %+v", got, loop)
	}
	if n := len(devicesOf(t, p)); n != 1 {
		t.Errorf("there are %d devices, want the one from before", n)
	}
}

func TestReconcileLeavesADeviceOfAnotherFilesystemAlone(t *testing.T) {
	hidden := newPlane(t)
	spec := newDisk(t, hidden, newGuest(t, hidden), "theirs")
	need(t, hidden.plug(spec, deviceFault{}))
	mountFor(t, "tmpfs", hidden.dir, "-t", "tmpfs")
	p, err := openPlane(hidden.dir, hidden.log)
	need(t, err)
	need(t, p.reconcile(t.Context(), nil, nil, nil))
	need(t, p.close())
	command(t, "umount", hidden.dir)
	if got := devicesOf(t, hidden); len(got) != 1 || got[0].Releasing {
		t.Errorf("devices = %+v, want the one whose directory is covered", got)
	}
}

func TestReconcileReleasesWhatNoRecordNames(t *testing.T) {
	before := newPlane(t)
	spec := mountedDisk(t, before, "ext4")
	other := newDisk(t, before, spec.InstanceID, "other")
	need(t, before.plug(other, deviceFault{}))

	p := killed(t, before, spec.InstanceID)
	need(t, p.reconcile(t.Context(), nil, []string{spec.DiskID}, nil))
	if names := seen(t, p, spec.InstanceID); len(names) != 0 {
		t.Errorf("the guest sees %v, want none", names)
	}
	if exists(p.diskPath(other.DiskID)) || !exists(p.diskPath(spec.DiskID)) {
		t.Error("the wrong disk's bytes were removed")
	}
	left := devicesOf(t, p)
	if len(left) != 1 || left[0].SizeBytes != 0 || !left[0].Releasing {
		t.Errorf("devices = %+v, want the mounted one only, without its bytes", left)
	}
	need(t, unix.Unmount(spec.dir, unix.MNT_DETACH))
}

func TestReconcileReplacesWhatIsNotAsItShouldBe(t *testing.T) {
	for name, change := range map[string]func(*deviceSpec){
		"another size":       func(s *deviceSpec) { s.SizeBytes /= 2 },
		"another block size": func(s *deviceSpec) { s.BlockSize = 4096 },
		"another serial":     func(s *deviceSpec) { s.DiskName = "renamed" },
		"read-only":          func(s *deviceSpec) { s.ReadOnly = true },
	} {
		t.Run(name, func(t *testing.T) {
			before := newPlane(t)
			id := newGuest(t, before)
			spec := newDisk(t, before, id, "changed")
			need(t, before.plug(spec, deviceFault{}))
			change(&spec)
			p := killed(t, before, id)
			need(t, p.reconcile(t.Context(), []deviceSpec{spec}, []string{spec.DiskID}, nil))
			devices := devicesOf(t, p)
			if len(devices) != 1 || !p.carries(devices[0], spec) {
				t.Errorf("devices = %+v, want one as in %+v", devices, spec)
			}
			nodeOf(t, p, id)
		})
	}
}

// TestReconcileDoesNotAdoptWhatTheKernelIsAboutToRelease would else lose the device later.
func TestReconcileDoesNotAdoptWhatTheKernelIsAboutToRelease(t *testing.T) {
	before := newPlane(t)
	id := newGuest(t, before)
	spec := newDisk(t, before, id, "leaving")
	need(t, before.plug(spec, deviceFault{}))
	holder, err := os.Open(nodeOf(t, before, id))
	need(t, err)
	defer holder.Close()
	old := *before.pluggedDisk(spec.DiskID).loop
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if err := old.Detach(ended); err == nil {
		t.Fatal("the held device was released")
	}
	p := killed(t, before, id)
	need(t, p.reconcile(t.Context(), []deviceSpec{spec}, []string{spec.DiskID}, nil))
	if now := p.pluggedDisk(spec.DiskID).loop; now.Sequence == old.Sequence {
		t.Error("the device that is being released was adopted")
	}
	holder.Close()
	soon(t, "the old device goes", func() bool { return len(devicesOf(t, p)) == 1 })
}

func TestReconcileKeepsAHiddenDeviceHidden(t *testing.T) {
	before := newPlane(t)
	id := newGuest(t, before)
	first := newDisk(t, before, id, "pvc-6fa1d3ac-1234-4aaa")
	second := newDisk(t, before, id, "pvc-6fa1d3ac-1234-4abb")
	need(t, before.plug(first, deviceFault{}))
	need(t, before.plug(second, deviceFault{}))
	visible := nodeOf(t, before, id)
	p := killed(t, before, id)
	need(t, p.reconcile(t.Context(), []deviceSpec{second, first},
		[]string{first.DiskID, second.DiskID}, nil))
	if got := nodeOf(t, p, id); got != visible || p.pluggedDisk(second.DiskID).node != "" {
		t.Errorf("the guest sees %s, saw %s", got, visible)
	}
	need(t, p.unplug(id, first.DiskID))
	if names := seen(t, p, id); len(names) != 0 {
		t.Errorf("after the first went, the guest sees %v, want none", names)
	}
}

func TestReconcileRemovesWhatWasLeftBehind(t *testing.T) {
	p := newPlane(t)
	kept, snapshot, guest := newID(), newID(), newGuest(t, p)
	need(t, p.createDisk(kept, testDiskSize))
	need(t, p.snapshotDisk(t.Context(), snapshot, kept))
	need(t, p.importImage(t.Context(), kept, "", testDiskSize))
	var orphans []string
	for _, path := range []string{
		p.diskPath(newID()), p.diskPath(kept) + unfinished, p.snapshotPath(newID()),
		p.snapshotPath(snapshot) + unfinished, p.imagePath(newID()) + unfinished,
		p.guestDir(newID()), filepath.Join(p.blockDir(guest), "nvme3n1"), p.nodePath(guest, "nvme4n1"),
	} {
		orphans = append(orphans, path)
		need(t, os.WriteFile(path, nil, 0o600))
	}
	need(t, p.reconcile(t.Context(), nil, []string{kept}, []string{snapshot}))
	for _, path := range orphans {
		if exists(path) {
			t.Errorf("%s is left", path)
		}
	}
	for _, path := range []string{
		p.diskPath(kept), p.snapshotPath(snapshot), p.imagePath(kept), p.guestDir(guest),
	} {
		if !exists(path) {
			t.Errorf("%s is gone", path)
		}
	}
}

func TestADiskWithoutItsBytesDoesNotKeepTheRestFromStarting(t *testing.T) {
	p := newPlane(t)
	id := newGuest(t, p)
	lost, whole := newDisk(t, p, id, "lost"), newDisk(t, p, id, "whole")
	need(t, os.Remove(p.diskPath(lost.DiskID)))
	need(t, p.reconcile(t.Context(), []deviceSpec{lost, whole},
		[]string{lost.DiskID, whole.DiskID}, nil))
	nodeOf(t, p, id)
}

// TestKilledAtAnyMomentNothingIsLeftAfterReconcile kills processes in the middle of plugging,
// unplugging, snapshots and clones.
func TestKilledAtAnyMomentNothingIsLeftAfterReconcile(t *testing.T) {
	if dir := os.Getenv("SIMULATOR_TEST_CHURN"); dir != "" {
		churnPlane(t, dir)
		return
	}
	needRootForDevices(t)
	dir := t.TempDir()
	random := rand.New(rand.NewPCG(1, uint64(os.Getpid())))
	for range 12 {
		child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$")
		child.Env = append(os.Environ(), "SIMULATOR_TEST_CHURN="+dir)
		out, err := child.StdoutPipe()
		need(t, err)
		need(t, child.Start())
		// So many steps, and a little more.
		_, err = io.ReadFull(out, make([]byte, 1+random.IntN(12)))
		if err != nil {
			t.Fatalf("the child ended by itself: %v", err)
		}
		need(t, pause(t.Context(), time.Duration(random.IntN(3000))*time.Microsecond))
		need(t, child.Process.Kill())
		_ = child.Wait() // It was killed; that is no news.
	}
	p := newPlaneIn(t, dir)
	need(t, p.reconcile(t.Context(), nil, nil, nil))
	if left := devicesOf(t, p); len(left) != 0 {
		t.Errorf("devices are left: %+v", left)
	}
	for _, sub := range []string{"disks", "snapshots", "guests", "frozen"} {
		entries, err := os.ReadDir(filepath.Join(dir, sub))
		if err != nil || len(entries) != 0 {
			t.Errorf("%s has %v, %v", sub, entries, err)
		}
	}
}

// churnPlane lives the lives of disks, each after a reconcile that knows of none, until it is
// killed.
func churnPlane(t *testing.T, dir string) {
	p, err := openPlane(dir, slog.New(slog.DiscardHandler))
	need(t, err)
	need(t, p.reconcile(t.Context(), nil, nil, nil))
	for {
		id := newGuest(t, p)
		spec := newDisk(t, p, id, "churned")
		snapshot, clone := newID(), newID()
		for _, step := range []func() error{
			func() error { return p.plug(spec, deviceFault{}) },
			func() error { return os.WriteFile(nodeOf(t, p, id), make([]byte, 1<<20), 0) },
			func() error { return p.snapshotDisk(t.Context(), snapshot, spec.DiskID) },
			func() error { return p.unplug(id, spec.DiskID) },
			func() error {
				return p.cloneDisk(t.Context(), clone, p.snapshotPath(snapshot), testDiskSize)
			},
			func() error { return p.removeDisk(spec.DiskID) },
			func() error { return p.removeDisk(clone) },
			func() error { return p.removeSnapshot(snapshot) },
			func() error { return p.removeGuest(id) },
		} {
			need(t, step())
			_, err := fmt.Print(".")
			need(t, err)
		}
	}
}
