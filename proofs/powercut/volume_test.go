//go:build linux

package powercut_test

import (
	"fmt"
	"maps"
	"math/rand/v2"

	"github.com/google/uuid"
)

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
	raw   = "block"
)

// filesystems are the filesystems of volumes.
var filesystems = []string{ext3, ext4, xfs, btrfs}

// The sizes of disks before and after they grow. mkfs.xfs needs at least 300 MiB.
const (
	mib       = 1 << 20
	sizeBytes = 320 * mib
	grownTo   = 512 * mib
	// grownAtLeast is the minimum size of a filesystem that has grown. An xfs does not count its
	// log, of 64 MiB.
	grownAtLeast = (sizeBytes + grownTo) / 2
)

// volume contains the values of a volume in requests.
type volume struct {
	id, disk, access string
	history          map[string]string
}

// newVolume returns a volume with a new UUID, because the kernel identifies a btrfs by its
// UUID.
func newVolume(access string) volume {
	v := volume{access: access, id: uuid.NewString(), disk: fmt.Sprintf("csi-%016x", rand.Uint64()),
		history: map[string]string{"origin": "blank", "use": "filesystem"}}
	if v.raw() {
		v.history["use"] = "block"
	}
	v.history["filesystemUUID"] = v.id
	return v
}

func (v volume) raw() bool { return v.access == raw }

// context returns the controller's report about the disk.
func (v volume) context(size int64) map[string]string {
	c := map[string]string{"diskName": v.disk, "sizeBytes": fmt.Sprint(size)}
	maps.Copy(c, v.history)
	return c
}
