//go:build linux

package blockdev

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// openDisk attaches a disk and opens its device.
func openDisk(t *testing.T, size int64) (*guesttest.Disk, *OpenDevice) {
	t.Helper()
	g := guesttest.New(t)
	d := g.Attach("csi-0123456789abcdef", size)
	host := Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found, err := host.Lookup(d.Serial)
	csitest.Must(t, err)
	device, err := host.Open(found)
	csitest.Must(t, err)
	t.Cleanup(func() { _ = device.Close() })
	return d, device
}

// A read goes on when its call ends, and the device's path may be another disk's by then.
func TestAReopenedDeviceNeedsNeitherItsPathNorTheFirst(t *testing.T) {
	d, device := openDisk(t, guesttest.MiB)
	d.WriteAt(t, 0, []byte("the disk that was opened"))
	csitest.Must(t, os.Remove(device.Path))
	again, err := device.Reopen()
	csitest.Must(t, err)
	defer func() { _ = again.Close() }()
	csitest.Must(t, device.Close())
	if b, err := again.Read(0, 512); err != nil || b[0] != 't' {
		t.Errorf("read %q, %v", b, err)
	}
}

// A child has a copy of every descriptor between fork and exec, and a process that looks at one in
// /proc keeps its file open. So a device could stay in use after an exclusive use of it: for the
// mkfs that follows, for example.
func TestNoOtherProcessKeepsTheDeviceInUse(t *testing.T) {
	_, device := openDisk(t, 64*guesttest.MiB)
	over := make(chan struct{})
	var others sync.WaitGroup
	repeat := func(act func()) {
		others.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					act()
				}
			}
		})
	}
	for range 4 {
		repeat(func() { _ = exec.Command("true").Run() })
	}
	repeat(func() {
		files, _ := filepath.Glob("/proc/self/fd/*")
		for _, f := range files {
			_, _ = os.Readlink(f)
		}
	})
	defer others.Wait()
	defer close(over)
	for n, end := 0, time.Now().Add(2*time.Second); time.Now().Before(end); n++ {
		if err := device.TryExclusive(); err != nil {
			t.Fatalf("number %d: %v", n, err)
		}
		err := device.WithExclusive(func(*os.File) error {
			if err := device.TryExclusive(); !csierr.Has(err, csierr.DeviceHeld) {
				t.Errorf("number %d, while it is used exclusively: %v", n, err)
			}
			return nil
		})
		if err != nil {
			t.Fatalf("number %d: %v", n, err)
		}
	}
}

func TestALoopDeviceThatDoesNotAnswerKeepsOnlyDisksThatWorkloadsMayUse(t *testing.T) {
	disk, d := openDisk(t, 8*guesttest.MiB)
	loop := strings.TrimSpace(guesttest.Run(t, "losetup", "--find", "--show", disk.Copy(t)))
	defer guesttest.Run(t, "losetup", "--detach", loop)
	name := filepath.Base(loop)
	answered := make(chan struct{})
	if async.Within(loop, 0, func() { <-answered }) { // the kernel waits
		t.Fatal("it is answered")
	}
	if err := d.CheckLoops(); err != nil {
		t.Errorf("a disk of which no workload has a node: %v", err)
	}
	d.Shared = true
	err := d.CheckLoops()
	if !csierr.Has(err, csierr.DeviceHeld) || !strings.Contains(err.Error(), name) {
		t.Errorf("the loop device may be over the disk: %v", err)
	}
	close(answered)
	csitest.Await(t, "it is over another file", func() bool { return d.CheckLoops() == nil })
}
