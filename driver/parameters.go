package driver

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// The parameters of a StorageClass. blockSize and mkfsOptions have the keys of the contexts.
const (
	paramDiskType    = "diskType"
	paramBlockSize   = ctxBlockSize
	paramImageID     = "imageId"
	paramMkfsOptions = ctxMkfsOptions

	// defaultBlockSize is a blank disk's when nobody chose: what today's filesystems work in.
	defaultBlockSize = 4096
	// localBlockSize is the only one that local disks have.
	localBlockSize = 4096
)

var (
	parameterNames = []string{paramBlockSize, paramDiskType, paramImageID, paramMkfsOptions}
	blockSizes     = []int{512, 2048, 4096}
	// foreignKeys begin what a CO adds to parameters and contexts for itself.
	foreignKeys = []string{"csi.storage.k8s.io/", "storage.kubernetes.io/"}
)

// parameters are a StorageClass's, checked. The zero BlockSize says that nobody chose one.
type parameters struct {
	DiskType    oxide.DiskType
	BlockSize   int
	ImageID     oxide.NameOrId
	MkfsOptions mkfsOptions
}

func foreignKey(key string) bool {
	return slices.ContainsFunc(foreignKeys, func(p string) bool {
		return strings.HasPrefix(key, p)
	})
}

func parseParameters(values map[string]string) (parameters, error) {
	p := parameters{DiskType: oxide.DiskTypeDistributed}
	for key, value := range values {
		var err error
		switch key {
		case paramDiskType:
			p.DiskType = oxide.DiskType(value)
			if p.DiskType != oxide.DiskTypeDistributed && p.DiskType != oxide.DiskTypeLocal {
				err = fmt.Errorf("has to be distributed or local, not %.40q", value)
			}
		case paramBlockSize:
			p.BlockSize, err = parseBlockSize(value)
		case paramImageID:
			id, ok := rackID(value)
			if p.ImageID = id; !ok {
				err = errors.New("has to be the UUID of an image, not a name")
			}
		case paramMkfsOptions:
			if p.MkfsOptions, err = parseMkfsOptions(value); err != nil {
				return p, csierr.New(csierr.MkfsOptions, "%s", err.Error())
			}
		default:
			if !foreignKey(key) {
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
	if err != nil || !slices.Contains(blockSizes, n) {
		return 0, fmt.Errorf("has to be 512, 2048 or 4096, not %.40q", value)
	}
	return n, nil
}

// contradiction is what no disk can be.
func (p parameters) contradiction() error {
	if p.DiskType != oxide.DiskTypeLocal {
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

// fits says whether the parameters mean something for the capabilities.
func (p parameters) fits(capabilities []*csi.VolumeCapability) error {
	for _, c := range capabilities {
		if c.GetMount() == nil {
			continue
		}
		fsType := c.GetMount().GetFsType()
		if fsType == "" {
			fsType = fsExt4
		}
		if err := p.MkfsOptions.check(fsType); err != nil {
			return csierr.New(csierr.MkfsOptions, "%s", err.Error())
		}
	}
	return nil
}

// largest is the largest disk of the type.
func (p parameters) largest() int64 {
	if p.DiskType == oxide.DiskTypeLocal {
		return 1<<63 - gibBytes // the rack knows its drives
	}
	return maxDistributedBytes
}
