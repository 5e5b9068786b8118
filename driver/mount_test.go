//go:build linux

package driver

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMountFlags(t *testing.T) {
	for _, c := range []struct {
		flags string // with | between the flags
		want  mountOptions
		shown []string
	}{
		{"noatime", mountOptions{Attr: attrNoAtime, AtimeChosen: true}, []string{"noatime"}},
		{"noatime|strictatime", mountOptions{Attr: attrStrictAtime, AtimeChosen: true}, nil},
		{"noatime|relatime", mountOptions{AtimeChosen: true}, []string{"relatime"}},
		{"nosuid,nodev|noexec|nosymfollow",
			mountOptions{Attr: attrNoSUID | attrNoDev | attrNoExec | attrNoSymFollow},
			[]string{"nodev", "noexec", "nosuid", "nosymfollow", "relatime"}},
		{"nosuid|suid", mountOptions{}, []string{"relatime"}},
		{"ro", mountOptions{Attr: attrReadOnly, Super: []string{"ro"}}, []string{"relatime", "ro"}},
		{"ro|rw", mountOptions{}, []string{"relatime"}},
		{"sync|lazytime|dirsync", mountOptions{Super: []string{"sync", "lazytime", "dirsync"}},
			[]string{"dirsync", "lazytime", "relatime", "sync"}},
		{"sync|async", mountOptions{Super: []string{"sync", "async"}}, []string{"relatime"}},
		{"data=journal,discard", mountOptions{Data: []mountDatum{{"data", "journal", true},
			{"discard", "", false}}}, []string{"relatime"}},
		{`context="system_u:object_r:x:s0:c1,c2",discard`, mountOptions{Data: []mountDatum{
			{"context", "system_u:object_r:x:s0:c1,c2", true}, {"discard", "", false}}},
			[]string{"relatime"}},
		{"defaults,_netdev|x-systemd.automount|comment=a|", mountOptions{}, []string{"relatime"}},
	} {
		t.Run("flags "+c.flags, func(t *testing.T) {
			c.want.Given = true
			got, err := parseMountFlags(strings.Split(c.flags, "|"))
			must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(c.shown, got.shown()); diff != "" {
				t.Fatal(diff)
			}
		})
	}
	t.Run("B-15 a refused flag is not quoted", func(t *testing.T) {
		for _, f := range []string{"bind", "remount", "loop=/canary", "source=canary", "rshared", "user",
			"device=/canary", "journal_dev=canary", `a="canary`, "canary\x00", "ro=canary", "rw=canary",
			"sync=canary", "noexec=canary"} {
			_, err := parseMountFlags([]string{"noatime", f})
			if err == nil || strings.Contains(err.Error(), "canary") || !strings.Contains(err.Error(),
				"mount flag 2") {
				t.Errorf("parseMountFlags(%q): %v", f, err)
			}
		}
	})
}

func TestPublishedFlags(t *testing.T) {
	for _, c := range []struct {
		staged   string
		flags    []string
		readOnly bool
		want     string
	}{
		{"relatime", nil, false, "relatime"},
		{"relatime", nil, true, "relatime,ro"},
		{"noatime,nodev", []string{"noatime"}, false, "noatime,nodev"},
		{"noatime,nodev", []string{"noexec"}, false, "noatime,nodev,noexec"},
		{"relatime", []string{"noatime"}, false, "noatime"},
		{"noatime", []string{"strictatime"}, false, ""},
		{"relatime,sync", []string{"ro"}, true, "relatime,ro,sync"},
	} {
		o, err := parseMountFlags(c.flags)
		must(t, err)
		got := strings.Join(publishedFlags(strings.Split(c.staged, ","), o, c.readOnly), ",")
		if got != c.want {
			t.Errorf("publishedFlags(%q, %q, %v) = %q, want %q", c.staged, c.flags, c.readOnly, got, c.want)
		}
	}
}

func TestTheMountTableIsRead(t *testing.T) {
	table, err := parseMountTable([]byte(strings.Join([]string{
		`21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw`,
		`40 21 259:3 / /a\040b\011c\012d\134e rw,noatime shared:2 master:1 - ext4 /dev/nvme3n1 rw,sync`,
		`52 41 259:3 /sub /other ro,relatime - ext4 /dev/nvme3n1 rw`,
		`51 40 0:52 / /a\040b\011c\012d\134e rw - tmpfs none rw`,
	}, "\n") + "\n"))
	must(t, err)
	const path = "/a b\tc\nd\\e"
	layers := table.at(path)
	if len(layers) != 2 || layers[1].ID != 51 || table.top(path).FSType != "tmpfs" {
		t.Fatalf("layers: %+v", layers)
	}
	if got := comparableFlags(layers[0]); !slices.Equal(got, []string{"noatime", "sync"}) {
		t.Fatalf("flags: %q", got)
	}
	if got := table.of(device{Major: 259, Minor: 3}); len(got) != 2 {
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
		must(t, err)
		if got := conditionOf(table[0]); got != want {
			t.Errorf("the filesystem of %q is %s, want %s", line, got, want)
		}
	}
	if table.top("/a") != nil {
		t.Fatal("a part of a path is taken for the path")
	}
}

func TestLastWords(t *testing.T) {
	for in, want := range map[string]string{
		"":                       "it said nothing",
		" \n\t":                  "it said nothing",
		"a\n\n b":                `"a b"`,
		strings.Repeat("x", 400): `"…` + strings.Repeat("x", 300) + `"`,
	} {
		if got := lastWords(in); got != want {
			t.Errorf("lastWords(%q) = %q", in, got)
		}
	}
}

func TestMissingTools(t *testing.T) {
	if got := missingTools(); len(got) != 0 {
		t.Fatalf("missing here: %q", got)
	}
	t.Setenv("PATH", t.TempDir())
	if got := missingTools(); !slices.Equal(got, nodeTools) {
		t.Fatalf("missing without a PATH: %q", got)
	}
}
