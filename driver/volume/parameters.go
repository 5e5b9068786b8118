package volume

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// The parameters of a StorageClass. blockSize and MkfsOptions have the keys of the contexts.
const (
	ParamDiskType    = "diskType"
	paramBlockSize   = CtxBlockSize
	ParamImageID     = "imageId"
	ParamMkfsOptions = CtxMkfsOptions

	// DefaultBlockSize is a blank disk's when nobody chose: what today's filesystems work in.
	DefaultBlockSize = 4096
	// localBlockSize is the only one that local disks have.
	localBlockSize = 4096
)

var (
	parameterNames = []string{paramBlockSize, ParamDiskType, ParamImageID, ParamMkfsOptions}
	// BlockSizes are those a disk may have, in bytes.
	BlockSizes = []int{512, 2048, 4096}
	// foreignKeys begin what a CO adds to parameters and contexts for itself.
	foreignKeys = []string{"csi.storage.k8s.io/", "storage.kubernetes.io/"}
)

// DiskType is a kind of the rack's disks, in the rack's own word.
type DiskType string

// The disk types: on the storage of the whole rack, or on the drives of one sled.
const (
	DiskTypeDistributed DiskType = "distributed"
	DiskTypeLocal       DiskType = "local"
)

// Parameters are a StorageClass's, checked. The zero BlockSize says that nobody chose one.
type Parameters struct {
	DiskType    DiskType
	BlockSize   int
	ImageID     string
	MkfsOptions MkfsOptions
}

// ForeignKey reports whether a CO adds a parameter with that key for itself.
func ForeignKey(key string) bool {
	return slices.ContainsFunc(foreignKeys, func(p string) bool {
		return strings.HasPrefix(key, p)
	})
}

// ParseParameters reads the parameters of a StorageClass.
func ParseParameters(values map[string]string) (Parameters, error) {
	p := Parameters{DiskType: DiskTypeDistributed}
	for key, value := range values {
		var err error
		switch key {
		case ParamDiskType:
			p.DiskType = DiskType(value)
			if p.DiskType != DiskTypeDistributed && p.DiskType != DiskTypeLocal {
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
		default:
			if !ForeignKey(key) {
				return p, csierr.New(csierr.ParameterInvalid, "the parameter "+
					"%.80q is unknown; known are %s", key, strings.Join(parameterNames, ", "))
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

// contradiction is what no disk can be.
func (p Parameters) contradiction() error {
	if p.DiskType != DiskTypeLocal {
		return nil
	}
	switch {
	case p.BlockSize != 0 && p.BlockSize != localBlockSize:
		return csierr.New(csierr.ParameterInvalid, "blockSize has to be %d with "+
			"diskType local", localBlockSize)
	case p.ImageID != "":
		return csierr.New(csierr.ParameterInvalid, "imageId does not go with "+
			"diskType local: local disks begin blank")
	}
	return nil
}

// Fits says whether the parameters mean something for the capabilities.
func (p Parameters) Fits(capabilities []*csi.VolumeCapability) error {
	for _, c := range capabilities {
		if c.GetMount() == nil {
			continue
		}
		fsType := c.GetMount().GetFsType()
		if fsType == "" {
			fsType = Ext4
		}
		if err := p.MkfsOptions.Check(fsType); err != nil {
			return csierr.New(csierr.MkfsOptions, "%s", err.Error())
		}
	}
	return nil
}

// Largest is the largest disk of the type.
func (p Parameters) Largest() int64 {
	if p.DiskType == DiskTypeLocal {
		return 1<<63 - GiB // the rack knows its drives
	}
	return MaxDistributedBytes
}
