//go:build linux

package blockdev

import (
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

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

// A child has a copy of every descriptor between fork and exec, so a device could stay in use after
// an exclusive open has been closed: by the mkfs of another volume, for example.
func TestNoForkedChildKeepsTheDeviceInUse(t *testing.T) {
	_, device := openDisk(t, 64*guesttest.MiB)
	over := make(chan struct{})
	var starting sync.WaitGroup
	for range 4 {
		starting.Go(func() {
			for {
				select {
				case <-over:
					return
				default:
					_ = exec.Command("true").Run()
				}
			}
		})
	}
	defer starting.Wait()
	defer close(over)
	for n, end := 0, time.Now().Add(2*time.Second); time.Now().Before(end); n++ {
		for name, open := range map[string]func() error{
			"TryExclusive": device.TryExclusive,
			"WithExclusive": func() error {
				return device.WithExclusive(func(*os.File) error { return nil })
			},
		} {
			if err := open(); err != nil {
				t.Fatalf("%s, number %d: %v", name, n, err)
			}
			if err := openExclusive(device.Path); err != nil {
				t.Fatalf("after %s, number %d: %v", name, n, err)
			}
		}
	}
}

// openExclusive opens the device exclusively and closes it, while no child can inherit the
// descriptor.
func openExclusive(path string) error {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_EXCL, 0)
	if err != nil {
		return err
	}
	return f.Close()
}

func TestADeviceWhoseOpenHangsHoldsUpNoProgramOfOtherCalls(t *testing.T) {
	path := filepath.Join(t.TempDir(), "fifo")
	csitest.Must(t, unix.Mkfifo(path, 0o600)) // an open for reading waits for a writer
	fifo, err := os.OpenFile(path, unix.O_PATH, 0)
	csitest.Must(t, err)
	device := &OpenDevice{Device: Device{Path: path}, File: fifo}
	defer func() { _ = device.Close() }()
	tried := async.Start(func() (struct{}, error) { return struct{}{}, device.TryExclusive() })
	release := sync.OnceFunc(func() { // a writer, for as long as the test runs
		w, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Error(err)
			return
		}
		t.Cleanup(func() { csitest.Must(t, w.Close()) })
	})
	defer release()
	csitest.Await(t, "the open hangs", func() bool {
		waits, err := filepath.Glob("/proc/self/task/*/wchan")
		csitest.Must(t, err)
		return slices.ContainsFunc(waits, func(path string) bool {
			at, _ := os.ReadFile(path)
			return string(at) == "wait_for_partner"
		})
	})
	ran := make(chan error, 1)
	go func() { ran <- exec.Command("true").Run() }()
	csitest.Await(t, "another call's program has run", func() bool { return len(ran) > 0 })
	csitest.Must(t, <-ran)
	release()
	_, err = tried()
	csitest.Must(t, err)
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
