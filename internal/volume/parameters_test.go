package volume

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"sigs.k8s.io/yaml"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestParseParametersReturnsValuesAndDefaults(t *testing.T) { // CV-6
	p := csitest.Got(ParseParameters(map[string]string{
		"blockSize": "512", "diskType": "distributed", "imageId": strings.ToUpper(someID),
		"placement":                   "instance",
		"mkfsOptions":                 "reservedPercent=0,bytesPerInode=16384",
		"csi.storage.k8s.io/pvc/name": "claim",
		"csi.storage.k8s.io/node-expand-secret-namespace": "secrets",
	}))(t)
	if p.BlockSize != 512 || p.DiskType != diskTypeDistributed || p.ImageID != someID ||
		p.Placement != PlacementInstance ||
		p.MkfsOptions.String() != "bytesPerInode=16384,reservedPercent=0" {
		t.Errorf("got %+v", p)
	}
	p, err := ParseParameters(nil)
	if err != nil || p.DiskType != diskTypeDistributed || p.BlockSize != 0 ||
		p.Placement != placementRack || p.Largest() != MaxDistributedBytes {
		t.Errorf("without parameters: %+v, %v", p, err)
	}
	for _, values := range []map[string]string{{"diskType": "local"},
		{"diskType": "local", "blockSize": "4096"}} {
		if p, err = ParseParameters(values); err != nil || p.Largest() <= MaxDistributedBytes {
			t.Errorf("%v: a local disk has at most %d bytes, %v", values, p.Largest(), err)
		}
	}
}

func TestAnInvalidParameterIsNamedInTheError(t *testing.T) { // CV-6
	type pairs = map[string]string
	for _, test := range []struct {
		values pairs
		words  []string // what the error must contain; nil means the only key in values
	}{
		{pairs{"blockSize": "1024"}, nil}, {pairs{"blockSize": ""}, nil},
		{pairs{"blockSize": "4096 "}, nil}, {pairs{"blocksize": "4096"}, nil},
		{pairs{"diskType": "crucible"}, nil}, {pairs{"diskType": ""}, nil},
		{pairs{"imageId": "ubuntu"}, nil}, {pairs{"placement": "node"}, nil},
		{pairs{"placement": ""}, nil}, {pairs{"colour": "blue"}, nil},
		{pairs{"csi.storage.k8s.io/pvc": "x"}, nil}, {pairs{"storage.kubernetes.io/whatever": "x"}, nil},
		{pairs{"diskType": "local", "blockSize": "512"}, []string{"blockSize"}},
		{pairs{"diskType": "local", "imageId": someID}, []string{"imageId"}},
	} {
		words := test.words
		if words == nil {
			words = slices.Collect(maps.Keys(test.values))
		}
		_, err := ParseParameters(test.values)
		fails(csierr.ParameterInvalid, words...)(t, err)
	}
	_, err := ParseParameters(pairs{"mkfsOptions": "-F"})
	fails(csierr.MkfsOptions, "mkfsOptions")(t, err)
	for unknown, nearest := range map[string]string{
		"csi.storage.k8s.io/fstpye":                    "csi.storage.k8s.io/fstype",
		"csi.storage.k8s.io/fsType2":                   "csi.storage.k8s.io/fstype",
		"csi.storage.k8s.io/node-publish-secrets-name": "csi.storage.k8s.io/node-publish-secret-name",
		"csi.storage.k8s.io/pv/names":                  "csi.storage.k8s.io/pv/name",
		"blocksize":                                    "blockSize",
		"mkfsOption":                                   "mkfsOptions",
		"imageID":                                      "imageId",
	} {
		_, err := ParseParameters(pairs{unknown: "x"})
		fails(csierr.ParameterInvalid, unknown, "nearest known one is "+nearest+"; ")(t, err)
	}
}

func TestAnMkfsOptionThatAFilesystemLacksIsRefused(t *testing.T) {
	p := csitest.Got(ParseParameters(map[string]string{"mkfsOptions": "bytesPerInode=16384"}))(t)
	for fsType, ends := range map[string]func(*testing.T, error){"": csitest.OK, "ext3": csitest.OK,
		"xfs": fails(csierr.MkfsOptions)} {
		ends(t, p.Fits([]*csi.VolumeCapability{csitest.Filesystem("ext4"),
			csitest.Filesystem(fsType)}, GiB))
	}
}

type chartParameters struct {
	Parameters     []string
	DiskType       []DiskType
	BlockSize      []int
	LocalBlockSize int
	Placement      []Placement
	Filesystems    []string
	MkfsOptions    map[string]chartOption
}

type chartOption struct {
	Filesystems []string
	Valid       string
	Range       []int
	Values      []string
	Pattern     string
}

func TestTheChartListsTheDriversParameters(t *testing.T) {
	text := csitest.Got(os.ReadFile("../../deploy/chart/parameters.yaml"))(t)
	var chart chartParameters
	must(t, yaml.UnmarshalStrict(text, &chart))
	want := chartParameters{parameterNames, []DiskType{diskTypeDistributed, DiskTypeLocal}, BlockSizes,
		localBlockSize, placements, Filesystems, map[string]chartOption{}}
	for name, rule := range mkfsRules {
		o, allowed := chart.MkfsOptions[name], "nothing"
		o.Filesystems, o.Valid = slices.Sorted(maps.Keys(rule.args)), rule.valid.Words
		switch {
		case name == "label":
			o.Pattern, allowed = mkfsLabel.String(), o.Valid
		case len(o.Range) == 2:
			allowed = numberFrom(o.Range[0], o.Range[1]).Words
		case len(o.Values) > 1:
			allowed = anyOf(o.Values...).Words
		}
		if allowed != o.Valid {
			t.Errorf("for %s the driver accepts %s, and the chart %s", name, o.Valid, allowed)
		}
		want.MkfsOptions[name] = o
	}
	if diff := cmp.Diff(want, chart); diff != "" {
		t.Errorf("the parameters differ (-driver +chart):\n%s", diff)
	}
}

func TestMkfsOptionsBecomeArgumentsOrAnError(t *testing.T) {
	for _, c := range []struct {
		text, fsType string
		want         []string
		says         string // text in the error; empty means no error
	}{
		{"", Ext4, nil, ""},
		{"bytesPerInode=16384, reservedPercent=0", Ext4, []string{"-i", "16384", "-m", "0"}, ""},
		{"inodeSize=512,fsBlockSize=1024", Ext3, []string{"-I", "512", "-b", "1024"}, ""},
		{"reflink=true,inodeSize=512,fsBlockSize=4096", XFS,
			[]string{"-m", "reflink=1", "-i", "size=512", "-b", "size=4096"}, ""},
		{"reflink=false", XFS, []string{"-m", "reflink=0"}, ""},
		{"nodeSize=16384,label=my-data_1.0", Btrfs, []string{"-n", "16384", "-L", "my-data_1.0"}, ""},
		{"reflink=true", Ext4, nil, "does not apply to ext4; allowed are bytesPerInode"},
		{"bytesPerInode=16384", XFS, nil, "does not apply to xfs"},
		{"inodeSize=4096", Ext4, nil, "has to be 256, 512"},
		{"inodeSize=2048,fsBlockSize=1024", Ext4, nil, "more than fsBlockSize"},
		{"inodeSize=256", XFS, nil, "xfs takes 512"},
		{"inodeSize=2048,fsBlockSize=4096", XFS, []string{"-i", "size=2048", "-b", "size=4096"}, ""},
		{"inodeSize=1024,fsBlockSize=1024", XFS, nil, "half of its block size"},
		{"bytesPerInode=2048,inodeSize=1024", Ext4, []string{"-i", "2048", "-I", "1024"}, ""},
		{"bytesPerInode=2048,inodeSize=2048", Ext4, nil, "at least twice inodeSize"},
		{"bytesPerInode=2100,inodeSize=2048", Ext3, nil, "at least twice inodeSize"},
		{"bytesPerInode=+16384", Ext4, nil, "1024 to 67108864"},
		{"bytesPerInode=016384", Ext4, nil, "1024 to 67108864"},
		{"reservedPercent=51", Ext4, nil, "0 to 50"},
		{"label=a b", Ext4, nil, "label has to be"},
		{"label=", Ext4, nil, "label has to be"},
		{"label", Ext4, nil, "label has to be"},
		{"label=a,label=b", Ext4, nil, "twice"},
		{"-F", Ext4, nil, "allowed are bytesPerInode, fsBlockSize, inodeSize, label"},
		{"force=true", XFS, nil, "is not allowed"},
		{"label=a,", Ext4, nil, "is not allowed"},
		{"=1", Ext4, nil, "is not allowed"},
	} {
		t.Run("ParseMkfsOptions parses or refuses "+c.text+" for "+c.fsType, func(t *testing.T) {
			o, err := ParseMkfsOptions(c.text)
			if err == nil {
				err = o.Check(c.fsType, GiB)
			}
			if c.says != "" {
				fails(csierr.MkfsOptions, c.says)(t, err)
				return
			}
			must(t, err)
			if diff := cmp.Diff(c.want, o.Args(c.fsType)); diff != "" {
				t.Fatal(diff)
			}
		})
	}
}

func TestParseMountFlagsAcceptsOnlyAllowedFlags(t *testing.T) {
	if o, err := ParseMountFlags("", nil); err != nil || o.Given {
		t.Errorf("of no flags given is %v, %v", o.Given, err)
	}
	for _, c := range []struct {
		flags string // separated by |
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
		{"ro", MountOptions{Attr: AttrReadOnly, Super: []string{"ro"}}, []string{"relatime", "ro"}},
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
		t.Run("ParseMountFlags accepts "+c.flags, func(t *testing.T) {
			c.want.Given = true
			got := csitest.Got(ParseMountFlags(Ext4, strings.Split(c.flags, "|")))(t)
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Fatal(diff)
			}
			if diff := cmp.Diff(c.shown, got.Shown()); diff != "" {
				t.Fatal(diff)
			}
		})
	}
	t.Run("errors do not contain the refused flag (B-15)", func(t *testing.T) {
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

func TestPublishedFlagsCombineStagedAndRequestedFlags(t *testing.T) {
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
		o := csitest.Got(ParseMountFlags("", c.flags))(t)
		got := strings.Join(PublishedFlags(strings.Split(c.staged, ","), o, c.readOnly), ",")
		if got != c.want {
			t.Errorf("PublishedFlags(%q, %q, %v) = %q, want %q", c.staged, c.flags, c.readOnly, got, c.want)
		}
	}
}

// FuzzParameters checks that accepted parameters describe a disk that a rack can make, that an
// unknown parameter is an error, and that the keys that a CO adds have no effect.
func FuzzParameters(f *testing.F) {
	f.Fuzz(func(t *testing.T, text string) {
		values := csitest.Pairs(text)
		p, err := ParseParameters(values)
		if err != nil {
			csitest.Presentable(t, err, codes.InvalidArgument)
			return
		}
		for key := range values {
			if !slices.Contains(parameterNames, key) && !ForeignKey(key) {
				t.Fatalf("%q is passed over", key)
			}
		}
		local := p.DiskType == DiskTypeLocal
		_, isID := ParseID(p.ImageID)
		switch {
		case !local && p.DiskType != diskTypeDistributed,
			p.BlockSize != 0 && !slices.Contains(BlockSizes, p.BlockSize),
			p.ImageID != "" && !isID, !slices.Contains(placements, p.Placement),
			local && (p.ImageID != "" || p.BlockSize != 0 && p.BlockSize != 4096):
			t.Fatalf("%q are %+v", values, p)
		}
		values["csi.storage.k8s.io/pvc/name"] = "x"
		again, err := ParseParameters(values)
		if err != nil || again.DiskType != p.DiskType || again.BlockSize != p.BlockSize ||
			again.Placement != p.Placement ||
			again.ImageID != p.ImageID || again.MkfsOptions.String() != p.MkfsOptions.String() {
			t.Fatalf("%q are %+v, then %+v, %v", values, p, again, err)
		}
	})
}

// FuzzMountFlags checks that errors contain only a flag's position, that ParseMountFlags accepts
// only allowed options and combinations, and that it sets only known attributes.
func FuzzMountFlags(f *testing.F) {
	known := uint64(AttrReadOnly | attrNoSUID | attrNoDev | attrNoExec | AttrAtimeMask |
		attrNoDirAtime | attrNoSymFollow)
	f.Fuzz(func(t *testing.T, first, second string) {
		for _, fsType := range Filesystems {
			o, err := ParseMountFlags(fsType, []string{first, second})
			if err != nil {
				if !refusedText(fsType, err.Error()) {
					t.Fatalf("the error shows more than the number of the flag: %v", err)
				}
				continue
			}
			if o.Attr&^known != 0 {
				t.Fatalf("%q and %q set the attributes %#x", first, second, o.Attr)
			}
			for _, word := range o.Super {
				if word != "ro" && !slices.Contains(superFlags, word) {
					t.Fatalf("%q and %q give every filesystem %q", first, second, word)
				}
			}
			for _, d := range o.Data {
				if !allowed(fsType, d.Key, d.Value, d.HasValue) || strings.ContainsRune(d.Value, 0) {
					t.Fatalf("%q and %q let %+v through for %s", first, second, d, fsType)
				}
			}
			o.SetReadOnly()
			if !slices.Contains(o.Super, "ro") || !slices.Contains(o.Shown(), "ro") {
				t.Fatalf("%q and %q cannot be made read-only: %+v", first, second, o)
			}
		}
	})
}

// refusedText reports whether the text is the error of ParseMountFlags for the flag bind or `"`.
func refusedText(fsType, text string) bool {
	return slices.ContainsFunc([][]string{{"bind"}, {"", "bind"}, {`"`}, {"", `"`}},
		func(flags []string) bool {
			_, err := ParseMountFlags(fsType, flags)
			return err.Error() == text
		})
}

// FuzzMkfsOptions checks that accepted options have an equivalent canonical form, and that no
// argument names a file or lets mkfs overwrite existing content.
func FuzzMkfsOptions(f *testing.F) {
	options := []string{"-i", "-I", "-b", "-m", "-n", "-L"}
	value := regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._=-]*$`)
	f.Fuzz(func(t *testing.T, text string) {
		o, err := ParseMkfsOptions(text)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n\x00") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		again, err := ParseMkfsOptions(o.String())
		if err != nil || again.String() != o.String() {
			t.Fatalf("%q becomes %q, then %q, %v", text, o, again, err)
		}
		for _, fsType := range Filesystems {
			args := o.Args(fsType)
			for i, arg := range args {
				if i%2 == 0 && !slices.Contains(options, arg) || i%2 == 1 && !value.MatchString(arg) {
					t.Fatalf("%q gives %s the arguments %q", text, fsType, args)
				}
			}
			if len(args)%2 != 0 || (o.Check(fsType, 0) == nil && len(args) != 2*len(o.chosen)) {
				t.Fatalf("%q is fine for %s, but gives %q", text, fsType, args)
			}
		}
	})
}
