package volume

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// MkfsOptions are the options of mkfs that a StorageClass may set: name=value pairs from a list of
// allowed ones, never free arguments, so that no option overrides a safety check of mkfs or opens a
// file.
type MkfsOptions struct {
	chosen []mkfsChoice
}

type mkfsChoice struct{ name, value string }

type mkfsRule struct {
	valid Values
	args  map[string]func(value string) []string
}

var mkfsLabel = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,11}$`)

var mkfsRules = map[string]mkfsRule{
	"bytesPerInode": {
		numberFrom(1024, 64<<20),
		map[string]func(string) []string{Ext3: mkfsFlag("-i"), Ext4: mkfsFlag("-i")},
	},
	"inodeSize": {
		anyOf("256", "512", "1024", "2048"),
		map[string]func(string) []string{
			Ext3: mkfsFlag("-I"), Ext4: mkfsFlag("-I"), XFS: mkfsSetting("-i", "size"),
		},
	},
	"fsBlockSize": {
		anyOf("1024", "2048", "4096"),
		map[string]func(string) []string{
			Ext3: mkfsFlag("-b"), Ext4: mkfsFlag("-b"), XFS: mkfsSetting("-b", "size"),
		},
	},
	"reservedPercent": {
		numberFrom(0, 50),
		map[string]func(string) []string{Ext3: mkfsFlag("-m"), Ext4: mkfsFlag("-m")},
	},
	"reflink": {
		anyOf("true", "false"),
		map[string]func(string) []string{XFS: func(value string) []string {
			return mkfsSetting("-m", "reflink")(map[string]string{"true": "1", "false": "0"}[value])
		}},
	},
	"nodeSize": {
		anyOf("4096", "8192", "16384", "32768", "65536"),
		map[string]func(string) []string{Btrfs: mkfsFlag("-n")},
	},
	"label": {
		Values{"1 to 12 of A-Z, a-z, 0-9, dot, underscore, hyphen, the first a letter or digit",
			mkfsLabel.MatchString},
		map[string]func(string) []string{
			Ext3: mkfsFlag("-L"), Ext4: mkfsFlag("-L"), XFS: mkfsFlag("-L"), Btrfs: mkfsFlag("-L"),
		},
	},
}

// ParseMkfsOptions parses options such as "bytesPerInode=16384,reservedPercent=0". Empty means
// none.
func ParseMkfsOptions(s string) (MkfsOptions, error) {
	var o MkfsOptions
	if strings.TrimSpace(s) == "" {
		return o, nil
	}
	for pair := range strings.SplitSeq(s, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		rule, known := mkfsRules[name]
		switch {
		case !known:
			return MkfsOptions{}, csierr.New(csierr.MkfsOptions, "mkfsOptions: %.40q is not allowed; "+
				"allowed are %s", name, allowedMkfsOptions(""))
		case !ok || !rule.valid.Contains(value):
			return MkfsOptions{}, csierr.New(csierr.MkfsOptions, "mkfsOptions: %s has to be %s, not %.40q",
				name, rule.valid.Words, value)
		case o.Value(name) != "":
			return MkfsOptions{}, csierr.New(csierr.MkfsOptions, "mkfsOptions: %s is given twice", name)
		}
		o.chosen = append(o.chosen, mkfsChoice{name, value})
	}
	return o, nil
}

// String returns the canonical form: what ParseMkfsOptions parses, sorted.
func (o MkfsOptions) String() string {
	words := make([]string, 0, len(o.chosen))
	for _, c := range o.chosen {
		words = append(words, c.name+"="+c.value)
	}
	slices.Sort(words)
	return strings.Join(words, ",")
}

// Check returns an error if an option does not apply to the filesystem, or if mkfs cannot make the
// filesystem with these options on a disk of that size. Size 0 means not known.
func (o MkfsOptions) Check(fsType string, sizeBytes int64) error {
	for _, c := range o.chosen {
		if mkfsRules[c.name].args[fsType] == nil {
			return csierr.New(csierr.MkfsOptions, "mkfsOptions: %s does not apply to %s; allowed are %s",
				c.name, fsType, allowedMkfsOptions(fsType))
		}
	}
	inode, block := o.number("inodeSize", 0), o.number("fsBlockSize", 4096)
	switch {
	case fsType == XFS && inode > 0 && (inode < 512 || inode > block/2):
		return csierr.New(csierr.MkfsOptions, "mkfsOptions: inodeSize=%d: xfs takes 512 up to half of "+
			"its block size, %d", inode, block)
	case inode > block:
		return csierr.New(csierr.MkfsOptions, "mkfsOptions: inodeSize=%d is more than fsBlockSize=%d",
			inode,
			block)
	case (fsType == Ext3 || fsType == Ext4) && sizeBytes > 0 && !o.extFits(fsType, sizeBytes):
		return csierr.New(csierr.MkfsOptions, "mkfsOptions: bytesPerInode=%d with inodeSize=%d and "+
			"fsBlockSize=%d leaves too little of %s of %s to files; choose a bytesPerInode of at least "+
			"twice inodeSize, or a larger fsBlockSize", o.number("bytesPerInode", extBytesPerInode),
			o.number("inodeSize", extInodeSize), block, SizeText(sizeBytes), fsType)
	}
	return nil
}

// These are the defaults in the driver's configuration of mke2fs.
const extInodeSize, extBytesPerInode = 256, 16384

// extFits reports whether each block group has room for the metadata that mke2fs puts into it, and
// for an inode table of at most three quarters of the group. The numbers are those of mke2fs (its
// ext2fs_initialize), which fails without the room.
func (o MkfsOptions) extFits(fsType string, sizeBytes int64) bool {
	const most = 1<<32 - 1
	block := o.number("fsBlockSize", 4096)
	blocks, inodes := sizeBytes/block, sizeBytes/o.number("bytesPerInode", extBytesPerInode)
	descriptor := int64(64)
	if fsType == Ext3 {
		descriptor = 32 // without the feature 64bit
		if max(blocks, inodes) > most {
			return false
		}
	}
	inodes = min(inodes, most)
	bitmap := 8 * block // the most blocks or inodes of a group
	for group := bitmap; group >= 256; group -= 8 {
		groups := ceil(blocks, group)
		perGroup := ceil(inodes, groups)
		if perGroup > bitmap {
			continue // mke2fs then makes smaller groups
		}
		table := ceil(perGroup*o.number("inodeSize", extInodeSize), block)
		descriptors := ceil(groups*descriptor, block) + block/4 // and those reserved for growth
		if descriptors > group*3/4 {
			descriptors = 1 // with meta_bg
		}
		return table <= group*3/4 && 3+table+descriptors <= group
	}
	return false
}

func ceil(a, b int64) int64 { return (a + b - 1) / b }

func (o MkfsOptions) number(name string, unset int64) int64 {
	n, err := strconv.ParseInt(o.Value(name), 10, 64)
	if err != nil {
		return unset
	}
	return n
}

// Args returns the options as arguments of the filesystem's mkfs.
func (o MkfsOptions) Args(fsType string) []string {
	var args []string
	for _, c := range o.chosen {
		if arg := mkfsRules[c.name].args[fsType]; arg != nil {
			args = append(args, arg(c.value)...)
		}
	}
	return args
}

// Value returns the value of an option, or "" if it is not set.
func (o MkfsOptions) Value(name string) string {
	for _, c := range o.chosen {
		if c.name == name {
			return c.value
		}
	}
	return ""
}

func allowedMkfsOptions(fsType string) string {
	var names []string
	for name, rule := range mkfsRules {
		if fsType == "" || rule.args[fsType] != nil {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

func mkfsFlag(name string) func(string) []string {
	return func(value string) []string { return []string{name, value} }
}

func mkfsSetting(group, name string) func(string) []string {
	return func(value string) []string { return []string{group, name + "=" + value} }
}

// Values are the valid values of an option.
type Values struct {
	Words    string // for errors and docs/configuration.md
	Contains func(value string) bool
}

func anyOf(values ...string) Values {
	last := len(values) - 1
	words := strings.TrimPrefix(strings.Join(values[:last], ", ")+" or "+values[last], " or ")
	return Values{words, func(value string) bool { return slices.Contains(values, value) }}
}

// numberFrom accepts decimal numbers in canonical form: no sign, no leading zero.
func numberFrom(low, high int) Values {
	return Values{fmt.Sprintf("a number from %d to %d", low, high), func(value string) bool {
		n, err := strconv.Atoi(value)
		return err == nil && n >= low && n <= high && fmt.Sprint(n) == value
	}}
}
