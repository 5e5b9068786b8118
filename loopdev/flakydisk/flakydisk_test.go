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
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
)

const mib = 1 << 20

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

func TestReplayKeepsFlushedDataAndApplyAddsLaterWrites(t *testing.T) {
	disk, device := serve(t)
	disk.StartLog(false) // only now, because attaching the device flushed the file
	looptest.Got(device.WriteAt(aligned(t, 4096, 'a'), 0))(t)
	looptest.Got(device.WriteAt(aligned(t, 4096, 'a'), mib))(t)
	looptest.Must(t, device.Sync())
	looptest.Got(device.WriteAt(aligned(t, 4096, 'b'), 0))(t)
	span := [2]uint64{mib, 64 << 10} // an offset and a length
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, device.Fd(), unix.BLKDISCARD,
		uintptr(unsafe.Pointer(&span))); errno != 0 {
		t.Fatal(errno)
	}
	epochs := looptest.Got(flakydisk.Replay(flakydisk.NewImage(8*mib), disk.Log()))(t)
	if len(epochs) != 2 || epochs[1].End-epochs[1].First != 2 {
		t.Fatalf("Replay = %+v, want two epochs, the last one with two entries", epochs)
	}
	durable, lost := epochs[1].Durable, disk.Log()[epochs[1].First:]
	torn, whole, again := durable.Fork(), durable.Fork(), durable.Fork()
	looptest.Must(t, errors.Join(
		flakydisk.Apply(torn, flakydisk.Piece{Entry: lost[0], From: 1, To: 3},
			flakydisk.Piece{Entry: lost[1], From: 0, To: 1}),
		flakydisk.Apply(whole, flakydisk.Whole(lost[0]), flakydisk.Whole(lost[1])),
		flakydisk.Apply(again, flakydisk.Whole(lost[1]), flakydisk.Whole(lost[0]))))
	sectors := func(n int, fill byte) []byte {
		return bytes.Repeat([]byte{fill}, n*flakydisk.SectorBytes)
	}
	for offset, want := range map[int64][]byte{
		0:   slices.Concat(sectors(1, 'a'), sectors(2, 'b'), sectors(5, 'a')),
		mib: slices.Concat(sectors(1, 0), sectors(7, 'a')),
	} {
		got := make([]byte, len(want))
		if looptest.Got(torn.ReadAt(got, offset))(t); !bytes.Equal(got, want) {
			t.Errorf("at %d the image is not the flushed bytes with some sectors of the later ones", offset)
		}
	}
	if torn.Sum() == durable.Sum() || whole.Sum() != again.Sum() {
		t.Errorf("images that differ have the sums %x and %x, and equal ones %x and %x", torn.Sum(),
			durable.Sum(), whole.Sum(), again.Sum())
	}
}

func TestAFaultMakesOnlyItsOwnSectorsFail(t *testing.T) {
	disk, b := flakydisk.NewDisk(flakydisk.NewImage(8*mib)), make([]byte, 512)
	fired := disk.AddFault(flakydisk.Fault{On: flakydisk.OnRead, From: 8192, To: 8704, Times: 1})
	disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite, From: 8192, To: 8704})
	read := func(offset int64) error { _, err := disk.ReadAt(b, offset); return err }
	write := func(offset int64) error { _, err := disk.WriteAt(b, offset); return err }
	for n, step := range []struct{ got, want error }{
		{read(7680), nil}, {read(8704), nil}, {read(8192), unix.EIO}, {read(8192), nil},
		{write(7680), nil}, {write(8704), nil}, {write(8192), unix.EIO}, {write(8192), unix.EIO},
		{disk.Flush(), nil},
	} {
		if !errors.Is(step.got, step.want) {
			t.Errorf("step %d: got %v, want %v", n, step.got, step.want)
		}
	}
	if fired() != 1 {
		t.Errorf("the fault of one read fired %d times", fired())
	}
}

// The kernel must not split the write: if the server refuses the second part of a split write, the
// kernel's loop driver reports the short write as done.
func TestAFailureAtTheEndOfALargeWriteIsReported(t *testing.T) {
	disk, device := serve(t)
	disk.AddFault(flakydisk.Fault{On: flakydisk.OnWrite, From: 200 << 10, To: 200<<10 + 512})
	if n, err := device.WriteAt(aligned(t, 256<<10, 'a'), 0); !errors.Is(err, unix.EIO) {
		t.Errorf("a write of 256 KiB = %d, %v, want EIO", n, err)
	}
}

func TestAHangingWriteSucceedsAfterTheFaultIsRemoved(t *testing.T) {
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

func TestTheServerFreesTheMemoryOfARemovedDisk(t *testing.T) {
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

// stuckAt names the environment variable with the directory in which waitForItself serves a disk.
const stuckAt = "FLAKYDISK_STUCK_AT"

func TestMain(m *testing.M) {
	if dir := os.Getenv(stuckAt); dir != "" {
		fmt.Fprintln(os.Stderr, "a write to a disk that hangs has ended:", waitForItself(dir))
		os.Exit(1)
	}
	os.Exit(m.Run())
}

type stuck struct {
	*flakydisk.Image
	reached func()
}

func (s stuck) WriteAt([]byte, int64) (int, error) {
	s.reached()
	select {}
}

// waitForItself serves a disk, writes to it, and prints its loop device when the write hangs. The
// write then waits for a server in the same process, and no signal can interrupt the write.
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
			// A read of the mount table sends no request to the server, which has ended.
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
