//go:build linux

package driver

import (
	"slices"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csitest"
)

func TestTheMountTableIsRead(t *testing.T) {
	table, err := parseMountTable([]byte(strings.Join([]string{
		`21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw`,
		`40 21 259:3 / /a\040b\011c\012d\134e rw,noatime shared:2 master:1 - ext4 /dev/nvme3n1 rw,sync`,
		`52 41 259:3 /sub /other ro,relatime - ext4 /dev/nvme3n1 rw`,
		`51 40 0:52 / /a\040b\011c\012d\134e rw - tmpfs none rw`,
	}, "\n") + "\n"))
	csitest.Must(t, err)
	const path = "/a b\tc\nd\\e"
	layers := table.at(path)
	if len(layers) != 2 || layers[1].ID != 51 || table.top(path).FSType != "tmpfs" {
		t.Fatalf("layers: %+v", layers)
	}
	if got := comparableFlags(layers[0]); !slices.Equal(got, []string{"noatime", "sync"}) {
		t.Fatalf("flags: %q", got)
	}
	if got := table.of(blockdev.Device{Major: 259, Minor: 3}); len(got) != 2 {
		t.Fatalf("mounts of the device: %q", got.paths())
	}
	if got := table.sameFilesystem(layers[0]); len(got) != 1 || got[0].Mountpoint != "/other" {
		t.Fatalf("other mounts of the filesystem: %q", got.paths())
	}
	for line, want := range map[string]condition{
		"rw - ext4 /dev/nvme4n1 rw":               wellMounted,
		"ro - ext4 /dev/nvme4n1 rw":               wellMounted,
		"ro - ext4 /dev/nvme4n1 ro":               wellMounted,
		"rw - xfs /dev/nvme4n1 ro":                turnedReadOnly,
		"rw - ext4 /dev/nvme4n1 rw,emergency_ro":  turnedReadOnly,
		"ro - ext4 /dev/nvme4n1 ro,emergency_ro":  turnedReadOnly,
		"rw,noatime - ext4 /dev/nvme4n1 shutdown": dead,
	} {
		table, err := parseMountTable([]byte("41 21 259:4 / / " + line + "\n"))
		csitest.Must(t, err)
		if got := conditionOf(table[0]); got != want {
			t.Errorf("the filesystem of %q is %s, want %s", line, got, want)
		}
	}
	if table.top("/a") != nil {
		t.Fatal("a part of a path is taken for the path")
	}
}
