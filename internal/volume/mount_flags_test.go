package volume

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParseMountFlags(t *testing.T) {
	if o, err := ParseMountFlags("", nil); err != nil || o.Given {
		t.Errorf("of no flags given is %v, %v", o.Given, err)
	}
	for _, c := range []struct {
		flags string // with | between the flags
		want  MountOptions
		shown []string
	}{
		{"noatime", MountOptions{Attr: attrNoAtime, AtimeChosen: true}, []string{"noatime"}},
		{"noatime|strictatime", MountOptions{Attr: attrStrictAtime, AtimeChosen: true}, nil},
		{"noatime|relatime", MountOptions{AtimeChosen: true}, []string{"relatime"}},
		{"nosuid,nodev|noexec|nosymfollow", MountOptions{Attr: attrNoSUID | attrNoDev | attrNoExec |
			attrNoSymFollow},
			[]string{"nodev", "noexec", "nosuid", "nosymfollow", "relatime"}},
		{"nosuid|suid", MountOptions{}, []string{"relatime"}},
		{"ro", MountOptions{Attr: AttrReadOnly, Super: []string{"ro"}}, []string{"relatime",
			"ro"}},
		{"ro|rw", MountOptions{}, []string{"relatime"}},
		{"sync|lazytime|dirsync", MountOptions{Super: []string{"sync", "lazytime", "dirsync"}},
			[]string{"dirsync", "lazytime", "relatime", "sync"}},
		{"sync|async", MountOptions{Super: []string{"sync", "async"}}, []string{"relatime"}},
		{"data=journal,discard", MountOptions{Data: []MountOption{{"data", "journal", true, 1},
			{"discard", "", false, 1}}}, []string{"relatime"}},
		{`context="system_u:object_r:x:s0:c1,c2",discard`, MountOptions{Data: []MountOption{
			{"context", "system_u:object_r:x:s0:c1,c2", true, 1}, {"discard", "", false, 1}}},
			[]string{"relatime"}},
		{"defaults,_netdev|x-systemd.automount|comment=a|", MountOptions{}, []string{"relatime"}},
	} {
		t.Run("flags "+c.flags, func(t *testing.T) {
			c.want.Given = true
			got, err := ParseMountFlags(Ext4, strings.Split(c.flags, "|"))
			must(t, err)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(c.shown, got.Shown()); diff != "" {
				t.Fatal(diff)
			}
		})
	}
	t.Run("a refused flag is not quoted (B-15)", func(t *testing.T) {
		for fsType, flags := range map[string]string{
			Ext4: "bind remount loop=/canary source=canary rshared user device=/canary " +
				`journal_dev=canary a="canary ro=canary rw=canary sync=canary noexec=canary ` +
				"canary\x00 noload norecovery nobarrier barrier=0 commit=0 commit=301 commit data " +
				"errors=panic data=journal,delalloc dioread_nolock,data=journal dax sb=canary abort " +
				"journal_checksum journal_async_commit usrquota prjquota",
			Ext3: "delalloc nodelalloc dioread_nolock noload nobarrier barrier=0 extents",
			XFS: "norecovery norecovery,ro nobarrier sunit=8 logdev=canary rtdev=canary logbufs=1 " +
				"logbufs=9 logbsize=8k logbsize=48k logbsize=512k allocsize=4k allocsize=2g " +
				"allocsize=96k ikeep attr2 dax uquota prjquota nouuid=canary",
			Btrfs: "nologreplay norecovery rescue=canary rescue=all usebackuproot nobarrier degraded " +
				"subvol=canary subvolid=canary device=canary compress=canary compress=lzo:1 " +
				"compress=zlib:10 compress=zstd:16 compress-force,nodatacow nodatasum,compress=zstd " +
				"commit=301 thread_pool=0 space_cache=v1 nospace_cache fatal_errors=panic discard=canary",
			"zfs": "discard",
		} {
			for f := range strings.SplitSeq(flags, " ") {
				_, err := ParseMountFlags(fsType, []string{"noatime", f})
				if err == nil || strings.Contains(err.Error(), "canary") || !strings.Contains(err.Error(),
					"mount flag 2") {
					t.Errorf("ParseMountFlags(%s, %q): %v", fsType, f, err)
				}
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
		o, err := ParseMountFlags("", c.flags)
		must(t, err)
		got := strings.Join(PublishedFlags(strings.Split(c.staged, ","), o, c.readOnly), ",")
		if got != c.want {
			t.Errorf("PublishedFlags(%q, %q, %v) = %q, want %q", c.staged, c.flags, c.readOnly, got, c.want)
		}
	}
}
