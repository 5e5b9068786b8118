package volume

import (
	"cmp"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The keys of a StorageClass's parameters. Two of them are also keys of volume_context.
const (
	ParamDiskType    = "diskType"
	paramBlockSize   = CtxBlockSize
	ParamImageID     = "imageId"
	ParamMkfsOptions = CtxMkfsOptions
	paramPlacement   = "placement"

	foreignPrefix = "csi.storage.k8s.io/"

	// DefaultBlockSize is the block size of a blank disk if the StorageClass sets none.
	DefaultBlockSize = 4096
	localBlockSize   = 4096
)

var (
	parameterNames = []string{paramBlockSize, ParamDiskType, ParamImageID, ParamMkfsOptions,
		paramPlacement}
	// BlockSizes are the possible block sizes of disks, in bytes.
	BlockSizes = []int{512, 2048, 4096}
	// foreignKeys are the keys that Kubernetes' sidecars and kubelet read from parameters, or add to
	// parameters and contexts.
	foreignKeys = keysOfKubernetes()
)

func keysOfKubernetes() []string {
	keys := []string{"storage.kubernetes.io/csiProvisionerIdentity"}
	for _, use := range []string{"", "provisioner-", "controller-publish-", "controller-expand-",
		"controller-modify-", "node-stage-", "node-publish-", "node-expand-", "snapshotter-",
		"snapshotter-list-", "group-snapshotter-", "group-snapshotter-get-"} {
		keys = append(keys, foreignPrefix+use+"secret-name", foreignPrefix+use+"secret-namespace")
	}
	for _, name := range []string{"fstype", "pvc/name", "pvc/namespace", "pv/name",
		"volumesnapshot/name", "volumesnapshot/namespace", "volumesnapshotcontent/name",
		"volumegroupsnapshot/name", "volumegroupsnapshot/namespace", "volumegroupsnapshotcontent/name",
		"pod.name", "pod.namespace", "pod.uid", "serviceAccount.name", "serviceAccount.tokens",
		"ephemeral"} {
		keys = append(keys, foreignPrefix+name)
	}
	return keys
}

// DiskType is a disk's type on the rack.
type DiskType string

// A distributed disk is stored on drives of the whole rack, a local disk on those of one sled.
const (
	diskTypeDistributed DiskType = "distributed"
	DiskTypeLocal       DiskType = "local"
)

// Parameters contains a StorageClass's parsed parameters. A BlockSize of 0 means not set.
type Parameters struct {
	DiskType    DiskType
	BlockSize   int
	ImageID     string
	MkfsOptions MkfsOptions
	Placement   Placement
}

// ForeignKey reports whether a CO adds this key for its own use.
func ForeignKey(key string) bool { return slices.Contains(foreignKeys, key) }

// UnknownParameter returns the error for a key that neither the driver nor a CO uses. The error
// suggests the most similar key.
func UnknownParameter(key string, own ...string) error {
	nearest, best := "", 0
	for _, name := range slices.Concat(own, foreignKeys) {
		if n := similarity(key, name); n > best {
			nearest, best = "; the nearest known one is "+name, n
		}
	}
	return csierr.New(csierr.ParameterInvalid, "the parameter %.80q is unknown%s; the driver's own "+
		"are %s", key, nearest, cmp.Or(strings.Join(own, ", "), "none"))
}

// similarity returns how many letters two names share at their beginnings and ends, minus the
// difference of their lengths.
func similarity(a, b string) int {
	a, b = strings.ToLower(a), strings.ToLower(b)
	short, long := min(len(a), len(b)), max(len(a), len(b))
	head, tail := 0, 0
	for head < short && a[head] == b[head] {
		head++
	}
	for tail < short-head && a[len(a)-1-tail] == b[len(b)-1-tail] {
		tail++
	}
	return head + tail - (long - short)
}

// Claim returns the namespace and name of the claim or VolumeSnapshot from a create call's
// parameters. external-provisioner and external-snapshotter add them with the flag
// --extra-create-metadata.
func Claim(parameters map[string]string) string {
	for _, of := range []string{"pvc", "volumesnapshot"} {
		if name := parameters[foreignPrefix+of+"/name"]; name != "" {
			return parameters[foreignPrefix+of+"/namespace"] + "/" + name
		}
	}
	return ""
}

// ParseParameters parses the parameters of a StorageClass.
func ParseParameters(values map[string]string) (Parameters, error) {
	p := Parameters{DiskType: diskTypeDistributed, Placement: placementRack}
	for key, value := range values {
		var err error
		switch key {
		case ParamDiskType:
			p.DiskType = DiskType(value)
			if p.DiskType != diskTypeDistributed && p.DiskType != DiskTypeLocal {
				err = fmt.Errorf("has to be distributed or local, not %.40q", value)
			}
		case paramBlockSize:
			p.BlockSize, err = strconv.Atoi(value)
			if err != nil || !slices.Contains(BlockSizes, p.BlockSize) {
				err = fmt.Errorf("has to be 512, 2048 or 4096, not %.40q", value)
			}
		case ParamImageID:
			id, ok := ParseID(value)
			if p.ImageID = id; !ok {
				err = errors.New("has to be the UUID of an image, not a name")
			}
		case ParamMkfsOptions:
			if p.MkfsOptions, err = ParseMkfsOptions(value); err != nil {
				return p, err
			}
		case paramPlacement:
			p.Placement = Placement(value)
			if !slices.Contains(placements, p.Placement) {
				err = fmt.Errorf("has to be rack or instance, not %.40q", value)
			}
		default:
			if !ForeignKey(key) {
				return p, UnknownParameter(key, parameterNames...)
			}
		}
		if err != nil {
			return p, csierr.New(csierr.ParameterInvalid, "%s %s", key, err.Error())
		}
	}
	switch local := p.DiskType == DiskTypeLocal; {
	case local && p.BlockSize != 0 && p.BlockSize != localBlockSize:
		return p, csierr.New(csierr.ParameterInvalid, "blockSize has to be %d with diskType local",
			localBlockSize)
	case local && p.ImageID != "":
		return p, csierr.New(csierr.ParameterInvalid, "imageId cannot be combined with diskType local: "+
			"local disks are created blank")
	}
	return p, nil
}

// Fits returns an error if the parameters contradict the capabilities of a disk of this size.
// Callers pass the size 0, which is not checked, for a disk that may already contain a filesystem.
func (p Parameters) Fits(capabilities []*csi.VolumeCapability, sizeBytes int64) error {
	for _, c := range capabilities {
		if c.GetMount() == nil {
			continue
		}
		err := p.MkfsOptions.Check(cmp.Or(c.GetMount().GetFsType(), Ext4), sizeBytes)
		if err != nil {
			return err
		}
	}
	return nil
}

// Largest returns the size of the largest disk of the type.
func (p Parameters) Largest() int64 {
	if p.DiskType == DiskTypeLocal {
		return 1<<63 - GiB // only the rack knows the limit
	}
	return MaxDistributedBytes
}

// MkfsOptions contains a StorageClass's mkfs options. Only name=value pairs from a fixed list are
// allowed, so that no option overrides a safety check of mkfs or makes mkfs open a file.
type MkfsOptions struct {
	chosen []string // name=value
}

// mkfsRule contains an option's valid values. args maps a filesystem to the text before the value
// on mkfs's command line, such as "-i size=": a flag, a space, and a prefix that may be empty.
type mkfsRule struct {
	valid Values
	args  map[string]string
}

var mkfsLabel = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,11}$`)

var mkfsRules = map[string]mkfsRule{
	"bytesPerInode": {numberFrom(1024, 64<<20), map[string]string{Ext3: "-i ", Ext4: "-i "}},
	"inodeSize": {anyOf("256", "512", "1024", "2048"),
		map[string]string{Ext3: "-I ", Ext4: "-I ", XFS: "-i size="}},
	"fsBlockSize": {anyOf("1024", "2048", "4096"),
		map[string]string{Ext3: "-b ", Ext4: "-b ", XFS: "-b size="}},
	"reservedPercent": {numberFrom(0, 50), map[string]string{Ext3: "-m ", Ext4: "-m "}},
	"reflink":         {anyOf("true", "false"), map[string]string{XFS: "-m reflink="}},
	"nodeSize": {anyOf("4096", "8192", "16384", "32768", "65536"),
		map[string]string{Btrfs: "-n "}},
	"label": {Values{"1 to 12 of A-Z, a-z, 0-9, dot, underscore, hyphen, the first a letter or digit",
		mkfsLabel.MatchString}, map[string]string{Ext3: "-L ", Ext4: "-L ", XFS: "-L ", Btrfs: "-L "}},
}

// ParseMkfsOptions parses options such as "bytesPerInode=16384,reservedPercent=0". Empty text means
// no options.
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
			return MkfsOptions{}, badMkfsOptions("%.40q is not allowed; allowed are %s", name,
				allowedMkfsOptions(""))
		case !ok || !rule.valid.Contains(value):
			return MkfsOptions{}, badMkfsOptions("%s has to be %s, not %.40q", name, rule.valid.Words, value)
		case o.Value(name) != "":
			return MkfsOptions{}, badMkfsOptions("%s is given twice", name)
		}
		o.chosen = append(o.chosen, name+"="+value)
	}
	return o, nil
}

func badMkfsOptions(format string, args ...any) error {
	return csierr.New(csierr.MkfsOptions, "mkfsOptions: "+format, args...)
}

// String returns the options, sorted, in the form that ParseMkfsOptions parses.
func (o MkfsOptions) String() string {
	return strings.Join(slices.Sorted(slices.Values(o.chosen)), ",")
}

// Check returns an error if an option does not apply to the filesystem, or if mkfs cannot make the
// filesystem on a disk of this size. A size of 0 is not checked.
func (o MkfsOptions) Check(fsType string, sizeBytes int64) error {
	for _, option := range o.chosen {
		name, _, _ := strings.Cut(option, "=")
		if mkfsRules[name].args[fsType] == "" {
			return badMkfsOptions("%s does not apply to %s; allowed are %s", name, fsType,
				allowedMkfsOptions(fsType))
		}
	}
	inode, block := o.number("inodeSize", 0), o.number("fsBlockSize", 4096)
	switch {
	case fsType == XFS && inode > 0 && (inode < 512 || inode > block/2):
		return badMkfsOptions("inodeSize=%d: xfs takes 512 up to half of its block size, %d", inode,
			block)
	case inode > block:
		return badMkfsOptions("inodeSize=%d is more than fsBlockSize=%d", inode, block)
	case (fsType == Ext3 || fsType == Ext4) && sizeBytes > 0 && !o.extFits(fsType, sizeBytes):
		return badMkfsOptions("bytesPerInode=%d with inodeSize=%d and fsBlockSize=%d leaves too little "+
			"of %s of %s to files; choose a bytesPerInode of at least twice inodeSize, or a larger "+
			"fsBlockSize", o.number("bytesPerInode", extBytesPerInode), o.number("inodeSize", extInodeSize),
			block, SizeText(sizeBytes), fsType)
	}
	return nil
}

// extInodeSize and extBytesPerInode are the defaults in the driver's configuration of mke2fs.
const extInodeSize, extBytesPerInode = 256, 16384

// extFits reports whether each block group has room for its metadata, and its inode table takes at
// most three quarters of the group. Otherwise mke2fs fails. The calculation is that of
// ext2fs_initialize in mke2fs.
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
	bitmap := 8 * block // the most blocks or inodes in a group
	for group := bitmap; group >= 256; group -= 8 {
		groups := ceil(blocks, group)
		perGroup := ceil(inodes, groups)
		if perGroup > bitmap {
			continue // mke2fs then makes smaller groups
		}
		table := ceil(perGroup*o.number("inodeSize", extInodeSize), block)
		descriptors := ceil(groups*descriptor, block) + block/4 // with those reserved for growth
		if descriptors > group*3/4 {
			descriptors = 1 // meta_bg puts one into each group
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
func (o MkfsOptions) Args(fsType string) (args []string) {
	for _, option := range o.chosen {
		name, value, _ := strings.Cut(option, "=")
		if name == "reflink" {
			value = map[string]string{"true": "1", "false": "0"}[value]
		}
		if flag, prefix, known := strings.Cut(mkfsRules[name].args[fsType], " "); known {
			args = append(args, flag, prefix+value)
		}
	}
	return args
}

// Value returns an option's value, or "" if it is not set.
func (o MkfsOptions) Value(name string) string {
	for _, option := range o.chosen {
		if value, ok := strings.CutPrefix(option, name+"="); ok {
			return value
		}
	}
	return ""
}

func allowedMkfsOptions(fsType string) string {
	var names []string
	for name, rule := range mkfsRules {
		if fsType == "" || rule.args[fsType] != "" {
			names = append(names, name)
		}
	}
	return strings.Join(slices.Sorted(slices.Values(names)), ", ")
}

// Values describes the valid values of an option.
type Values struct {
	Words    string // for errors and docs/configuration.md
	Contains func(value string) bool
}

func anyOf(values ...string) Values {
	last := len(values) - 1
	words := strings.TrimPrefix(strings.Join(values[:last], ", ")+" or "+values[last], " or ")
	return Values{words, func(value string) bool { return slices.Contains(values, value) }}
}

func numberFrom(low, high int) Values {
	return Values{fmt.Sprintf("a number from %d to %d", low, high), func(value string) bool {
		n, err := strconv.Atoi(value)
		return err == nil && n >= low && n <= high && fmt.Sprint(n) == value
	}}
}
