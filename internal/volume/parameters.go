package volume

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// The parameters of a StorageClass. blockSize and mkfsOptions have the same keys in the contexts.
const (
	ParamDiskType    = "diskType"
	paramBlockSize   = CtxBlockSize
	ParamImageID     = "imageId"
	ParamMkfsOptions = CtxMkfsOptions
	paramPlacement   = "placement"

	foreignPrefix = "csi.storage.k8s.io/"

	// DefaultBlockSize is the default block size of a blank disk, which today's filesystems use.
	DefaultBlockSize = 4096
	// localBlockSize is the block size of every local disk.
	localBlockSize = 4096
)

var (
	parameterNames = []string{paramBlockSize, ParamDiskType, ParamImageID, ParamMkfsOptions,
		paramPlacement}
	// BlockSizes are the block sizes of disks, in bytes.
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

// DiskType is the type of a disk, in the rack's terms.
type DiskType string

// The disk types: on the storage of the whole rack, or on the drives of one sled.
const (
	diskTypeDistributed DiskType = "distributed"
	DiskTypeLocal       DiskType = "local"
)

// Parameters are the parsed parameters of a StorageClass. A BlockSize of 0 means not set.
type Parameters struct {
	DiskType    DiskType
	BlockSize   int
	ImageID     string
	MkfsOptions MkfsOptions
	Placement   Placement
}

// ForeignKey reports whether a key is one that a CO adds for itself.
func ForeignKey(key string) bool { return slices.Contains(foreignKeys, key) }

// UnknownParameter returns the error for a parameter that is neither one of the driver's own nor a
// foreign key.
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

// similarity returns the number of letters that two names share at their beginning and end, minus
// the difference of their lengths.
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

// Claim returns the namespace and name of the claim, or of the VolumeSnapshot, from the parameters
// of a create call. They are there if external-provisioner and external-snapshotter have
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
			p.BlockSize, err = parseBlockSize(value)
		case ParamImageID:
			id, ok := ParseID(value)
			if p.ImageID = id; !ok {
				err = errors.New("has to be the UUID of an image, not a name")
			}
		case ParamMkfsOptions:
			if p.MkfsOptions, err = ParseMkfsOptions(value); err != nil {
				return p, csierr.New(csierr.MkfsOptions, "%s", err.Error())
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
	return p, p.contradiction()
}

func parseBlockSize(value string) (int, error) {
	n, err := strconv.Atoi(value)
	if err != nil || !slices.Contains(BlockSizes, n) {
		return 0, fmt.Errorf("has to be 512, 2048 or 4096, not %.40q", value)
	}
	return n, nil
}

func (p Parameters) contradiction() error {
	if p.DiskType != DiskTypeLocal {
		return nil
	}
	switch {
	case p.BlockSize != 0 && p.BlockSize != localBlockSize:
		return csierr.New(csierr.ParameterInvalid, "blockSize has to be %d with "+
			"diskType local", localBlockSize)
	case p.ImageID != "":
		return csierr.New(csierr.ParameterInvalid, "imageId cannot be combined with diskType local: "+
			"local disks are created blank")
	}
	return nil
}

// Fits returns an error if the parameters do not apply to the capabilities of a disk of that size.
// Size 0 means that the filesystem may be on the disk already.
func (p Parameters) Fits(capabilities []*csi.VolumeCapability, sizeBytes int64) error {
	for _, c := range capabilities {
		if c.GetMount() == nil {
			continue
		}
		fsType := c.GetMount().GetFsType()
		if fsType == "" {
			fsType = Ext4
		}
		if err := p.MkfsOptions.Check(fsType, sizeBytes); err != nil {
			return csierr.New(csierr.MkfsOptions, "%s", err.Error())
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
