package guest

import (
	"fmt"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// mountTemporary mounts a tmpfs at the agent's directory.
func mountTemporary(dir string) error {
	if err := unix.Mount("oxide-guest", dir, "tmpfs", unix.MS_NOSUID, "mode=0700"); err != nil {
		return fmt.Errorf("mount a tmpfs at %s: %w; run as root", dir, err)
	}
	return nil
}

// unmountTemporary unmounts it, with everything below; what there was is an error.
func unmountTemporary(dir string) error {
	mounts, err := harness.MountsBelow(dir)
	if err != nil {
		return err
	}
	if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
		return fmt.Errorf("unmount %s: %w", dir, err)
	}
	if len(mounts) > 1 {
		return fmt.Errorf("the instance still had volumes mounted, which are unmounted now:\n  %s",
			strings.Join(mounts[1:], "\n  "))
	}
	return nil
}
