//go:build linux

package filesystem

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestFindUnexpected(t *testing.T) {
	const size = 9*chunkBytes + 512
	for _, c := range []struct {
		name     string
		dirty    []int64
		from, to int64
		want     int64
	}{
		{"nothing", nil, 0, size, -1},
		{"the first byte", []int64{0}, 0, size, 0},
		{"the last byte of a disk of whole sectors", []int64{size - 1}, 0, size, size - 1},
		{"the end of a chunk", []int64{chunkBytes - 1}, 0, size, chunkBytes - 1},
		{"the start of a chunk", []int64{8 * chunkBytes}, 0, size, 8 * chunkBytes},
		{"the lower of two in one chunk", []int64{5000, 70_000}, 0, size, 5000},
		{"the lower of two in neighbouring chunks", []int64{chunkBytes + 9, 2 * chunkBytes}, 0, size,
			chunkBytes + 9},
		{"only the byte right before the range", []int64{1023}, 1024, size, -1},
		{"the first of a range that begins within a sector", []int64{1023, 1024}, 1024, size, 1024},
		{"only the byte right behind the range", []int64{5000}, 1024, 5000, -1},
		{"the last of a range that ends within a sector", []int64{4999}, 1024, 5000, 4999},
		{"nothing in an empty range", []int64{0}, 0, 0, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := openDisk(t, size)
			for _, offset := range c.dirty {
				(&guesttest.Disk{Loop: d.Path}).WriteAt(t, offset, []byte{1})
			}
			var read atomic.Int64
			got, err := findUnexpected(t.Context(), d, c.from, c.to, traces{}.check,
				func(n int64) { read.Add(n) })
			if csitest.Must(t, err); got != c.want {
				t.Fatalf("found %d, want %d", got, c.want)
			}
			if c.want < 0 && read.Load() != c.to-c.from {
				t.Errorf("progress of %d bytes, want %d", read.Load(), c.to-c.from)
			}
		})
	}
	t.Run("a range beyond the disk is an error", func(t *testing.T) {
		if _, err := findUnexpected(t.Context(), openDisk(t, guesttest.MiB), 0, 2*guesttest.MiB,
			traces{}.check, nil); err == nil {
			t.Fatal("no error")
		}
	})
	t.Run("a canceled context ends it", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := findUnexpected(ctx, openDisk(t, guesttest.GiB), 0, guesttest.GiB, traces{}.check,
			func(int64) { cancel() })
		if !errors.Is(err, context.Canceled) {
			t.Fatalf("got %v", err)
		}
	})
	t.Run("a panic in a reader is raised in the caller, and all readers end", func(t *testing.T) {
		before := goleak.IgnoreCurrent()
		defer func() {
			raised, ok := recover().(*async.RaisedPanic)
			if !ok || raised.Value != "a bug" {
				t.Errorf("raised %v", raised)
			}
			goleak.VerifyNone(t, before)
		}()
		_, err := findUnexpected(t.Context(), openDisk(t, guesttest.GiB), 0, guesttest.GiB,
			traces{}.check, func(int64) { panic("a bug") })
		t.Errorf("got %v", err)
	})
}

type zeroDisk struct {
	*guesttest.Disk
	guest *guesttest.Guest
	scans *ZeroScans
	log   *bytes.Buffer
}

// zeroVolume is random, because mkfs.btrfs refuses the UUID of any other disk of the machine.
var zeroVolume = uuid.NewString()

func newZeroDisk(t *testing.T, sizeBytes int64) zeroDisk {
	t.Helper()
	before := goleak.IgnoreCurrent()
	g := guesttest.New(t)
	z := zeroDisk{g.Attach(guesttest.Serial, sizeBytes), g, &ZeroScans{}, &bytes.Buffer{}}
	t.Cleanup(func() {
		z.scans.Close()
		goleak.VerifyNone(t, before)
	})
	return z
}

func (z zeroDisk) prove(ctx context.Context, t *testing.T) error {
	t.Helper()
	h := openLocked(ctx, t, z.guest)
	defer func() { csitest.Must(t, h.Close()) }()
	p := Preparation{Device: h, Volume: Volume{ID: zeroVolume}, Scans: z.scans,
		Log: slog.New(slog.NewTextHandler(z.log, nil))}
	_, err := p.proveRange(ctx, 0, h.SizeBytes, expected{})
	return csierr.Convert(err, csierr.NodeToolFailed)
}

// sectorsRead returns how many sectors of 512 bytes were read since the disk was attached.
func (z zeroDisk) sectorsRead(t *testing.T) int64 {
	t.Helper()
	<-time.After(10 * time.Millisecond) // the kernel counts a read shortly after its end
	stat, err := os.ReadFile(filepath.Join("/sys/block", filepath.Base(z.Loop), "stat"))
	csitest.Must(t, err)
	n, err := strconv.ParseInt(strings.Fields(string(stat))[2], 10, 64)
	csitest.Must(t, err)
	return n
}

func (z zeroDisk) reads(t *testing.T, act func()) int64 {
	t.Helper()
	before := z.sectorsRead(t)
	act()
	return (z.sectorsRead(t) - before) * 512
}

func TestProveZeroReadsADiskOnce(t *testing.T) {
	const size = 64 * guesttest.MiB
	t.Run("and the next call accepts the result", func(t *testing.T) {
		z := newZeroDisk(t, size)
		if n := z.reads(t, func() { csitest.Must(t, z.prove(t.Context(), t)) }); n < size {
			t.Errorf("%d bytes were read of %d", n, size)
		}
		if n := z.reads(t, func() { csitest.Must(t, z.prove(t.Context(), t)) }); n > guesttest.MiB {
			t.Errorf("%d bytes were read again", n)
		}
	})
	for name, between := range map[string]func(t *testing.T, z zeroDisk){
		"something was written": func(t *testing.T, z zeroDisk) {
			z.WriteAt(t, 0, make([]byte, 512))
		},
		"something was written and is still in the kernel's cache": func(t *testing.T, z zeroDisk) {
			open, err := os.Open(z.Loop) // the last close of a device writes its cache
			csitest.Must(t, err)
			t.Cleanup(func() { _ = open.Close() })
			f, err := os.OpenFile(z.Loop, os.O_WRONLY, 0)
			csitest.Must(t, err)
			_, err = f.WriteAt(make([]byte, 512), size/2)
			csitest.Must(t, err)
			csitest.Must(t, f.Close())
		},
		"something was discarded": func(t *testing.T, z zeroDisk) {
			guesttest.Run(t, "blkdiscard", "--offset", "1048576", "--length", "1048576", z.Loop)
		},
		"the volume was published": func(_ *testing.T, z zeroDisk) { z.scans.Drop(zeroVolume) },
		"the disk was attached again": func(t *testing.T, z zeroDisk) {
			z.guest.Unplug(z.Disk)
			*z.Disk = *z.guest.AttachFile(guesttest.Serial, z.File)
		},
	} {
		t.Run("but again when "+name, func(t *testing.T) {
			z := newZeroDisk(t, size)
			csitest.Must(t, z.prove(t.Context(), t))
			between(t, z)
			if n := z.reads(t, func() { csitest.Must(t, z.prove(t.Context(), t)) }); n < size {
				t.Errorf("%d bytes were read of %d", n, size)
			}
		})
	}
	t.Run("and one that is not blank is refused again without another read", func(t *testing.T) {
		z := newZeroDisk(t, size)
		z.WriteAt(t, size-5000, []byte{7})
		for i := range 2 {
			var err error
			n := z.reads(t, func() { err = z.prove(t.Context(), t) })
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank, fmt.Sprint("offset ",
				size-5000))
			if i > 0 && n > guesttest.MiB {
				t.Errorf("%d bytes were read again", n)
			}
		}
		z.WriteAt(t, size-5000, []byte{0})
		csitest.Must(t, z.prove(t.Context(), t))
	})
}

func TestProveZeroGoesOnWhenItsCallerGivesUp(t *testing.T) {
	const size = 2 * guesttest.GiB
	giveUp := func(t *testing.T, z zeroDisk) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		csitest.Want(t, z.prove(ctx, t), codes.Aborted, csierr.DiskProofPending, "of 2048 MiB")
	}
	t.Run("the next call joins the read", func(t *testing.T) {
		z := newZeroDisk(t, size)
		if n := z.reads(t, func() {
			giveUp(t, z)
			giveUp(t, z)
			csitest.Must(t, z.prove(t.Context(), t))
		}); n < size || n > size+size/8 {
			t.Errorf("%d bytes were read of %d", n, int64(size))
		}
		if log := z.log.String(); strings.Count(log, "the disk is blank") != 1 {
			t.Errorf("the log is %s", log)
		}
	})
	t.Run("data written during the read is found", func(t *testing.T) {
		z := newZeroDisk(t, size)
		giveUp(t, z)
		z.WriteAt(t, 0, []byte{1}) // in a chunk that was already read
		csitest.Want(t, z.prove(t.Context(), t), codes.FailedPrecondition, csierr.DiskNotBlank)
	})
	t.Run("the read ends with the driver, and waiting calls return", func(t *testing.T) {
		z := newZeroDisk(t, size)
		giveUp(t, z)
		waiting := async.Start(func() (struct{}, error) { return struct{}{}, z.prove(t.Context(), t) })
		z.scans.Close()
		_, err := waiting()
		csitest.Want(t, err, codes.Aborted, csierr.DiskProofPending)
		csitest.Want(t, z.prove(t.Context(), t), codes.Aborted, csierr.DiskProofPending)
	})
	t.Run("the read ends when the disk is detached", func(t *testing.T) {
		z := newZeroDisk(t, 64*guesttest.GiB)
		giveUp := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			return z.prove(ctx, t)
		}
		csitest.Want(t, giveUp(), codes.Aborted, csierr.DiskProofPending)
		z.guest.Unplug(z.Disk)
		for _, job := range z.scans.jobs {
			<-job.done
			if !csierr.Has(job.err, csierr.DeviceNotFound) {
				t.Errorf("it ended with %v", job.err)
			}
		}
		z.guest.Plug(z.Disk)
	})
}
