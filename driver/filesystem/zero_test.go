//go:build linux

package filesystem

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"go.uber.org/goleak"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestTheLowestUnexpectedByteIsFound(t *testing.T) {
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

func (z zeroDisk) sectorsRead(t *testing.T) int64 {
	t.Helper()
	<-time.After(10 * time.Millisecond) // the kernel counts a read shortly after its end
	stat := csitest.Got(os.ReadFile(filepath.Join("/sys/block", filepath.Base(z.Loop), "stat")))(t)
	n := csitest.Got(strconv.ParseInt(strings.Fields(string(stat))[2], 10, 64))(t)
	return n
}

func (z zeroDisk) reads(t *testing.T, act func()) int64 {
	t.Helper()
	before := z.sectorsRead(t)
	act()
	return (z.sectorsRead(t) - before) * 512
}

func (z zeroDisk) proven(t *testing.T) int64 {
	t.Helper()
	return z.reads(t, func() { csitest.Must(t, z.prove(t.Context(), t)) })
}

func TestTheProofThatADiskIsBlankReadsTheDiskOnce(t *testing.T) {
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
			open := csitest.Got(os.Open(z.Loop))(t) // so that the next Close does not write the cache
			t.Cleanup(func() { _ = open.Close() })
			f := csitest.Got(os.OpenFile(z.Loop, os.O_WRONLY, 0))(t)
			csitest.Must(t, csitest.Err(f.WriteAt(make([]byte, 512), size/2)))
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
	t.Run("a disk that is not blank is refused again, and not read again", func(t *testing.T) {
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

// Without counters, only the call that began a scan may use its result: this call kept the lock.
func TestWithoutIOCountersOnlyTheCallThatBeganAScanTrustsIt(t *testing.T) {
	d := disk{openDisk(t, mib)}
	csitest.Must(t, csitest.Err(d.Read(0, mib)))
	job := &zeroScan{found: -1, before: csitest.Got(d.Counters())(t)}
	for _, joined := range []bool{false, true} {
		if again, err := d.judgeScan(job, joined, false); again != joined || err != nil {
			t.Errorf("joined is %t, again is %t, %v", joined, again, err)
		}
	}
	job.err = context.Canceled
	if _, err := d.judgeScan(job, false, false); !csierr.Has(err, csierr.DiskProofPending) {
		t.Errorf("a read that Close has ended: %v", err)
	}
}

func TestTheReadThatProvesADiskBlankContinuesAfterItsCallerReturns(t *testing.T) {
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

func TestScannedRegionsIncludeTheDisksStartEndAndRecords(t *testing.T) {
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
			// On disks of 128 MiB and more, markerRegions need not contain the middle.
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

func TestEverySuperblockCopyIsInAScannedRegion(t *testing.T) {
	type format struct {
		size, block int64 // block is 0 for an xfs
		options     string
	}
	var exts, xfses []format
	for _, size := range []int64{64 * mib, gib, 3*gib + 8*mib, 10 * gib} {
		for _, block := range []int64{1024, 2048, 4096, 65536} {
			for _, features := range []string{"sparse_super", "sparse_super2", "meta_bg,^resize_inode"} {
				exts = append(exts, format{size, block, fmt.Sprint("-b ", block, " -O ", features)})
			}
		}
		for i, options := range []string{"", "-d agcount=8", "-b size=1024", "-d agcount=16"} {
			if size >= 3*gib || size == gib && i < 3 { // 16 smaller groups have no room for a log
				xfses = append(xfses, format{size: size, options: options})
			}
		}
	}
	for _, c := range append(short.Some(t, 8, exts), short.Some(t, 3, xfses)...) {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			file := guesttest.New(t).Sparse(c.size)
			mkfs, show, pattern := "mke2fs -q -F -t ext4 ", []string{"dumpe2fs"}, `superblock at (\d+)`
			if c.block == 0 {
				mkfs, pattern = "mkfs.xfs -q ", ` = (\d+)`
				show = []string{"xfs_db", "-r", "-c", "sb 0", "-c", "p agcount agblocks blocksize"}
			}
			made := append(strings.Fields(mkfs+c.options), file)
			guesttest.Run(t, made[0], made[1:]...)
			var copies []int64
			for _, m := range regexp.MustCompile(pattern).FindAllStringSubmatch(guesttest.Run(t, show[0],
				append(show[1:], file)...), -1) {
				copies = append(copies, csitest.Got(strconv.ParseInt(m[1], 10, 64))(t)*max(c.block, 1))
			}
			if c.block == 0 {
				groups, bytes := copies[0], copies[1]*copies[2]
				for copies = nil; groups > 0; groups-- {
					copies = append(copies, (groups-1)*bytes)
				}
			}
			if len(copies) == 0 || len(copies) == 1 && c.size > 8*c.block*c.block {
				t.Error("it has no copies")
			}
			for _, at := range copies {
				if !covered(markerRegions(c.size), at) {
					t.Errorf("the superblock at %d is not read", at)
				}
			}
		})
	}
}

// driverOf is an environment variable. A child process that has it acts as the driver.
const driverOf = "TEST_DRIVER_OF"

func TestDriverDeathKillsToolsButNotRepairs(t *testing.T) {
	run := map[string]func([]*os.File, string, ...string) (toolResult, error){"mkfs": runTool,
		"repair": runRepair}[os.Getenv(driverOf)]
	if run != nil {
		_, err := run([]*os.File{os.NewFile(3, "out")}, "sh", "-c", "exec >&3; echo $$; exec sleep 1000")
		t.Fatal("the program ended: ", err)
	}
	for _, c := range []struct {
		kind string
		dies bool
	}{{"mkfs", true}, {"repair", false}} {
		t.Run("the driver is killed during a "+c.kind, func(t *testing.T) {
			r, w, err := os.Pipe()
			csitest.Must(t, err)
			driver := exec.Command(os.Args[0], "-test.run=^TestDriverDeathKillsToolsButNotRepairs$")
			driver.Env = append(os.Environ(), driverOf+"="+c.kind)
			driver.ExtraFiles = []*os.File{w}
			csitest.Must(t, driver.Start())
			csitest.Must(t, w.Close())
			line := csitest.Got(bufio.NewReader(r).ReadString('\n'))(t)
			pid := csitest.Got(strconv.Atoi(strings.TrimSpace(line)))(t)
			t.Cleanup(func() { _ = syscall.Kill(pid, syscall.SIGKILL) })
			csitest.Must(t, driver.Process.Kill())
			_ = driver.Wait()
			if c.dies {
				csitest.Await(t, "it has ended", func() bool { return !alive(pid) })
			} else if !alive(pid) {
				t.Fatal("it died")
			}
		})
	}
}

func alive(pid int) bool {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return false
	}
	_, rest, _ := strings.Cut(string(b), ") ")
	return !strings.HasPrefix(rest, "Z") && !strings.HasPrefix(rest, "X")
}

func TestTheOutputAndExitCodeOfAProgramAreReturned(t *testing.T) {
	result, err := runTool(nil, "sh", "-c", "echo out; echo err >&2; exit 3")
	csitest.Must(t, err)
	if result != (toolResult{Exit: 3, Stdout: "out\n", Stderr: "err\n"}) {
		t.Fatalf("%+v", result)
	}
	if _, err := runTool(nil, "sh", "-c", "kill -9 $$"); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Fatalf("a killed program: %v", err)
	}
	if _, err := runTool(nil, "no-such-program"); !csierr.Has(err, csierr.NodeToolFailed) {
		t.Fatalf("a missing program: %v", err)
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }

func openDisk(tb testing.TB, sizeBytes int64, options ...guesttest.Option) *blockdev.OpenDevice {
	tb.Helper()
	g := guesttest.New(tb)
	attached := g.Attach(guesttest.Serial, sizeBytes, options...)
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found := csitest.Got(host.Lookup(attached.Serial))(tb)
	d := csitest.Got(host.Open(found))(tb)
	tb.Cleanup(func() { csitest.Must(tb, d.Close()) })
	return d
}

func openLocked(ctx context.Context, t *testing.T, g *guesttest.Guest) *blockdev.OpenDevice {
	t.Helper()
	host := blockdev.Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found := csitest.Got(host.Lookup(guesttest.Serial))(t)
	d := csitest.Got(host.OpenLocked(ctx, found, false))(t)
	return d
}

func imageTools(t *testing.T) []string {
	t.Helper()
	b := csitest.Got(os.ReadFile("../../Dockerfile"))(t)
	found := regexp.MustCompile(`(?m)^ARG TOOLS="([^"]+)"$`).FindSubmatch(b)
	if found == nil {
		t.Fatal(`Dockerfile has no line ARG TOOLS="…"`)
	}
	return strings.Fields(string(found[1]))
}

func TestDockerfileListsTheProgramsThatTheNodeRuns(t *testing.T) {
	got, want := imageTools(t), slices.Clone(Tools)
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("the Dockerfile's TOOLS are %v, but Tools are %v", got, want)
	}
	paths := csitest.Got(filepath.Glob("*.go"))(t)
	var run []string
	for _, path := range paths {
		source := csitest.Got(os.ReadFile(path))(t)
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		for _, found := range programRun.FindAllSubmatch(source, -1) {
			run = append(run, string(found[1]))
		}
	}
	for _, fsType := range volume.Filesystems {
		name, _, err := mkfsCommand(Volume{FSType: fsType})
		csitest.Must(t, err)
		run = append(run, name)
	}
	slices.Sort(run)
	if run = slices.Compact(run); !slices.Equal(run, want) {
		t.Errorf("the source runs %v, but Tools are %v", run, want)
	}
}

// programRun matches a call that runs a program, and the program's name if that is a literal.
var programRun = regexp.MustCompile(`(?:runTool|runRepair|Command|Context)\([^"()]*"([^"]+)"`)

// The node's image contains only the files that tools/node-root copies. The test runs each program
// with such a copy as its root directory.
func TestToolsNeedOnlyTheFilesOfTheNodeImage(t *testing.T) {
	root, wanted := filepath.Join(t.TempDir(), "root"), imageTools(t)
	out, err := exec.CommandContext(t.Context(), "../../tools/node-root",
		append([]string{root}, wanted...)...).CombinedOutput()
	if err != nil {
		t.Fatalf("node-root: %v\n%s", err, out)
	}
	// A container has /proc, of which the programs read only /proc/mounts.
	mounts := csitest.Got(os.ReadFile("/proc/mounts"))(t)
	csitest.Must(t, os.MkdirAll(filepath.Join(root, "proc/self"), 0o700))
	csitest.Must(t, os.WriteFile(filepath.Join(root, "proc/self/mounts"), mounts, 0o600))
	csitest.Must(t, os.Symlink("self/mounts", filepath.Join(root, "proc/mounts")))
	for _, disk := range []string{"ext4", "xfs", "btrfs"} {
		csitest.Must(t, os.WriteFile(filepath.Join(root, disk), nil, 0o600))
		csitest.Must(t, os.Truncate(filepath.Join(root, disk), 512<<20))
	}
	for _, line := range []string{
		"mke2fs -q -t ext4 -E nodiscard -m 0 /ext4", "e2fsck -f -n /ext4", "resize2fs /ext4",
		"mkfs.xfs -q -K /xfs",
		"mkfs.btrfs -q -K /btrfs", "btrfs check --readonly /btrfs",
		"blkid -p -o export /ext4", "blkid -p -o export /xfs", "blkid -p -o export /btrfs",
	} {
		words := strings.Fields(line)
		found, err := filepath.Glob(filepath.Join(root, "usr/*bin", words[0]))
		if err != nil || len(found) == 0 {
			t.Fatalf("%s is not in %s: %v", words[0], root, err)
		}
		cmd := exec.CommandContext(t.Context(), strings.TrimPrefix(found[0], root), words[1:]...)
		cmd.Dir, cmd.Env = "/", []string{"PATH=/usr/sbin:/usr/bin"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: root}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Errorf("%s: %v\n%s", line, err, out)
		}
		if disk := words[len(words)-1][1:]; words[0] == "blkid" &&
			!strings.Contains(string(out), "TYPE="+disk+"\n") {
			t.Errorf("%s does not find it:\n%s", line, out)
		}
	}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		library := strings.Contains(path, "/lib")
		if err == nil && info.Mode()&0o111 != 0 && !library && !slices.Contains(wanted, d.Name()) {
			t.Errorf("%s is in the image", strings.TrimPrefix(path, root))
		}
		return err
	})
	csitest.Must(t, err)
}
