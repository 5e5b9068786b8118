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
	"slices"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

const mib = 1 << 20

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// serve returns a disk of 8 MiB, and its loop device opened without the kernel's cache.
func serve(t *testing.T) (*flakydisk.Disk, *os.File) {
	t.Helper()
	dir := t.TempDir()
	server, err := flakydisk.Mount(dir)
	must(t, err)
	disk := flakydisk.NewDisk(flakydisk.NewImage(8 * mib))
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{Path: server.Put("disk", disk),
		Serial: t.Name()[:20]})
	if err != nil {
		t.Fatal(errors.Join(err, server.Close()))
	}
	device, err := os.OpenFile(loop.Path, os.O_RDWR|unix.O_DIRECT, 0)
	must(t, err)
	disk.StartLog(false) // the kernel flushes a file when it attaches a device to it
	t.Cleanup(func() {
		disk.Heal()
		must(t, errors.Join(device.Close(), loop.Detach(context.Background()), server.Close()))
	})
	return disk, device
}

func aligned(t *testing.T, n int, fill byte) []byte {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_ANON|unix.MAP_PRIVATE)
	must(t, err)
	t.Cleanup(func() { _ = unix.Munmap(b) })
	copy(b, bytes.Repeat([]byte{fill}, n))
	return b
}

func write(t *testing.T, device *os.File, offset int64, fill byte) {
	t.Helper()
	_, err := device.WriteAt(aligned(t, 4096, fill), offset)
	must(t, err)
}

func TestTheLogContainsEveryWriteDiscardAndFlushInOrder(t *testing.T) {
	disk, device := serve(t)
	write(t, device, 4096, 'a')
	disk.Note("between")
	must(t, device.Sync())
	must(t, unix.IoctlSetInt(int(device.Fd()), unix.BLKFLSBUF, 0))
	span := [2]uint64{mib, 64 << 10} // an offset and a length
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKDISCARD,
		uintptr(unsafe.Pointer(&span))); errno != 0 {
		t.Fatal(errno)
	}
	var got []flakydisk.Kind
	for _, r := range disk.Log() {
		got = append(got, r.Kind)
	}
	want := []flakydisk.Kind{flakydisk.Write, flakydisk.Note, flakydisk.Flush, flakydisk.Discard}
	if !slices.Equal(got, want) {
		t.Fatalf("the log has the kinds %v, want %v", got, want)
	}
	if r := disk.Log()[0]; r.Offset != 4096 || !bytes.Equal(r.Data, bytes.Repeat([]byte("a"), 4096)) {
		t.Errorf("the first entry is of %d bytes at %d, want 4096 at 4096", len(r.Data), r.Offset)
	}
	if r := disk.Log()[3]; r.Offset != mib || r.Bytes != 64<<10 {
		t.Errorf("the discard is of %d bytes at %d, want %d at %d", r.Bytes, r.Offset, 64<<10, mib)
	}
}

func TestReplayKeepsFlushedDataAndApplyAddsPieces(t *testing.T) {
	disk, device := serve(t)
	write(t, device, 0, 'a')
	must(t, device.Sync())
	write(t, device, 0, 'b')
	write(t, device, 8192, 'c')
	epochs, err := flakydisk.Replay(flakydisk.NewImage(8*mib), disk.Log())
	if err != nil || len(epochs) != 2 {
		t.Fatalf("Replay = %d epochs, %v, want 2", len(epochs), err)
	}
	last := epochs[1]
	lost := disk.Log()[last.First:last.End]
	torn := last.Durable.Fork()
	must(t, flakydisk.Apply(torn, flakydisk.Piece{Entry: lost[0], From: 1, To: 3}))
	got := make([]byte, 12288)
	_, err = torn.ReadAt(got, 0)
	must(t, err)
	want := bytes.Repeat([]byte("a"), 4096)
	copy(want[512:], bytes.Repeat([]byte("b"), 1024))
	want = append(want, make([]byte, 8192)...)
	if !bytes.Equal(got, want) {
		t.Error("the image is not the flushed bytes with two sectors of the later write")
	}
	if torn.Sum() == last.Durable.Sum() {
		t.Error("images that differ have the same sum")
	}
	whole, again := last.Durable.Fork(), last.Durable.Fork()
	err = errors.Join(
		flakydisk.Apply(whole, flakydisk.Whole(lost[0]), flakydisk.Whole(lost[1])),
		flakydisk.Apply(again, flakydisk.Whole(lost[1]), flakydisk.Whole(lost[0])))
	if err != nil || whole.Sum() != again.Sum() {
		t.Errorf("images of the same content have the sums %x and %x, %v", whole.Sum(), again.Sum(),
			err)
	}
}

func TestAFaultMakesOnlyItsOwnSectorsFail(t *testing.T) {
	disk, device := serve(t)
	fired := disk.AddFault(flakydisk.Fault{On: flakydisk.OnRead, From: 8192, To: 8704, Times: 1})
	b := aligned(t, 4096, 0)
	if _, err := device.ReadAt(b, 4096); err != nil {
		t.Errorf("a read beside the sector = %v", err)
	}
	if _, err := device.ReadAt(b, 8192); !errors.Is(err, unix.EIO) {
		t.Errorf("a read of the sector = %v, want EIO", err)
	}
	if _, err := device.ReadAt(b, 8192); err != nil || fired() != 1 {
		t.Errorf("a second read = %v after %d faults, want it to succeed after 1", err, fired())
	}
	disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite, From: 0, To: 512})
	for range 2 {
		if _, err := device.WriteAt(b, 0); !errors.Is(err, unix.EIO) {
			t.Errorf("a write to the sector = %v, want EIO", err)
		}
	}
	disk.Heal()
	write(t, device, 0, 'x')
	disk.AddFault(flakydisk.Fault{On: flakydisk.OnFlush, Times: 1})
	if err := device.Sync(); !errors.Is(err, unix.EIO) {
		t.Errorf("a flush = %v, want EIO", err)
	}
	if err := device.Sync(); err != nil {
		t.Errorf("a second flush = %v, want it to succeed", err)
	}
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
	server, err := flakydisk.Mount(dir)
	must(t, err)
	t.Cleanup(func() { must(t, server.Close()) })
	disk := flakydisk.NewDisk(flakydisk.NewImage(8 * mib))
	kept := weak.Make(disk)
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{Path: server.Put("disk", disk),
		Serial: t.Name()[:20]})
	must(t, err)
	must(t, loop.Detach(t.Context()))
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
	must(t, os.Mkdir(dir, 0o700))
	server := exec.Command(os.Args[0])
	server.Env, server.Stderr = append(os.Environ(), stuckAt+"="+dir), os.Stderr
	out, err := server.StdoutPipe()
	must(t, errors.Join(err, server.Start()))
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
	must(t, server.Process.Kill())
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
