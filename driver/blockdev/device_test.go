//go:build linux

package blockdev

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestHostFindsADeviceByItsSerial(t *testing.T) {
	t.Run("a device with only the serial's beginning is not found (D-35)", func(t *testing.T) {
		root := guesttest.Sysfs(t, map[string]string{"nvme0n1": "boot", "nvme5n1": "csi-0123456789abcdef",
			"nvme3n1": "csi-0123456789abcde", "vda": "-"})
		host := Host{Sysfs: root, Dev: t.TempDir()}
		all, err := host.List()
		csitest.Must(t, err)
		if len(all) != 3 {
			t.Fatalf("listed %+v", all)
		}
		// Await finds the device, and fails only because there is no device node.
		_, err = host.Await(t.Context(), "csi-0123456789abcdef", time.Millisecond)
		if err == nil || !strings.Contains(err.Error(), "nvme5n1") {
			t.Fatal(err)
		}
	})
	t.Run("the error for a missing block directory names the directory", func(t *testing.T) {
		_, err := Host{Sysfs: "/no/such/sys"}.Await(t.Context(), "x", time.Hour)
		if err == nil || !strings.Contains(err.Error(), "/no/such/sys/block") {
			t.Fatal(err)
		}
	})
}

func TestParseDiskstatsReturnsTheDevicesCounters(t *testing.T) {
	const text = "   7       0 loop0 95279 245 2672904 9264 15799 74501 20875650 36154 0 11260" +
		" 49908 28 0 9568286 1 2595 4488\n" +
		"   7       1 loop1 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17\n" +
		" 259       0 nvme0n1 1 2 3 4 5 6 7 8 9 10 11\n" +
		"   8       0 sda 1 2 x 4 5 6 7 8 9 10 11 12 13 14 15\n"
	for _, c := range []struct {
		major, minor uint32
		want         Counters
	}{
		{7, 0, Counters{ReadSectors: 2672904, WrittenSectors: 20875650, DiscardedSectors: 9568286}},
		{7, 1, Counters{ReadSectors: 3, WrittenSectors: 7, DiscardedSectors: 14}},
		{259, 0, Counters{}}, // from a kernel that does not count discards
		{8, 0, Counters{}},
		{7, 2, Counters{}},
	} {
		if got := parseDiskstats([]byte(text), c.major, c.minor); got != c.want {
			t.Errorf("%d:%d: got %+v, want %+v", c.major, c.minor, got, c.want)
		}
	}
}

func TestTheErrorForAnInvalidSysfsFileContainsTheDeviceName(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		ok         bool
	}{
		"a valid size":                {"size", "2097152\n", true},
		"a size that is no number":    {"size", "large\n", false},
		"a size that overflows":       {"size", "18446744073709551615\n", false},
		"an incomplete device number": {"dev", "259\n", false},
		"a valid diskseq":             {"diskseq", "7\n", true},
		"a diskseq that is no number": {"diskseq", "new\n", false},
	} {
		root := guesttest.Sysfs(t, map[string]string{"nvme1n1": guesttest.Serial})
		path := filepath.Join(root, "block", "nvme1n1", c.file)
		_ = os.Remove(path)
		csitest.Must(t, os.WriteFile(path, []byte(c.text), 0o444))
		all, err := Host{Sysfs: root, Dev: t.TempDir()}.List()
		if (err == nil) != c.ok || !c.ok && !strings.Contains(err.Error(), "nvme1n1") {
			t.Errorf("%s: got %+v, %v", name, all, err)
		}
		if c.ok && (len(all) != 1 || all[0].SizeBytes != guesttest.GiB) {
			t.Errorf("%s: got %+v", name, all)
		}
	}
}

// If the kernel does not count requests, all counters stay zero, and show nothing about writes.
func TestCountersAreKnownOnlyAfterACountedRead(t *testing.T) {
	if (Counters{}).Known() || !(Counters{ReadSectors: 1}).Known() {
		t.Error("Known has to be false without a counted read, and true with one")
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }

func openDisk(t *testing.T, size int64) (*guesttest.Disk, *OpenDevice) {
	t.Helper()
	g := guesttest.New(t)
	d := g.Attach("csi-0123456789abcdef", size)
	host := Host{Sysfs: g.Sys(""), Dev: g.Dev("")}
	found := csitest.Got(host.Lookup(d.Serial))(t)
	device := csitest.Got(host.Open(found))(t)
	t.Cleanup(func() { _ = device.Close() })
	return d, device
}

// A background read may outlive its call, and by then the device's path may lead to another disk.
func TestAReopenedDeviceNeedsNeitherItsPathNorTheFirstDescriptor(t *testing.T) {
	d, device := openDisk(t, guesttest.MiB)
	d.WriteAt(t, 0, []byte("the disk that was opened"))
	csitest.Must(t, os.Remove(device.Path))
	again := csitest.Got(device.Reopen())(t)
	defer func() { _ = again.Close() }()
	csitest.Must(t, device.Close())
	if b, err := again.Read(0, 512); err != nil || b[0] != 't' {
		t.Errorf("read %q, %v", b, err)
	}
}

// WithExclusive waits until no process has a copy of the descriptor: mkfs refuses a busy device.
func TestADeviceIsFreeAgainAfterItsExclusiveUse(t *testing.T) {
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

func TestCheckLoopsIgnoresAHangingLoopDeviceUnlessTheDiskIsShared(t *testing.T) {
	disk, d := openDisk(t, 8*guesttest.MiB)
	loop := strings.TrimSpace(guesttest.Run(t, "losetup", "--find", "--show", disk.Copy(t)))
	defer guesttest.Run(t, "losetup", "--detach", loop)
	name := filepath.Base(loop)
	answered := make(chan struct{})
	if async.Within(loop, 0, func() { <-answered }) { // stands for a hanging ioctl
		t.Fatal("the loop device answers")
	}
	if err := d.CheckLoops(); err != nil {
		t.Errorf("no workload has a node of the disk, but: %v", err)
	}
	d.Shared = true
	err := d.CheckLoops()
	if !csierr.Has(err, csierr.DeviceHeld) || !strings.Contains(err.Error(), name) {
		t.Errorf("the loop device may use the shared disk: %v", err)
	}
	close(answered)
	csitest.Await(t, "the loop device answers", func() bool { return d.CheckLoops() == nil })
}

func FuzzParseSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		s := parseSerial(b)
		if s != strings.Trim(s, "\x00 \t\n") || !bytes.Contains(b, []byte(s)) {
			t.Fatalf("parseSerial(%q) = %q", b, s)
		}
		if rest := bytes.Replace(b, []byte(s), nil, 1); len(bytes.Trim(rest, "\x00 \t\n")) > 0 {
			t.Fatalf("parseSerial(%q) = %q, which omits %q", b, s, rest)
		}
		for _, padded := range []string{s + "\n", s + "\x00\x00\x00\n", s + "   \n", " " + s} {
			if again := parseSerial([]byte(padded)); again != s {
				t.Fatalf("parseSerial(%q) = %q, want %q", padded, again, s)
			}
		}
	})
}

func FuzzDiskSerial(f *testing.F) {
	f.Fuzz(func(t *testing.T, a, b string) {
		one, other := volume.Serial(a), volume.Serial(b)
		if !strings.HasPrefix(a, one) || len(one) != min(len(a), 20) {
			t.Fatalf("Serial(%q) = %q", a, one)
		}
		same := (a + strings.Repeat("\x00", 20))[:20] == (b + strings.Repeat("\x00", 20))[:20]
		if one == other && !same {
			t.Fatalf("%q and %q both have the serial %q", a, b, one)
		}
		var field [20]byte // as the rack pads it
		copy(field[:], a)
		if volume.RackName.MatchString(a) {
			if seen := parseSerial(append(field[:], '\n')); seen != one {
				t.Fatalf("the disk %q has the serial %q, want %q", a, seen, one)
			}
		}
	})
}

func FuzzParseNumber(f *testing.F) {
	form := regexp.MustCompile(`^0*(\d+):0*(\d+)\n?$`)
	f.Fuzz(func(t *testing.T, b []byte) {
		major, minor, err := ParseNumber(b)
		if err != nil {
			return
		}
		want := form.FindSubmatch(b)
		number := Device{Major: major, Minor: minor}.Number()
		if want == nil || string(want[1])+":"+string(want[2]) != number {
			t.Fatalf("ParseNumber(%q) = %s", b, number)
		}
	})
}
