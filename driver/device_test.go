//go:build linux

package driver

import (
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/volume"
)

func TestParseSerial(t *testing.T) {
	for in, want := range map[string]string{
		"csi-0123456789abcdef\n":                     "csi-0123456789abcdef",
		"boot" + strings.Repeat("\x00", 16) + "\n":   "boot",
		"boot                \n":                     "boot",
		"boot" + strings.Repeat("\x00 ", 8) + "\n\n": "boot",
		"two words\n":                                "two words",
		"\n":                                         "",
		"":                                           "",
	} {
		if got := parseSerial([]byte(in)); got != want {
			t.Errorf("parseSerial(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestParseDeviceNumber(t *testing.T) {
	for in, want := range map[string][2]uint32{"259:3\n": {259, 3}, "7:0": {7, 0}} {
		major, minor, err := parseDeviceNumber([]byte(in))
		if err != nil || major != want[0] || minor != want[1] {
			t.Errorf("parseDeviceNumber(%q) = %d, %d, %v", in, major, minor, err)
		}
	}
	for _, in := range []string{"", ":", "7", "7:", "-1:2", "7:4294967296", "7:1:2", "a:b"} {
		if _, _, err := parseDeviceNumber([]byte(in)); err == nil {
			t.Errorf("parseDeviceNumber(%q) is accepted", in)
		}
	}
}

func TestFindingADevice(t *testing.T) {
	t.Run("D-35 a serial is matched whole", func(t *testing.T) {
		root := sysfs(t, map[string]string{"nvme0n1": "boot", "nvme5n1": "csi-0123456789abcdef",
			"nvme3n1": "csi-0123456789abcde", "vda": "-"})
		ds := devices{sysfsRoot: root, devRoot: t.TempDir()}
		all, err := ds.list()
		must(t, err)
		if len(all) != 3 {
			t.Fatalf("listed %+v", all)
		}
		// There is no node for it, which is the only thing wrong.
		_, err = ds.find(t.Context(), "csi-0123456789abcdef", time.Millisecond)
		if err == nil || !strings.Contains(err.Error(), "nvme5n1") {
			t.Fatal(err)
		}
	})
	t.Run("no block directory is an error that names it", func(t *testing.T) {
		_, err := devices{sysfsRoot: "/no/such/sys"}.find(t.Context(), "x", time.Hour)
		if err == nil || !strings.Contains(err.Error(), "/no/such/sys/block") {
			t.Fatal(err)
		}
	})
}

func TestDiskSerial(t *testing.T) {
	for in, want := range map[string]string{
		"db": "db", "csi-0123456789abcdef": "csi-0123456789abcdef",
		"csi-0123456789abcdef-more": "csi-0123456789abcdef",
	} {
		if got := volume.Serial(in); got != want {
			t.Errorf("diskSerial(%q) = %q, want %q", in, got, want)
		}
	}
}
