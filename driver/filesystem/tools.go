package filesystem

import "os/exec"

// Tools are the programs the node runs. Mounting needs none: that is done by system calls,
// which keeps mount flags out of the process list.
var Tools = []string{
	"blkid", "mke2fs", "e2fsck", "resize2fs", "mkfs.xfs", "mkfs.btrfs", "btrfs",
}

// MissingTools names the programs the node needs and cannot find. Probe answers with them.
func MissingTools() []string {
	var missing []string
	for _, tool := range Tools {
		if _, err := exec.LookPath(tool); err != nil {
			missing = append(missing, tool)
		}
	}
	return missing
}
