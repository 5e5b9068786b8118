package engine

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
)

// capSysResource is the number of CAP_SYS_RESOURCE.
const capSysResource = 24

// WithoutSysResource reports whether this machine cannot give CAP_SYS_RESOURCE to a container: the
// capabilities that a process and its children can have at most lack it.
func WithoutSysResource() (bool, error) {
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return false, fmt.Errorf("read our capabilities: %w", err)
	}
	for line := range strings.Lines(string(status)) {
		var bounding uint64
		if _, err := fmt.Sscanf(line, "CapBnd:\t%x", &bounding); err == nil {
			return bounding&(1<<capSysResource) == 0, nil
		}
	}
	return false, fmt.Errorf("read our capabilities: no line CapBnd in %q", status)
}

// watchersNeeded is how many inotify instances three nodes use: each has systemd, containerd, a
// kubelet and their children.
const watchersNeeded = 512

// raiseWatchers raises the kernel's limit of inotify instances if it is too low for a cluster.
func raiseWatchers(log io.Writer, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return fmt.Errorf("read the limit of inotify instances: %w", err)
	}
	limit, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return fmt.Errorf("read the limit of inotify instances: %w", err)
	}
	if limit >= watchersNeeded {
		return nil
	}
	if err := os.WriteFile(file, []byte(strconv.Itoa(watchersNeeded)), 0); err != nil {
		return fmt.Errorf("fs.inotify.max_user_instances is %d and three nodes need %d: "+
			"raise it with sysctl: %w", limit, watchersNeeded, err)
	}
	fmt.Fprintf(log, "engine: raised fs.inotify.max_user_instances from %d to %d; it stays so\n",
		limit, watchersNeeded)
	return nil
}

// unmountTime is how long the last threads of an engine that has ended may keep a mount busy.
const unmountTime = 20 * time.Second

// unmountBelow unmounts what a killed engine has left mounted in its directory, the last mounts
// first.
func unmountBelow(ctx context.Context, dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return fmt.Errorf("look for what the engine left mounted: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, unmountTime)
	defer cancel()
	var problems []error
	for i := len(mounts) - 1; i >= 0; i-- {
		problems = append(problems, unmount(ctx, mounts[i].Mountpoint))
	}
	return errors.Join(problems...)
}

func unmount(ctx context.Context, path string) error {
	for {
		err := unix.Unmount(path, 0)
		switch {
		case err == nil:
			return nil
		case !errors.Is(err, syscall.EBUSY):
			return fmt.Errorf("unmount %s: %w", path, err)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("unmount %s: %w", path, err)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
