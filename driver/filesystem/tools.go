package filesystem

import "os/exec"

// Tools are the programs the node runs. Mounting needs none: the driver calls the kernel, which
// also keeps mount flags out of the process list.
var Tools = []string{
	"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs", "btrfs",
}

// MissingTools returns the programs that the node needs and that are not in its PATH.
func MissingTools() []string {
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}
