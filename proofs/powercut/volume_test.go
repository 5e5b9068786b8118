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

const mib = 1 << 20

// sizes contains the sizes of disks before they grow. They are small because the driver reads
// many of them whole. mkfs.xfs needs at least 300 MiB, and the kernel grows a btrfs to at least
// 256 MiB.
var sizes = map[string]int64{ext3: 128 * mib, ext4: 128 * mib, xfs: 320 * mib, btrfs: 192 * mib,
	raw: 128 * mib}

// volume contains the values of a volume in requests.
type volume struct {
	id, disk, access string
	// size is the size of the disk before it grows.
	size    int64
	history map[string]string
}

// newVolume returns a volume with a new UUID, because the kernel identifies a btrfs by its
// UUID.
func newVolume(access string) volume {
	v := volume{access: access, id: uuid.NewString(), disk: fmt.Sprintf("csi-%016x", rand.Uint64()),
		size: sizes[access], history: map[string]string{"origin": "blank", "use": "filesystem"}}
	if v.raw() {
		v.history["use"] = "block"
	}
	v.history["filesystemUUID"] = v.id
	return v
}

func (v volume) raw() bool { return v.access == raw }

// grownTo returns the size of the disk after it has grown.
func (v volume) grownTo() int64 { return v.size / 2 * 3 }

// grownAtLeast returns the minimum size of a filesystem that has grown. An xfs does not count
// its log, of 64 MiB.
func (v volume) grownAtLeast() int64 { return (v.size + v.grownTo()) / 2 }

// context returns the controller's report about the disk.
func (v volume) context(size int64) map[string]string {
	c := map[string]string{"diskName": v.disk, "sizeBytes": fmt.Sprint(size)}
	maps.Copy(c, v.history)
	return c
}
