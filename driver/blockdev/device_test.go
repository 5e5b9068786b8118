//go:build linux

package blockdev

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestFind(t *testing.T) {
	t.Run("D-35 a serial is compared as a whole", func(t *testing.T) {
		root := guesttest.Sysfs(t, map[string]string{"nvme0n1": "boot", "nvme5n1": "csi-0123456789abcdef",
			"nvme3n1": "csi-0123456789abcde", "vda": "-"})
		host := Host{Sysfs: root, Dev: t.TempDir()}
		all, err := host.List()
		csitest.Must(t, err)
		if len(all) != 3 {
			t.Fatalf("listed %+v", all)
		}
		// The error is only that the device has no node.
		_, err = host.Await(t.Context(), "csi-0123456789abcdef", time.Millisecond)
		if err == nil || !strings.Contains(err.Error(), "nvme5n1") {
			t.Fatal(err)
		}
	})
	t.Run("a missing block directory is an error that names it", func(t *testing.T) {
		_, err := Host{Sysfs: "/no/such/sys"}.Await(t.Context(), "x", time.Hour)
		if err == nil || !strings.Contains(err.Error(), "/no/such/sys/block") {
			t.Fatal(err)
		}
	})
}

func TestParseDiskstats(t *testing.T) {
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

func TestASysfsThatMakesNoSenseIsAnErrorThatNamesTheDevice(t *testing.T) {
	for name, c := range map[string]struct {
		file, text string
		ok         bool
	}{
		"as it is":               {"size", "2097152\n", true},
		"a size that is none":    {"size", "large\n", false},
		"a size without end":     {"size", "18446744073709551615\n", false},
		"a number that is none":  {"dev", "259\n", false},
		"a diskseq":              {"diskseq", "7\n", true},
		"a diskseq that is none": {"diskseq", "new\n", false},
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

func TestCountsShowThatNothingWasWritten(t *testing.T) {
	before := Counters{ReadSectors: 1, WrittenSectors: 2, DiscardedSectors: 3}
	for later, want := range map[Counters]bool{
		{1, 2, 3}: true, {9, 2, 3}: true, {1, 3, 3}: false, {1, 2, 4}: false,
	} {
		if got := before.SameWrites(later); got != want {
			t.Errorf("from %+v to %+v: nothing written is %v", before, later, got)
		}
	}
	if (Counters{}).Known() || !before.Known() {
		t.Error("a kernel that counts no reads counts, or one that counts one read does not")
	}
}

func TestMain(m *testing.M) { namespace.Main(m) }
