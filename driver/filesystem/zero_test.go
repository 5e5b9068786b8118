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
	"regexp"
	"slices"
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
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func TestFindUnexpectedReturnsTheLowestOffset(t *testing.T) {
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
		if _, err := findUnexpected(t.Context(), openDisk(t, mib), 0, 2*mib,
			traces{}.check, nil); err == nil {
			t.Fatal("no error")
		}
	})
	t.Run("a canceled context ends the read", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := findUnexpected(ctx, openDisk(t, gib), 0, gib, traces{}.check, func(int64) { cancel() })
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
		_, err := findUnexpected(t.Context(), openDisk(t, gib), 0, gib,
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

// zeroVolume is random, because mkfs.btrfs refuses a UUID that another disk of the machine has.
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

// sectorsRead returns how many sectors of 512 bytes were read from the disk so far.
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

// proven proves that the disk is blank, and returns how many bytes that read.
func (z zeroDisk) proven(t *testing.T) int64 {
	t.Helper()
	return z.reads(t, func() { csitest.Must(t, z.prove(t.Context(), t)) })
}

func TestProveRangeReadsADiskOnce(t *testing.T) {
	const size = 64 * mib
	t.Run("the next call accepts the result", func(t *testing.T) {
		z := newZeroDisk(t, size)
		if n := z.proven(t); n < size {
			t.Errorf("%d bytes were read of %d", n, size)
		}
		if n := z.proven(t); n > mib {
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
		t.Run("the next call reads the disk again if "+name, func(t *testing.T) {
			z := newZeroDisk(t, size)
			z.proven(t)
			between(t, z)
			if n := z.proven(t); n < size {
				t.Errorf("%d bytes were read of %d", n, size)
			}
		})
	}
	t.Run("the second call refuses a disk that is not blank without reading it", func(t *testing.T) {
		z := newZeroDisk(t, size)
		z.WriteAt(t, size-5000, []byte{7})
		for i := range 2 {
			var err error
			n := z.reads(t, func() { err = z.prove(t.Context(), t) })
			csitest.Want(t, err, codes.FailedPrecondition, csierr.DiskNotBlank, fmt.Sprint("offset ",
				size-5000))
			if i > 0 && n > mib {
				t.Errorf("%d bytes were read again", n)
			}
		}
		z.WriteAt(t, size-5000, []byte{0})
		csitest.Must(t, z.prove(t.Context(), t))
	})
}

func TestProveRangeContinuesAfterItsCallerReturns(t *testing.T) {
	const size = 2 * gib
	giveUp := func(t *testing.T, z zeroDisk) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		csitest.Want(t, z.prove(ctx, t), codes.Aborted, csierr.DiskProofPending,
			fmt.Sprintf("of %d MiB", z.SizeBytes/mib))
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
	t.Run("Close ends the read, and waiting calls return", func(t *testing.T) {
		z := newZeroDisk(t, size)
		giveUp(t, z)
		waiting := async.Start(func() (struct{}, error) { return struct{}{}, z.prove(t.Context(), t) })
		z.scans.Close()
		_, err := waiting()
		csitest.Want(t, err, codes.Aborted, csierr.DiskProofPending)
		csitest.Want(t, z.prove(t.Context(), t), codes.Aborted, csierr.DiskProofPending)
	})
	t.Run("the read ends when the disk is detached", func(t *testing.T) {
		z := newZeroDisk(t, 64*gib)
		giveUp(t, z)
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

func covered(regions []region, offset int64) bool {
	return slices.ContainsFunc(regions, func(r region) bool {
		return r.Offset <= offset && offset < r.end()
	})
}

var testSizes = []int64{512, 64 << 10, mib, 3 * mib, 8 * mib,
	64*mib + 512, 300*mib + 4096, gib,
	3*gib + 8*mib, 10 * gib, 100*gib - 512,
	1023 * gib, 5 << 40}

func TestMarkerRegionsCoverHeadTailAndRecords(t *testing.T) {
	for _, size := range testSizes {
		regions := markerRegions(size)
		var bytes int64
		for i, r := range regions {
			bytes += r.Bytes
			last := r.end() == size
			if r.Owner == "" || r.Offset < 0 || r.Bytes <= 0 || r.end() > size ||
				r.Offset%sectorBytes != 0 || (!last && r.Bytes%sectorBytes != 0) {
				t.Errorf("size %d: region %+v", size, r)
			}
			if slices.ContainsFunc(regions[:i], func(other region) bool {
				return other.Offset <= r.Offset && r.end() <= other.end()
			}) {
				t.Errorf("size %d: region %+v is read twice", size, r)
			}
		}
		if bytes > 8*mib || len(regions) > 600 {
			t.Errorf("size %d: %d bytes in %d regions are too many", size, bytes, len(regions))
		}
		for _, offset := range []int64{0, size / 2, size - 1, min(size, mib) - 1,
			max(0, size-2*mib), max(0, size-3087*512)} {
			// markerRegions need not contain the middle: it is read for xfs only.
			if !covered(regions, offset) && (offset != size/2 || size < 128*mib) {
				t.Errorf("size %d: offset %d is not read", size, offset)
			}
		}
		for _, slot := range RecordOffsets(size) {
			if slot < 0 || slot%sectorBytes != 0 || slot+sectorBytes > size ||
				!covered(ownRegions(size), slot) {
				t.Errorf("size %d: a record at %d", size, slot)
			}
		}
		if n := len(RecordOffsets(size)); n != 3 && size >= mib {
			t.Errorf("size %d has %d offsets for records", size, n)
		}
	}
}

// The test compares markerRegions with the offsets that dumpe2fs and xfs_db print.
func TestEverySuperblockCopyIsInAMarkerRegion(t *testing.T) {
	numbers := func(t *testing.T, out, pattern string) []int64 {
		t.Helper()
		var all []int64
		for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(out, -1) {
			n, err := strconv.ParseInt(m[1], 10, 64)
			csitest.Must(t, err)
			all = append(all, n)
		}
		return all
	}
	type format struct {
		size, block int64
		features    string   // of an ext
		args        []string // of mkfs.xfs
	}
	var exts, xfses []format
	for _, size := range []int64{64 * mib, gib, 3*gib + 8*mib, 10 * gib} {
		for _, block := range []int64{1024, 2048, 4096, 65536} {
			for _, features := range []string{"sparse_super", "sparse_super2", "meta_bg,^resize_inode"} {
				exts = append(exts, format{size: size, block: block, features: features})
			}
		}
		layouts := [][]string{nil, {"-d", "agcount=8"}, {"-b", "size=1024"}, {"-d", "agcount=16"}}
		if size < 3*gib {
			layouts = layouts[:3] // with more groups there is no room for a log
		}
		for _, args := range layouts {
			if size >= 300*mib {
				xfses = append(xfses, format{size: size, args: args})
			}
		}
	}
	for _, c := range short.Some(t, 8, exts) {
		t.Run(fmt.Sprintf("ext4 with blocks of %d and %s on %d MiB", c.block, c.features,
			c.size/mib), func(t *testing.T) {
			file := guesttest.New(t).Sparse(c.size)
			guesttest.Run(t, "mke2fs", "-q", "-F", "-t", "ext4", "-b", fmt.Sprint(c.block), "-O",
				c.features, file)
			copies := numbers(t, guesttest.Run(t, "dumpe2fs", file), `Backup superblock at (\d+)`)
			for _, n := range copies {
				if !covered(markerRegions(c.size), n*c.block) {
					t.Errorf("the copy in block %d of %d bytes is not read", n, c.block)
				}
			}
			if len(copies) == 0 && c.size > 8*c.block*c.block {
				t.Error("it has no copies")
			}
		})
	}
	for _, c := range short.Some(t, 3, xfses) {
		t.Run(fmt.Sprintf("xfs on %d MiB with %q", c.size/mib, c.args), func(t *testing.T) {
			file := guesttest.New(t).Sparse(c.size)
			guesttest.Run(t, "mkfs.xfs", append(append([]string{"-q"}, c.args...), file)...)
			out := guesttest.Run(t, "xfs_db", "-r", "-c", "sb 0", "-c", "p agcount agblocks blocksize", file)
			n := numbers(t, out, ` = (\d+)`)
			for group := range n[0] {
				if !covered(markerRegions(c.size), group*n[1]*n[2]) {
					t.Errorf("the superblock of group %d of %d is not read", group, n[0])
				}
			}
		})
	}
}
