package proof

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// These are the roles of the disks in [Bystanders], and the disks' indexes in its arrays.
const (
	MountedDisk = iota
	MemberDisk
	BlankDisk
	bystanders
)

// Member is a kind of disk: one of the two disks of a filesystem. The other disk is missing.
type Member string

// The kernel does not use these disks: the disk that refers to them by number or UUID is missing.
const (
	Journal     Member = "the journal of an ext4"
	BtrfsMember Member = "one of two devices of a btrfs"
)

// Bystanders are three disks of an instance that no CSI call names: a mounted ext4 with a file, a
// [Member], and a blank disk. Nothing may write to them.
//
// The kernel itself does not write to the mounted disk, because the inode tables are complete, the
// journal is empty, and noatime prevents updates of access times. Any other write through the loop
// device changes the backing file's modification time, so Check compares that time.
//
// A nil *Bystanders has no disks. Its checks succeed.
type Bystanders struct {
	count      *Invariant
	files      [bystanders]string
	mountpoint string
	// loops are NewGuestBystanders' loop devices; ids are the UUIDs of NewRackBystanders' disks.
	loops   []loopdev.Device
	ids     []string
	states  [bystanders]FileState
	mounted bool
}

var roles = [bystanders]string{"the mounted disk", "the member", "the blank disk"}

// bystanderBytes is the size of each disk of NewGuestBystanders, about the minimum of mkfs.btrfs.
const bystanderBytes = 128 << 20

// NewGuestBystanders makes disks from files in a directory, for a guest view without a rack. Show
// adds them to the guest view.
func NewGuestBystanders(ctx context.Context, dir string, member Member,
	count *Invariant) (b *Bystanders, err error) {
	b = &Bystanders{count: count}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	defer harness.Catch(&err)
	for i := range b.files {
		b.files[i] = filepath.Join(dir, fmt.Sprint("bystander-", i))
		harness.Must(errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(b.files[i], nil, 0o600),
			os.Truncate(b.files[i], bystanderBytes)))
	}
	b.fill(dir, member)
	for i, file := range b.files {
		b.loops = append(b.loops, harness.Got(loopdev.Attach(ctx, loopdev.Config{Path: file,
			Serial: fmt.Sprintf("bystander-%d-%.16s", i, rand.Text()), Owner: loopdev.Process()})))
	}
	return b, b.Mount()
}

// Show attaches the disks to a guest. GuestView.Unplug detaches them.
func (b *Bystanders) Show(guest GuestView) (err error) {
	if b == nil {
		return nil
	}
	for i, loop := range b.loops {
		err = errors.Join(err, guest.Plug(fmt.Sprintf("nvme%dn1", 7+i),
			fmt.Sprint("bystander-", i), loop))
	}
	return err
}

// Loop returns the loop device of the disk with this role. b has to be from NewGuestBystanders.
func (b *Bystanders) Loop(role int) loopdev.Device { return b.loops[role] }

// NewRackBystanders creates disks through the rack's API, without a driver, and attaches them to an
// instance. The caller must close the result even after an error.
func NewRackBystanders(ctx context.Context, rack *harness.Rack, instance string, member Member,
	count *Invariant) (b *Bystanders, err error) {
	b = &Bystanders{count: count}
	defer harness.Catch(&err)
	for i := range b.files {
		disk := harness.Got(rack.CreateDisk(ctx, rack.Project,
			fmt.Sprintf("bystander-%s-%d", instance, i), harness.GiB))
		b.ids, b.files[i] = append(b.ids, disk.Id), DiskFile(rack, disk.Id)
	}
	b.fill(rack.Dir+"-bystanders-"+instance, member)
	for _, id := range b.ids {
		harness.Must(rack.AttachDisk(ctx, id, rack.Instance(instance).ID))
	}
	return b, b.Resume(ctx)
}

// Has reports whether the rack's disk with this UUID is a bystander.
func (b *Bystanders) Has(id string) bool { return slices.Contains(b.ids, id) }

// Resume mounts MountedDisk after Suspend. It waits until the rack has attached the disk.
func (b *Bystanders) Resume(ctx context.Context) error {
	return harness.Await(ctx, 20*time.Second, b.Mount)
}

// fill makes the ext4, the member and, in the directory dir, the mount point. All files must be
// blank. No loop device may use them yet.
func (b *Bystanders) fill(dir string, member Member) {
	b.mountpoint = filepath.Join(dir, "mounted")
	harness.Must(os.MkdirAll(b.mountpoint, 0o755))
	// Without lazy initialization, mke2fs writes all inode tables and the journal, so keep both small.
	harness.Must(RunTool("mke2fs", "-q", "-F", "-t", "ext4", "-N", "64", "-J", "size=4",
		"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", b.files[MountedDisk]))
	file := b.files[MemberDisk]
	if member == Journal {
		harness.Must(RunTool("mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", file, "1024"))
		return
	}
	// The first device of the btrfs is deleted, so that the kernel cannot find it.
	other := filepath.Join(dir, "other")
	harness.Must(errors.Join(os.WriteFile(other, nil, 0o600),
		os.Truncate(other, harness.Got(os.Stat(file)).Size())))
	harness.Must(errors.Join(RunTool("mkfs.btrfs", "-q", "-f", "-K", "-d", "single", "-m", "raid1",
		other, file), os.Remove(other)))
}

// RunTool runs a program. Its error contains what the program has printed.
func RunTool(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// WriteAt writes bytes durably to an existing file or a device.
func WriteAt(path string, at int64, b ...byte) error {
	file, err := os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0)
	if err != nil {
		return err
	}
	_, err = file.WriteAt(b, at)
	return errors.Join(err, file.Close())
}

// Mount mounts MountedDisk if it is not mounted, writes a file, and records all disks' states.
func (b *Bystanders) Mount() (err error) {
	defer harness.Catch(&err)
	if b.mounted {
		return nil
	}
	device := deviceOf(b.files[MountedDisk])
	harness.Must(harness.Wrap(unix.Mount(device.Path, b.mountpoint, "ext4", unix.MS_NOATIME, ""),
		"mount a bystander"))
	b.mounted = true
	harness.Must(os.WriteFile(filepath.Join(b.mountpoint, "file"), []byte("somebody works here"),
		0o600))
	// A freeze makes the kernel write all data and empty the journal.
	harness.Must(errors.Join(SetFrozen(b.mountpoint, true), SetFrozen(b.mountpoint, false),
		device.Sync()))
	for i, file := range b.files {
		b.states[i] = harness.Got(ReadFileState(file))
	}
	return nil
}

func deviceOf(file string) loopdev.Device {
	var st unix.Stat_t
	harness.Must(unix.Stat(file, &st))
	for _, d := range harness.Got(loopdev.List()) {
		if d.BackingInode == st.Ino && d.BackingDevice == st.Dev && !d.Releasing {
			return d
		}
	}
	harness.Must(fmt.Errorf("%s has no loop device", file))
	return loopdev.Device{}
}

// Check returns an error if somebody has written to a disk since the last check, or has unmounted
// MountedDisk. Call it after each call of the driver.
func (b *Bystanders) Check() error { return b.check(false) }

// Compare does the same as Check, but also compares the disks' bytes.
func (b *Bystanders) Compare() error { return b.check(true) }

func (b *Bystanders) check(bytes bool) error {
	if b == nil || !b.mounted {
		return nil
	}
	var errs []error
	for i := range b.files {
		errs = append(errs, b.compare(i, bytes))
	}
	mounted, err := mountinfo.Mounted(b.mountpoint)
	if err == nil && !mounted {
		b.mounted, err = false, errors.New("a bystander was unmounted")
	}
	return b.count.Checked(errors.Join(append(errs, err)...))
}

func (b *Bystanders) compare(role int, bytes bool) (err error) {
	b.states[role], err = b.states[role].Compare("a bystander", b.files[role], bytes)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, roles[role])
	}
	return err
}

// File returns the path of the backing file of the disk with this role.
func (b *Bystanders) File(role int) string { return b.files[role] }

// Suspend compares the disks' bytes and unmounts MountedDisk. Resume mounts it again.
func (b *Bystanders) Suspend() error {
	if b == nil {
		return nil
	}
	err := b.Compare()
	if b.mounted {
		b.mounted, err = false, errors.Join(err, unix.Unmount(b.mountpoint, 0))
	}
	return err
}

// Close does the same as Suspend. Then it writes to BlankDisk, and returns an error if the
// comparison does not notice the write. So every proof shows that its checks can fail. At the end,
// Close detaches the loop devices that NewGuestBystanders has attached.
func (b *Bystanders) Close() error {
	if b == nil {
		return nil
	}
	err := b.Suspend()
	if b.states[BlankDisk] != (FileState{}) { // Mount has recorded the state
		err = errors.Join(err, WriteAt(b.files[BlankDisk], bystanderBytes/2, 1))
		if b.compare(BlankDisk, false) == nil {
			err = errors.Join(err, errors.New("a write to a bystander is not noticed"))
		}
	}
	for _, loop := range b.loops {
		err = errors.Join(err, loop.Detach(context.Background()))
	}
	return err
}
