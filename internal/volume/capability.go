package volume

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The filesystems of volumes, as the kernel names them.
const (
	Ext3  = "ext3"
	Ext4  = "ext4"
	XFS   = "xfs"
	Btrfs = "btrfs"
)

// IsFilesystem reports whether volumes may have a filesystem of this type.
func IsFilesystem(fsType string) bool { return slices.Contains(Filesystems, fsType) }

// Filesystems lists the filesystems that volumes may have. The first is the default.
var Filesystems = []string{Ext4, Ext3, XFS, Btrfs}

// supportedModes are the access modes in which one node reads and writes the volume, because a rack
// attaches a disk to one instance (RFD 595). The node decides how many workloads share the volume.
var supportedModes = []csi.VolumeCapability_AccessMode_Mode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER,
}

// CapabilityFault describes what is wrong with a volume capability. The zero value means that the
// capability is valid.
type CapabilityFault struct {
	Malformed   bool // INVALID_ARGUMENT everywhere
	Unsupported bool // INVALID_ARGUMENT on the controller, FAILED_PRECONDITION on the node
	Message     string
}

// CapabilityProblem returns the first fault of a volume capability.
func CapabilityProblem(c *csi.VolumeCapability) CapabilityFault {
	mode := c.GetAccessMode().GetMode()
	known := csi.VolumeCapability_AccessMode_Mode_name[int32(mode)]
	switch {
	case c == nil:
		return malformed("volume_capability is missing")
	case c.GetAccessMode() == nil || mode == csi.VolumeCapability_AccessMode_UNKNOWN:
		return malformed("volume_capability: access_mode is missing")
	case c.GetBlock() == nil && c.GetMount() == nil:
		return malformed("volume_capability: access_type is missing; it is block or mount")
	case !slices.Contains(supportedModes, mode):
		if known == "" {
			known = fmt.Sprintf("number %d", mode)
		}
		return unsupported("access mode %s is not supported: a disk can be attached to one "+
			"instance, for writing; use ReadWriteOnce or ReadWriteOncePod (SINGLE_NODE_WRITER)",
			known)
	}
	return mountProblem(c.GetMount())
}

func mountProblem(m *csi.VolumeCapability_MountVolume) CapabilityFault {
	const maxFlagBytes = 4 << 10
	total := 0
	for _, f := range m.GetMountFlags() {
		total += len(f)
	}
	fsType := m.GetFsType()
	switch {
	case fsType != "" && !IsFilesystem(fsType):
		return unsupported("fs_type %.40q is not supported; it is one of %s", fsType,
			strings.Join(Filesystems, ", "))
	case total > maxFlagBytes:
		return malformed("mount_flags have %d bytes; CSI allows %d", total, maxFlagBytes)
	case m.GetVolumeMountGroup() != "":
		return unsupported("volume_mount_group is not supported; let the orchestrator set the group of " +
			"the files (Kubernetes: fsGroup)")
	}
	return CapabilityFault{}
}

func malformed(message string, args ...any) CapabilityFault {
	return CapabilityFault{Malformed: true, Message: fmt.Sprintf(message, args...)}
}

func unsupported(message string, args ...any) CapabilityFault {
	return CapabilityFault{Unsupported: true, Message: fmt.Sprintf(message, args...)}
}

// CheckCapabilities returns an error unless the controller supports all of a request's
// capabilities.
func CheckCapabilities(capabilities []*csi.VolumeCapability) error {
	if len(capabilities) == 0 {
		return csierr.New(csierr.FieldMissing, "volume_capabilities is missing")
	}
	for _, c := range capabilities {
		if err := CheckCapability(c); err != nil {
			return err
		}
	}
	return nil
}

// CheckCapability returns an error unless the controller supports the capability.
func CheckCapability(c *csi.VolumeCapability) error {
	switch p := CapabilityProblem(c); {
	case p.Malformed:
		return csierr.New(csierr.CapabilityInvalid, "%s", p.Message)
	case p.Unsupported:
		return csierr.New(csierr.CapabilityUnsupported, "%s", p.Message)
	}
	// The node refuses bad flags, too, but only after the volume exists.
	m := c.GetMount()
	if _, err := ParseMountFlags(m.GetFsType(), m.GetMountFlags()); err != nil {
		return csierr.Coded(codes.InvalidArgument, csierr.MountFlags, "%s", err)
	}
	return nil
}

const (
	// GiB is the unit of disk sizes.
	GiB              = 1 << 30
	defaultSizeBytes = 10 * GiB
	// MaxDistributedBytes is the largest size of a distributed disk. Only the rack knows the limit of
	// local disks.
	MaxDistributedBytes = 1023 * GiB
)

// CapacityRange is the requested range in bytes. Without a limit, the maximum is MaxInt64.
type CapacityRange struct {
	given    bool
	min, max int64
}

// ParseCapacityRange parses a capacity range. nil allows every size.
func ParseCapacityRange(r *csi.CapacityRange) (CapacityRange, error) {
	if r == nil {
		return CapacityRange{max: math.MaxInt64}, nil
	}
	out := CapacityRange{given: true, min: r.GetRequiredBytes(), max: r.GetLimitBytes()}
	switch {
	case out.min < 0 || out.max < 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range is negative")
	case out.min == 0 && out.max == 0:
		return out, csierr.New(csierr.CapacityInvalid, "capacity_range sets neither required_bytes nor "+
			"limit_bytes; leave it out for a volume of %s",
			SizeText(defaultSizeBytes))
	case out.max == 0:
		out.max = math.MaxInt64
	case out.max < out.min:
		return out, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than "+
			"required_bytes, which is %s", SizeText(out.max), SizeText(out.min))
	}
	return out, nil
}

// Contains reports whether the size is in the range.
func (r CapacityRange) Contains(sizeBytes int64) bool {
	return r.min <= sizeBytes && sizeBytes <= r.max
}

// DiskSize returns the size of the disk to create: whole GiB within the range. The floor is the
// size of the snapshot or image, or 0 for a blank disk. The ceiling is the size of the largest
// possible disk.
func (r CapacityRange) DiskSize(floor, ceiling int64) (int64, error) {
	size := r.min
	if size == 0 && floor == 0 {
		size = min(defaultSizeBytes, max(r.max-r.max%GiB, GiB))
	}
	size = max(size, floor, GiB)
	if size > ceiling {
		return 0, csierr.New(csierr.CapacityOutOfRange, "%s are more than the largest disk, %s",
			SizeText(size), SizeText(ceiling))
	}
	size = roundUp(size)
	if size > r.max {
		if floor > r.max {
			return 0, csierr.New(csierr.CapacityOutOfRange, "limit_bytes is %s, less than the source, "+
				"which has %s", SizeText(r.max), SizeText(floor))
		}
		return 0, csierr.New(csierr.CapacityOutOfRange, "disks have whole GiB, at least one, and the "+
			"next size, %s, is above limit_bytes, which is %s", SizeText(size), SizeText(r.max))
	}
	return size, nil
}

// roundUp rounds up to whole GiB. On an overflow it returns the largest whole GiB.
func roundUp(sizeBytes int64) int64 {
	if sizeBytes > math.MaxInt64-GiB {
		return math.MaxInt64 / GiB * GiB
	}
	return (sizeBytes + GiB - 1) / GiB * GiB
}

// The attributes of a mount, with their values in mount_setattr(2).
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

// MountOptions contains parsed mount flags.
type MountOptions struct {
	Attr uint64
	// AtimeChosen reports whether a flag selects how access times are updated.
	AtimeChosen bool
	Super       []string // flags that every filesystem knows: ro, sync, dirsync, lazytime
	Data        []MountOption
	// Given reports whether the request contains flags. They may be sensitive, so text that may
	// contain them, such as the kernel's messages, must not be shown.
	Given bool
}

// MountOption is an option for the filesystem.
type MountOption struct {
	Key, Value string
	HasValue   bool
	// Flag is the position of the request's flag, from 1 on, or 0 if AddData added the option.
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
	// ignoredFlags have no effect on a mount, because they are for mount(8) and init systems.
	ignoredFlags = []string{"", "defaults", "auto", "noauto", "nofail", "_netdev", "nouser"}
	// labelFlags are SELinux's flags, which every filesystem accepts. Kubelet may add "context".
	labelFlags = []string{"context", "fscontext", "defcontext", "rootcontext"}
)

// CommonFlags returns the flags that every filesystem accepts: words have no value, names have one.
func CommonFlags() (words, names []string) {
	words = slices.Concat(slices.Collect(maps.Keys(attrFlags)), superFlags, []string{"seclabel"},
		ignoredFlags[1:])
	return words, append([]string{"comment"}, labelFlags...)
}

// FlagSet contains a filesystem's mount flags. Words are flags without a value.
type FlagSet struct {
	Words  []string
	Values map[string]Values
}

// FilesystemFlags contains, for each filesystem, the flags that not every filesystem accepts. Linux
// 5.12 and later accept them on every disk and with every kernel configuration. Flags that need
// quotas or DAX are missing, because some disks or kernels refuse them. Also missing are flags that
// disable the log or its ordering (norecovery, barrier=0), show another state or part of the
// filesystem (rescue, subvol, sb), name another device, change the filesystem's features
// (journal_checksum), or let the damage of one volume stop the node (errors=panic).
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

// extWords are for ext3, too, because the kernel mounts it with the ext4 driver.
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

// powerOfTwo returns the powers of two from low to high. A value may end with the unit k, m or g.
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

// ParseMountFlags parses a volume capability's mount flags. The default of fsType is ext4. Errors
// contain a flag's position, never the flag itself.
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

// splitFlag splits a flag such as "noatime,context=\"a,b\"" at commas outside of quotes.
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

// contradictory reports whether the kernel refuses or ignores an option because of another.
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

// ReadOnly reports whether the mount is read-only.
func (o MountOptions) ReadOnly() bool { return o.Attr&AttrReadOnly != 0 }

// SetReadOnly makes the filesystem and the mount read-only, even if the flags contain rw.
func (o *MountOptions) SetReadOnly() {
	if !o.ReadOnly() {
		o.Attr |= AttrReadOnly
		o.Super = append(o.Super, "ro")
	}
}

// AddData adds a filesystem option if it is missing.
func (o *MountOptions) AddData(key string) {
	if !slices.ContainsFunc(o.Data, func(d MountOption) bool { return d.Key == key }) {
		o.Data = append(o.Data, MountOption{Key: key})
	}
}

// shownMountFlags and shownSuperFlags are the flags that mountinfo always shows. The driver
// compares two mounts of a filesystem only by these flags: mountinfo may omit the filesystem's
// other options, or show them in another form.
var (
	shownMountFlags = strings.Fields("ro nosuid nodev noexec noatime nodiratime relatime nosymfollow")
	shownSuperFlags = []string{"sync", "dirsync", "lazytime"}
)

// Shown returns the sorted flags that the driver compares for a mount with these options.
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

// ShownFlags returns the sorted flags that the driver compares, from a mountinfo line's two lists.
func ShownFlags(mount, super string) []string {
	of := func(list string, flags []string) []string {
		return slices.DeleteFunc(strings.Split(list, ","), func(word string) bool {
			return !slices.Contains(flags, word)
		})
	}
	return slices.Sorted(slices.Values(append(of(mount, shownMountFlags),
		of(super, shownSuperFlags)...)))
}

// PublishedFlags returns the sorted flags of a published mount that the driver compares: those of
// the staging mount, which a bind mount copies, and those of the publish request.
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
