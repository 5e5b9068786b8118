//go:build linux && powercut

package powercut_test

import (
	"fmt"
	"maps"
	"math/rand/v2"
)

const (
	ext3  = "ext3"
	ext4  = "ext4"
	xfs   = "xfs"
	btrfs = "btrfs"
	raw   = "block"
)

// filesystems are those of volumes.
var filesystems = []string{ext3, ext4, xfs, btrfs}

// The sizes of disks, before and after they grow. mkfs.xfs makes nothing below 300 MiB.
const (
	mib       = 1 << 20
	sizeBytes = 320 * mib
	grownTo   = 512 * mib
	// grownAtLeast is what a filesystem has that was grown. An xfs does not count its log, of 64 MiB.
	grownAtLeast = (sizeBytes + grownTo) / 2
)

// volume is a volume as the requests describe it.
type volume struct {
	id, disk, access string
	history          map[string]string
}

func newVolume(r *rand.Rand, access string) volume {
	a, b := r.Uint64(), r.Uint64()
	v := volume{access: access, disk: fmt.Sprintf("csi-%016x", r.Uint64()),
		id: fmt.Sprintf("%08x-%04x-4%03x-8%03x-%012x", a>>32, a>>16&0xFFFF, a&0xFFF, b>>48&0xFFF,
			b&0xFFFFFFFFFFFF),
		history: map[string]string{"origin": "blank", "use": "filesystem"}}
	if v.raw() {
		v.history["use"] = "block"
	}
	v.history["filesystemUUID"] = v.id
	return v
}

func (v volume) raw() bool { return v.access == raw }

// context is what the controller tells of the disk.
func (v volume) context(size int64) map[string]string {
	c := map[string]string{"diskName": v.disk, "sizeBytes": fmt.Sprint(size)}
	maps.Copy(c, v.history)
	return c
}
