//go:build linux

package flakydisk_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"
	"time"
	"weak"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
)

const mib = 1 << 20

// serve returns a disk of 8 MiB, and its loop device opened without the kernel's cache.
func serve(t *testing.T) (*flakydisk.Disk, *os.File) {
	t.Helper()
	dir := t.TempDir()
	server := looptest.Got(flakydisk.Mount(dir))(t)
	disk := flakydisk.NewDisk(flakydisk.NewImage(8 * mib))
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{Path: server.Put("disk", disk),
		Serial: t.Name()[:20]})
	if err != nil {
		t.Fatal(errors.Join(err, server.Close()))
	}
	device := looptest.Got(os.OpenFile(loop.Path, os.O_RDWR|unix.O_DIRECT, 0))(t)
	t.Cleanup(func() {
		disk.Heal()
		looptest.Must(t, errors.Join(device.Close(), loop.Detach(context.Background()), server.Close()))
	})
	return disk, device
}

func aligned(t *testing.T, n int, fill byte) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	looptest.Must(t, err)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	copy(b, bytes.Repeat([]byte{fill}, n))
	return b
}

// If the kernel split the write and the server refused the second part, the kernel's loop driver
// would report the short write as done.
func TestAFailureAtTheEndOfALargeWriteIsReported(t *testing.T) {
	disk, device := serve(t)
	disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite, From: 200 << 10, To: 200<<10 + 512})
	if n, err := device.WriteAt(aligned(t, 256<<10, 'a'), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("a write of 256 KiB = %d, %v, want EIO", n, err)
	}
}

func TestAHangingWriteSucceedsAfterHeal(t *testing.T) {
	disk, device := serve(t)
	fired := disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite, Hang: true})
	done := make(chan error, 1)
	go func() {
		_, err := device.WriteAt(aligned(t, 4096, 'h'), 0)
		done <- err
	}()
	for end := time.Now().Add(10 * time.Second); fired() == 0 && time.Now().Before(end); {
		<-time.After(time.Millisecond)
	}
	select {
	case err := <-done:
		t.Fatalf("the write ended while the disk hung: %v", err)
	default:
	}
	disk.Heal()
	if err := <-done; err != nil {
		t.Errorf("the write = %v after the disk was healed, want it to succeed", err)
	}
}

func TestTheServerFreesARemovedDisk(t *testing.T) {
	dir := t.TempDir()
	server := looptest.Got(flakydisk.Mount(dir))(t)
	t.Cleanup(func() { looptest.Must(t, server.Close()) })
	disk := flakydisk.NewDisk(flakydisk.NewImage(8 * mib))
	kept := weak.Make(disk)
	loop := looptest.Got(loopdev.Attach(t.Context(), loopdev.Config{Path: server.Put("disk", disk),
		Serial: t.Name()[:20]}))(t)
	looptest.Must(t, loop.Detach(t.Context()))
	server.Remove("disk")
	for end := time.Now().Add(10 * time.Second); kept.Value() != nil; {
		if time.Now().After(end) {
			t.Fatal("the disk is still there")
		}
		runtime.GC()
	}
}

// stuckAt is the environment variable with the directory in which waitForItself serves its disk.
const stuckAt = "FLAKYDISK_STUCK_AT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(stuckAt); dir != "" {
		fmt.Fprintln(os.Stderr, "a write to a disk that hangs has ended:", waitForItself(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

// stuck is the store of a disk whose writes never return.
type stuck struct {
	*flakydisk.Image
	reached func()
}

// WriteAt calls reached and never returns.
func (s stuck) WriteAt([]byte, int64) (int, error) {
	s.reached()
	select {}
}

// waitForItself serves a disk, writes to it, and prints its loop device when the write hangs. From
// then on a thread of this process waits for its own server, and no signal interrupts the thread.
func waitForItself(dir string) error {
	server, err := flakydisk.Mount(dir)
	if err != nil {
		return err
	}
	var loop loopdev.Device
	content := stuck{flakydisk.NewImage(8 * mib), func() {
		_ = json.NewEncoder(os.Stdout).Encode(loop)
	}}
	loop, err = loopdev.Attach(context.Background(), loopdev.Config{
		Path: server.Put("disk", flakydisk.NewDisk(content)), Serial: "stuck"})
	if err != nil {
		return err
	}
	device, err := os.OpenFile(loop.Path, os.O_RDWR|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = device.Write([]byte("x"))
	return err
}

func TestAKilledServerLeavesNoHangingProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), `it's $(a) "directory"; `)
	looptest.Must(t, os.Mkdir(dir, 0o700))
	server := exec.Command(os.Args[0])
	server.Env, server.Stderr = append(os.Environ(), stuckAt+"="+dir), os.Stderr
	out, err := server.StdoutPipe()
	looptest.Must(t, errors.Join(err, server.Start()))
	var loop loopdev.Device
	t.Cleanup(func() {
		if t.Failed() {
			_ = unix.Unmount(dir, unix.MNT_FORCE|unix.MNT_DETACH)
			_ = loop.Detach(context.Background())
		}
	})
	if err := json.NewDecoder(out).Decode(&loop); err != nil {
		t.Fatalf("the server's disk does not get stuck: %v", err)
	}
	looptest.Must(t, server.Process.Kill())
	within(t, "the server ends", func() error {
		if err := server.Wait(); server.ProcessState.Exited() {
			return err
		}
		return nil
	})
	within(t, "its mount goes", func() error {
		for {
			// Reading the mount table sends no request to the server, which has ended.
			mounts, err := mountinfo.GetMounts(mountinfo.SingleEntryFilter(dir))
			if err != nil || len(mounts) == 0 {
				return err
			}
			<-time.After(time.Millisecond)
		}
	})
	within(t, "the loop devices are listed", func() error {
		_, err := loopdev.List()
		return err
	})
	within(t, "its device is detached", func() error { return loop.Detach(t.Context()) })
}

func within(t *testing.T, what string, do func() error) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- do() }()
	select {
	case err := <-done:
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
	case <-time.After(20 * time.Second):
		t.Fatalf("%s: not within 20 s", what)
	}
}
