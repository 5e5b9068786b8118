package volume

import (
	"cmp"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The attributes of a mount, with the values of mount_setattr(2).
const (
	AttrReadOnly    = 0x1
	attrNoSUID      = 0x2
	attrNoDev       = 0x4
	attrNoExec      = 0x8
	attrNoAtime     = 0x10
	attrStrictAtime = 0x20
	AttrAtimeMask   = 0x70
	attrNoDirAtime  = 0x80
	attrNoSymFollow = 0x200000
)

// MountOptions are mount flags, separated into those of the mount and those of the filesystem.
type MountOptions struct {
	Attr uint64 // of the mount
	// AtimeChosen reports whether a flag sets how access times are updated.
	AtimeChosen bool
	Super       []string // flags that every filesystem knows: ro, sync, dirsync, lazytime
	Data        []MountOption
	// Given reports whether the request has flags. They may be sensitive, so text that may quote them,
	// such as the kernel's messages, must not be shown.
	Given bool
}

// MountOption is an option of the filesystem.
type MountOption struct {
	Key, Value string
	HasValue   bool
	// Flag is the position, from 1, of the mount flag with the option; 0 for an option that the driver
	// added.
	Flag int
}

var attrFlags = map[string]struct{ set, clear uint64 }{
	"rw": {0, AttrReadOnly}, "ro": {AttrReadOnly, 0},
	"suid": {0, attrNoSUID}, "nosuid": {attrNoSUID, 0},
	"dev": {0, attrNoDev}, "nodev": {attrNoDev, 0},
	"exec": {0, attrNoExec}, "noexec": {attrNoExec, 0},
	"atime": {0, attrNoAtime}, "noatime": {attrNoAtime, AttrAtimeMask},
	"relatime": {0, AttrAtimeMask}, "norelatime": {0, 0},
	"strictatime": {attrStrictAtime, AttrAtimeMask}, "nostrictatime": {0, attrStrictAtime},
	"diratime": {0, attrNoDirAtime}, "nodiratime": {attrNoDirAtime, 0},
	"symfollow": {0, attrNoSymFollow}, "nosymfollow": {attrNoSymFollow, 0},
}

var (
	superFlags = []string{"sync", "async", "dirsync", "lazytime", "nolazytime"}
	// ignoredFlags are for mount(8) and init systems.
	ignoredFlags = []string{"", "defaults", "auto", "noauto", "nofail", "_netdev", "nouser"}
	// labelFlags are SELinux's, for any filesystem. Kubelet adds a context to a volume's own flags.
	labelFlags = []string{"context", "fscontext", "defcontext", "rootcontext"}
)

// FlagSet are the mount flags that a filesystem takes: words, and names with their values.
type FlagSet struct {
	Words  []string
	Values map[string]Values
}

// FilesystemFlags are the flags of each filesystem, besides those that any filesystem takes. Linux
// 5.12 and later accept all of them, on every disk and with every kernel configuration, so there
// are no quotas and no DAX. None of them disables the log or its ordering (norecovery, barrier=0),
// shows another state or part of the filesystem (rescue, subvol, sb), names another device, changes
// the filesystem's features (journal_checksum), or lets the damage of one volume stop the node
// (errors=panic).
var FilesystemFlags = map[string]FlagSet{
	Ext3: {strings.Fields(extWords), extValues},
	Ext4: {strings.Fields(extWords + " delalloc nodelalloc dioread_lock dioread_nolock"), extValues},
	XFS: {strings.Fields("bsdgroups discard filestreams grpid inode32 inode64 largeio noalign " +
		"nodiscard nogrpid nolargeio noquota nouuid swalloc sysvgroups wsync"), map[string]Values{
		"allocsize": powerOfTwo("64k", "1g"), // the largest page of an architecture is 64 KiB
		"logbsize":  powerOfTwo("16k", "256k"), "logbufs": numberFrom(2, 8),
	}},
	Btrfs: {strings.Fields("acl autodefrag barrier compress compress-force datacow datasum discard " +
		"flushoncommit noacl noautodefrag nodatacow nodatasum nodiscard noflushoncommit nossd " +
		"nossd_spread notreelog skip_balance ssd ssd_spread treelog user_subvol_rm_allowed"),
		map[string]Values{
			"commit": numberFrom(1, 300), "compress": compression, "compress-force": compression,
			"discard": anyOf("sync", "async"), "max_inline": numberFrom(0, 4096),
			"metadata_ratio": numberFrom(0, 100), "space_cache": anyOf("v2"),
			"thread_pool": numberFrom(1, 256),
		}},
}

// The flags of ext3, which the kernel's ext4 mounts.
const extWords = "acl auto_da_alloc barrier block_validity bsddf bsdgroups discard grpid " +
	"init_itable noauto_da_alloc noblock_validity nodiscard nogrpid noinit_itable nombcache " +
	"noquota sysvgroups user_xattr"

var extValues = map[string]Values{
	"auto_da_alloc":        anyOf("0", "1"),
	"barrier":              anyOf("1"),
	"commit":               numberFrom(1, 300),
	"data":                 anyOf("journal", "ordered", "writeback"),
	"data_err":             anyOf("abort", "ignore"),
	"errors":               anyOf("remount-ro"),
	"init_itable":          numberFrom(0, 1000),
	"inode_readahead_blks": powerOfTwo("1", "4096"),
	"journal_ioprio":       numberFrom(0, 7),
	"max_batch_time":       numberFrom(0, 1000000),
	"max_dir_size_kb":      numberFrom(0, 1<<20),
	"min_batch_time":       numberFrom(0, 1000000),
	"resgid":               numberFrom(0, 1<<31-1),
	"resuid":               numberFrom(0, 1<<31-1),
	"stripe":               numberFrom(0, 32768),
}

// compression are the methods of btrfs, those with levels also with a level.
var compression = Values{"zlib, zlib:1 to zlib:9, lzo, zstd, zstd:1 to zstd:15, no or none",
	func(value string) bool {
		method, level, leveled := strings.Cut(value, ":")
		switch {
		case !leveled:
			return anyOf("zlib", "lzo", "zstd", "no", "none").Contains(method)
		case method == "zlib":
			return numberFrom(1, 9).Contains(level)
		}
		return method == "zstd" && numberFrom(1, 15).Contains(level)
	}}

// powerOfTwo accepts powers of two, also in units of k, m or g.
func powerOfTwo(low, high string) Values {
	size := func(value string) int {
		digits := strings.TrimRight(value, "kKmMgG")
		unit := map[string]int{"": 1, "k": 1 << 10, "m": 1 << 20,
			"g": 1 << 30}[strings.ToLower(value[len(digits):])]
		if n, err := strconv.Atoi(digits); err == nil && numberFrom(1, 1<<30).Contains(digits) {
			return n * unit
		}
		return 0
	}
	return Values{"a power of two from " + low + " to " + high, func(value string) bool {
		n := size(value)
		return n >= size(low) && n <= size(high) && n&(n-1) == 0
	}}
}

// ParseMountFlags parses the mount flags of a volume capability; the default filesystem is ext4.
// Its errors name the position of a flag, never the flag.
func ParseMountFlags(fsType string, flags []string) (MountOptions, error) {
	fsType = cmp.Or(fsType, Ext4)
	var o MountOptions
	for i, f := range flags {
		words, ok := splitFlag(f)
		if !ok {
			return MountOptions{}, csierr.New(csierr.MountFlags, "mount flag %d has an unbalanced quote or "+
				"a NUL", i+1)
		}
		if slices.ContainsFunc(words, func(word string) bool { return !o.add(fsType, word, i+1) }) {
			return MountOptions{}, csierr.New(csierr.MountFlags, "mount flag %d is not allowed for %s, or "+
				"has a value that is not allowed, or contradicts another flag; docs/configuration.md lists "+
				"what is allowed; correct mountOptions of the StorageClass and, of a volume that exists, "+
				"those of its PersistentVolume", i+1, fsType)
		}
	}
	o.Given = len(flags) > 0
	if o.ReadOnly() {
		o.Super = append(o.Super, "ro")
	}
	return o, nil
}

// splitFlag splits "noatime,context=\"a,b\"" at commas outside quotes.
func splitFlag(flag string) (words []string, ok bool) {
	var word strings.Builder
	quoted := false
	for _, c := range []byte(flag) {
		switch {
		case c == 0:
			return nil, false
		case c == '"':
			quoted = !quoted
		case c == ',' && !quoted:
			words = append(words, word.String())
			word.Reset()
		default:
			word.WriteByte(c)
		}
	}
	return append(words, word.String()), !quoted
}

func (o *MountOptions) add(fsType, word string, flag int) bool {
	key, value, hasValue := strings.Cut(word, "=")
	attr, isAttr := attrFlags[word]
	switch {
	case slices.Contains(ignoredFlags, word), key == "comment", strings.HasPrefix(key, "x-"),
		strings.HasPrefix(key, "X-"):
	case isAttr:
		o.Attr = o.Attr&^attr.clear | attr.set
		o.AtimeChosen = o.AtimeChosen || (attr.set|attr.clear)&AttrAtimeMask != 0
	case slices.Contains(superFlags, word):
		o.Super = append(o.Super, word)
	case allowed(fsType, key, value, hasValue):
		o.Data = append(o.Data, MountOption{key, value, hasValue, flag})
	default:
		return false
	}
	return !o.contradictory()
}

func allowed(fsType, key, value string, hasValue bool) bool {
	if !hasValue {
		return key == "seclabel" || slices.Contains(FilesystemFlags[fsType].Words, key)
	}
	values, known := FilesystemFlags[fsType].Values[key]
	return slices.Contains(labelFlags, key) || known && values.Contains(value)
}

// contradictory reports whether one option makes the kernel refuse another, or undoes it silently.
func (o *MountOptions) contradictory() bool {
	has := func(is func(d MountOption) bool) bool { return slices.ContainsFunc(o.Data, is) }
	named := func(keys ...string) bool {
		return has(func(d MountOption) bool { return slices.Contains(keys, d.Key) })
	}
	journaled := has(func(d MountOption) bool { return d.Key == "data" && d.Value == "journal" })
	compressed := has(func(d MountOption) bool {
		return strings.HasPrefix(d.Key, "compress") && !strings.HasPrefix(d.Value, "no")
	})
	return journaled && named("delalloc", "dioread_nolock") ||
		compressed && named("nodatacow", "nodatasum") || named("context") && named("defcontext")
}

// ReadOnly reports whether the mount is to be read-only.
func (o MountOptions) ReadOnly() bool { return o.Attr&AttrReadOnly != 0 }

// SetReadOnly makes the filesystem and the mount read-only, whatever the flags say.
func (o *MountOptions) SetReadOnly() {
	if !o.ReadOnly() {
		o.Attr |= AttrReadOnly
		o.Super = append(o.Super, "ro")
	}
}

// AddData adds an option of the filesystem if it is missing.
func (o *MountOptions) AddData(key string) {
	if !slices.ContainsFunc(o.Data, func(d MountOption) bool { return d.Key == key }) {
		o.Data = append(o.Data, MountOption{Key: key})
	}
}

// Two mounts are equal if their filesystem is the same and they agree in the flags that mountinfo
// always shows: those of the mount, and sync, dirsync and lazytime. Other options of a filesystem
// are not compared, because mountinfo may show them in another form, or not at all.
var (
	shownMountFlags = strings.Fields("ro nosuid nodev noexec noatime nodiratime relatime nosymfollow")
	shownSuperFlags = []string{"sync", "dirsync", "lazytime"}
)

// Shown returns the comparable flags that mountinfo shows for a mount with these options, sorted.
func (o MountOptions) Shown() []string {
	words := attrWords(o.Attr)
	for _, f := range shownSuperFlags {
		off := map[string]string{"sync": "async", "lazytime": "nolazytime"}[f]
		if slices.Index(o.Super, f) > slices.Index(o.Super, off) {
			words = append(words, f)
		}
	}
	slices.Sort(words)
	return words
}

func attrWords(attr uint64) []string {
	var words []string
	for _, word := range shownMountFlags {
		on := attr&attrFlags[word].set != 0
		if word == "relatime" {
			on = attr&(attrNoAtime|attrStrictAtime) == 0
		}
		if on {
			words = append(words, word)
		}
	}
	return words
}

// ShownFlags returns the comparable flags in the two lists of a mountinfo line, sorted.
func ShownFlags(mount, super string) []string {
	of := func(list string, flags []string) []string {
		return slices.DeleteFunc(strings.Split(list, ","), func(word string) bool {
			return !slices.Contains(flags, word)
		})
	}
	return slices.Sorted(slices.Values(append(of(mount, shownMountFlags),
		of(super, shownSuperFlags)...)))
}

// PublishedFlags returns the comparable flags of a publication: those that it copies from the
// staging mount, and its own.
func PublishedFlags(staged []string, o MountOptions, readOnly bool) []string {
	words := slices.Clone(staged)
	added := attrWords(o.Attr)
	if o.AtimeChosen {
		words = slices.DeleteFunc(words, func(w string) bool { return w == "noatime" || w == "relatime" })
	} else {
		added = slices.DeleteFunc(added, func(w string) bool { return w == "relatime" })
	}
	words = append(words, added...)
	if readOnly {
		words = append(words, "ro")
	}
	slices.Sort(words)
	return slices.Compact(words)
}
