package filesystem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/blockdev"
	"github.com/oxidecomputer/oxide-csi-plugin/driver/mount"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/flight"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

type disk struct{ *blockdev.OpenDevice }

// Preparation makes the filesystem of one volume ready to be mounted.
type Preparation struct {
	Device *blockdev.OpenDevice // stays open from the scan to the mount
	Volume Volume
	Scans  *ZeroScans
	Flight flight.Call // records the changes to the disk
	Log    *slog.Logger
	// Run calls Begin once, after all proofs and before it writes anything to the disk. coversBytes is
	// the size of the filesystem if it does not cover its disk, and otherwise 0.
	Begin func(coversBytes int64) error
}

// Run formats the device if it is blank, and otherwise checks and grows its filesystem. It returns
// true if the caller has to grow the filesystem after the mount. If ctx is canceled, Run stops
// waiting for a read of the whole disk, which continues. All other steps run to their end.
func (p *Preparation) Run(ctx context.Context) (grow bool, err error) {
	d, v := disk{p.Device}, p.Volume
	found, err := d.inspect(v)
	if err == nil {
		err = d.allow(found.Filesystem)
	}
	if err == nil && found.Filesystem.Damaged { // a growth was cut off
		err = d.allowCopy(found.Filesystem)
	}
	if err != nil {
		return false, err
	}
	if found.NeedsCheck && !v.ReadOnly {
		if found.Unfinished, err = d.btrfsBroken(); err != nil {
			return false, err
		}
	}
	sb := found.Filesystem
	switch {
	case (found.Blank || found.Unfinished) && v.ReadOnly:
		return false, csierr.New(csierr.DeviceReadOnly, "%s holds no filesystem yet and is read-only, "+
			"so it cannot be formatted", d.Path)
	case found.Blank, found.Unfinished:
		left, err := p.proveBlank(ctx, found.Unfinished)
		if err != nil {
			return false, err
		}
		if err := p.Begin(0); err != nil {
			return false, err
		}
		if found.Filesystem, err = p.format(found.Unfinished, left); err != nil {
			return false, err
		}
		p.Scans.Drop(v.ID) // the disk is no longer blank
	case !sb.isOf(v) && (!found.NeedsCheck || v.ReadOnly):
		return false, d.wrongFilesystem(sb, v.FilesystemUUID)
	case sb.Type != v.FSType:
		return false, csierr.New(csierr.DiskNotBlank, "%s holds an %s filesystem, but the request is "+
			"for %s; the driver does not format it", d.Path, sb.Type, v.FSType)
	default:
		if err := p.proveMountable(ctx, &found); err != nil {
			return false, err
		}
	}
	if !v.ReadOnly {
		if err := p.finish(found); err != nil {
			return false, err
		}
	}
	p.confirm(found)
	return found.Grow, nil
}

// confirm records in the flight recorder that the changes of an earlier process were made, because
// the filesystem shows them.
func (p *Preparation) confirm(found state) {
	about := flight.Fields{Filesystem: p.Volume.FSType}
	p.Flight.Confirm(flight.Formatted, flight.Fields{}, about)
	p.Flight.Confirm(flight.FilesystemChecked, flight.Fields{}, about)
	if !found.Grow {
		p.Flight.Confirm(flight.FilesystemGrown, flight.Fields{}, about)
	}
}

// proveMountable proves that nothing else uses the device and that it is still the same device. It
// also decides whether the filesystem may grow.
func (p *Preparation) proveMountable(ctx context.Context, found *state) error {
	covers := int64(0)
	if err := p.Device.AwaitNoWriters(); err != nil {
		return err
	}
	if err := p.Device.Reverify(); err != nil {
		return err
	}
	if p.Volume.ReadOnly && found.Filesystem.Logged {
		return notReplayed(p.Device, errors.New("a btrfs has a tree of the last fsyncs"))
	}
	if !p.Volume.ReadOnly {
		var err error
		if found.Grow, err = p.mayGrow(ctx, *found); err != nil {
			return err
		}
		if sb := found.Filesystem; !found.Grow && sb.leavesRoom(p.Device.SizeBytes) {
			covers = sb.SizeBytes
		}
	}
	// TryExclusive is the last check, because it may thaw a frozen filesystem, and a call that fails
	// must not do that.
	if err := TryExclusive(p.Log, p.Device); err != nil {
		return err
	}
	return p.Begin(covers)
}

// mayGrow decides whether the filesystem may grow: only if all bytes of the device behind the
// filesystem are proven to be zero or written by an interrupted growth. Other bytes may be data, so
// the driver mounts the filesystem without growing it. After an interrupted growth, unreadable
// bytes make the call fail instead, because a mount would make the records of the growth invalid.
func (p *Preparation) mayGrow(ctx context.Context, found state) (bool, error) {
	if !found.Filesystem.canGrow(p.Device.SizeBytes) && !found.Growing {
		return false, nil
	}
	err := p.proveTail(ctx, found.Filesystem.SizeBytes, found.behind())
	notProven := csierr.Has(err, csierr.DiskNotBlank) ||
		csierr.Has(err, csierr.DeviceUnreadable) && !found.Growing
	if notProven && !found.Filesystem.Damaged {
		p.Log.Warn("the filesystem is smaller than its disk and is not grown",
			"volume", p.Volume.ID, "device", p.Device.Path,
			"filesystem_bytes", found.Filesystem.SizeBytes, "disk_bytes", p.Device.SizeBytes, "error", err)
		return false, nil
	}
	return err == nil, err
}

// proveTail proves that every byte of the device from an offset on is zero or allowed by e. It
// reads every byte, even if the rack reports that it created this part blank: that report is no
// proof, and a growth needs this read only once.
func (p *Preparation) proveTail(ctx context.Context, from int64, e expected) error {
	_, err := p.proveRange(ctx, from, p.Device.SizeBytes, e)
	return err
}

// finish grows an ext3 or ext4, which before the mount needs no privilege beyond the device, or
// checks one that was not unmounted cleanly. xfs and btrfs grow after the mount (see GrowMounted).
func (p *Preparation) finish(found state) error {
	d, sb := disk{p.Device}, found.Filesystem
	// The check and the mount must read the disk. The kernel's cache may differ from it.
	if err := p.Device.DropCache(); err != nil {
		return err
	}
	if found.NeedsCheck {
		if err := d.finishFormat(p.Volume, sb); err != nil {
			return err
		}
	}
	switch {
	case sb.SizeBytes > d.SizeBytes:
		return csierr.New(csierr.FilesystemTooLarge, "%s has %s, but its %s filesystem has %s; "+
			"was the disk truncated, or is it another disk?", d.Path, volume.SizeText(d.SizeBytes),
			sb.Type, volume.SizeText(sb.SizeBytes))
	case sb.isExt() && found.Grow:
		return p.growExt(found)
	case sb.isExt() && sb.Unclean:
		return p.checkExt("-p")
	}
	return nil
}

// Mount calls mount.New and explains the kernel's refusals. On a read-only device the kernel
// refuses an ext or xfs with a log to replay (EROFS), and proveMountable refuses such a btrfs.
func Mount(d *blockdev.OpenDevice, fsType string, o volume.MountOptions) (*mount.Mount, error) {
	m, err := mount.New(d, fsType, o)
	if errors.Is(err, unix.EROFS) {
		return nil, notReplayed(d, err)
	}
	if csierr.Has(err, csierr.FilesystemFeature) {
		if found, failed := Find(d); failed == nil && len(found) == 1 {
			err = csierr.New(csierr.FilesystemFeature, "%w; the filesystem is damaged, or this node's "+
				"kernel does not support a feature of it: the kernel's log says which; it has %s", err,
				found[0].Features)
		}
	}
	return m, err
}

func notReplayed(d *blockdev.OpenDevice, cause error) error {
	return csierr.New(csierr.LogNotReplayed, "%w: %s is read-only, and the log of its filesystem "+
		"holds changes to replay, without which synced files may be missing; restore the snapshot to a "+
		"writable volume, and take it again when a pod has used that and is gone", cause, d.Path)
}

const forgetWait = time.Second

// forgetting contains an element while mount.ForgetBtrfs runs.
var forgetting = make(chan struct{}, 1)

// ForgetBtrfs calls mount.ForgetBtrfs for an unmounted device if it holds a btrfs.
//
// The kernel visits every btrfs of the node in that call, and waits if one of them hangs in a
// commit. So ForgetBtrfs skips devices without a btrfs, and waits at most for forgetWait. While a
// thread is stuck in the kernel, later calls start no other one.
func ForgetBtrfs(d *blockdev.OpenDevice) {
	found, _ := Find(d)
	if !slices.ContainsFunc(found, func(sb Superblock) bool { return sb.Type == volume.Btrfs }) {
		return
	}
	limit := time.NewTimer(forgetWait)
	defer limit.Stop()
	select {
	case forgetting <- struct{}{}:
	case <-limit.C:
		return
	}
	forgotten := make(chan struct{})
	async.Detach(func() {
		mount.ForgetBtrfs("/dev/btrfs-control", d.Path)
		<-forgetting
		close(forgotten)
	})
	select {
	case <-forgotten:
	case <-limit.C:
	}
}

// TryExclusive calls OpenDevice.TryExclusive for a device that is mounted nowhere. A filesystem
// that was frozen and then unmounted still uses the device, until TryExclusive thaws it.
func TryExclusive(log *slog.Logger, d *blockdev.OpenDevice) error {
	err := d.TryExclusive()
	if !csierr.Has(err, csierr.DeviceHeld) {
		return err
	}
	if failed := thawUnmounted(log, d); failed != nil {
		return csierr.New(csierr.DeviceHeld, "%w; %w", err, failed)
	}
	return d.TryExclusive()
}

// thawUnmounted thaws the filesystem that keeps the device busy if it is mounted nowhere. It thaws
// no mounted filesystem, because a user may rely on the freeze. It opens the filesystem through a
// detached mount. If no mount succeeds, something else keeps the device busy. The first attempt
// replays no log, because it is a new mount if the filesystem has released the device meanwhile.
func thawUnmounted(log *slog.Logger, d *blockdev.OpenDevice) error {
	views, err := mount.ReadViews(log)
	if err != nil {
		return err
	}
	if mounts := views.Of(d.Device, nil); len(mounts) > 0 {
		return fmt.Errorf("it is mounted at %s", mount.Describe(mounts))
	}
	found, err := Find(d)
	if err != nil || len(found) != 1 || found[0].Refused != "" {
		return err
	}
	// If the filesystem is in use read-only, the kernel accepts only another read-only mount. If it is
	// in use for writing, most filesystems accept only another writable mount. So try both.
	readOnly := unreplayed(found[0].Type)
	m, err := mount.New(d, found[0].Type, readOnly)
	if err != nil {
		m, err = mount.New(d, found[0].Type, volume.MountOptions{})
	}
	if err != nil {
		return nil
	}
	defer func() { _ = m.Close() }()
	root, err := m.Root()
	if err != nil {
		return err
	}
	if err := errors.Join(mount.Thaw(root), root.Close()); err != nil {
		return fmt.Errorf("the filesystem that holds it could not be thawed: %w", err)
	}
	return nil
}

// unreplayed returns the options of a read-only mount that does not replay the log.
func unreplayed(fsType string) (o volume.MountOptions) {
	o.SetReadOnly()
	switch fsType {
	case volume.Ext3, volume.Ext4:
		o.AddData("noload")
	case volume.XFS:
		o.AddData("norecovery")
	case volume.Btrfs:
		o.Data = append(o.Data, volume.MountOption{Key: "rescue", Value: "nologreplay", HasValue: true})
	}
	return o
}

type toolResult struct {
	Exit   int
	Stdout string
	Stderr string
}

// runTool runs a program to its end and returns its output and exit code. It returns an error only
// if the program could not run. It takes no context, because nothing may interrupt a started
// program. The files in inherit become the program's descriptors from 3 on.
//
// The kernel kills the program if the driver dies, so that no mkfs writes to the disk while the
// next driver reads it. A later call must be able to run a killed program again from the start.
func runTool(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(&syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}, inherit, name, args)
}

// runRepair does what runTool does, but the program continues if the driver dies, because an
// interrupted repair or resize damages the filesystem. The program keeps the device open with
// O_EXCL until it ends.
func runRepair(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(nil, inherit, name, args)
}

// inherited is the path of the first descriptor that a program inherits. A program that opens this
// path opens the verified device, even if the disk's own path now leads to another device.
const inherited = "/proc/self/fd/3"

// extConfig replaces the machine's mke2fs.conf and e2fsck.conf: those could change the layout of a
// new ext3 or ext4 and the way a check repairs it. mke2fs gets the features as arguments.
const extConfig = `[defaults]
blocksize = 4096
inode_ratio = 16384
default_mntopts = acl,user_xattr
enable_periodic_fsck = 0
[fs_types]
ext3 = {
	inode_size = 256
}
ext4 = {
	inode_size = 256
}
small = {
	blocksize = 1024
	inode_ratio = 4096
}
`

func runProgram(attr *syscall.SysProcAttr, inherit []*os.File, name string, args []string) (
	result toolResult, err error) {
	// After the driver's death nobody would read a pipe, so the program writes to files in memory.
	stdout, err := memoryFile(name, "")
	if err != nil {
		return result, err
	}
	defer func() { _ = stdout.Close() }()
	stderr, err := memoryFile(name, "")
	if err != nil {
		return result, err
	}
	defer func() { _ = stderr.Close() }()
	config, err := memoryFile(name, extConfig)
	if err != nil {
		return result, err
	}
	defer func() { _ = config.Close() }()
	path := fmt.Sprintf("/proc/self/fd/%d", 3+len(inherit))
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.ExtraFiles = append(slices.Clone(inherit), config)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "MKE2FS_CONFIG=" + path,
		"E2FSCK_CONFIG=" + path}
	cmd.SysProcAttr = attr
	// The kernel sends Pdeathsig when the thread that started the child ends, so keep the thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited():
		result.Exit = exit.ExitCode()
	case err != nil:
		return result, csierr.New(csierr.NodeToolFailed, "run %s: %w", name, err)
	}
	if result.Stdout, err = contents(stdout); err != nil {
		return result, err
	}
	result.Stderr, err = contents(stderr)
	return result, err
}

func memoryFile(name, content string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a file in memory for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.WriteString(content)
	return f, err
}

func contents(f *os.File) (string, error) {
	const maxBytes = 1 << 20
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxBytes))
	return string(b), err
}

func (r toolResult) failure(name, path string) error {
	return csierr.New(csierr.NodeToolFailed, "%s on %s ended with status %d: %s", name, path, r.Exit,
		csierr.OutputTail(r.Stdout+"\n"+r.Stderr))
}
