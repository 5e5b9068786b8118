package proof

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// These are the roles of bystanders: indexes of their files.
const (
	MountedDisk = iota
	MemberDisk
	BlankDisk
	bystanders
)

// Member is a storage of several disks. One disk is a bystander, and all others are missing.
type Member string

// The kernel finds each member by a number or a UUID in the missing disk.
const (
	Journal     Member = "the journal of an ext4"
	BtrfsMember Member = "one of two devices of a btrfs"
)

// Bystanders are three disks of an instance that no call names: a mounted ext4 with a file, a
// [Member], and a blank disk. Nothing may write to them.
//
// The kernel itself does not write to the mounted disk: its inode tables are complete, its journal
// is empty, and the mount option noatime prevents updates of access times. Any other write through
// the loop device changes the modification time of the backing file, so Check costs little.
//
// A nil *Bystanders has no disks. Its checks succeed.
type Bystanders struct {
	count *Invariant
	// files contains the backing files by role. MountedDisk is mounted at mountpoint.
	files      [bystanders]string
	mountpoint string

	// mu guards the fields below.
	mu      sync.Mutex
	states  [bystanders]FileState
	mounted bool
	harm    error
}

var roles = [bystanders]string{"the mounted disk", "the member", "the blank disk"}

// bystanderBytes is the size of a bystander without a rack: about the smallest for mkfs.btrfs.
const bystanderBytes = 128 << 20

// NewGuestBystanders creates the disks in a directory. Show makes them visible in the guest.
func NewGuestBystanders(ctx context.Context, g GuestView, dir string, member Member,
	count *Invariant) (b *GuestBystanders, err error) {
	b = &GuestBystanders{guest: g}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	defer harness.Catch(&err)
	var files [bystanders]string
	for i := range files {
		files[i] = filepath.Join(dir, fmt.Sprint("bystander-", i))
		harness.Must(errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(files[i], nil, 0o600),
			os.Truncate(files[i], bystanderBytes)))
	}
	b.Bystanders = harness.Got(NewBystanders(ctx, dir, files, member, count))
	for i, file := range files {
		b.loops = append(b.loops, harness.Got(loopdev.Attach(ctx, loopdev.Config{Path: file,
			Serial: fmt.Sprintf("bystander-%d-%.16s", i, rand.Text()), Owner: loopdev.Process()})))
	}
	return b, b.Mount()
}

// GuestBystanders are bystanders in a [GuestView]. The zero value has no disks.
type GuestBystanders struct {
	*Bystanders
	guest GuestView
	loops []loopdev.Device
}

// Show attaches the disks to the guest. GuestView.Unplug detaches them.
func (b *GuestBystanders) Show() error {
	var errs []error
	for i, loop := range b.loops {
		errs = append(errs, b.guest.Plug(fmt.Sprintf("nvme%dn1", 7+i), fmt.Sprint("bystander-", i),
			loop))
	}
	return errors.Join(errs...)
}

// Loop returns the loop device of the disk with this role.
func (b *GuestBystanders) Loop(role int) loopdev.Device { return b.loops[role] }

// Close compares the bytes of the disks, and detaches the loop devices.
func (b *GuestBystanders) Close() error {
	errs := []error{b.Bystanders.Close()}
	for _, loop := range b.loops {
		errs = append(errs, loop.Detach(context.Background()))
	}
	return errors.Join(errs...)
}

// NewBystanders writes an ext4 and the member to their files, and leaves the third file blank. The
// files have to be blank and not yet attached to loop devices. Call Mount when they are attached.
// The mount point is in the directory dir.
func NewBystanders(ctx context.Context, dir string, files [bystanders]string, member Member,
	count *Invariant) (b *Bystanders, err error) {
	defer harness.Catch(&err)
	b = &Bystanders{count: count, files: files, mountpoint: filepath.Join(dir, "mounted")}
	harness.Must(os.MkdirAll(b.mountpoint, 0o755))
	// Few inodes and a small journal, because mke2fs writes all of them at once.
	run(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-N", "64", "-J", "size=4",
		"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", files[MountedDisk])
	file := files[MemberDisk]
	if member == Journal {
		run(ctx, "mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", file, "1024")
		return b, nil
	}
	// The device with the number 1 is deleted, so that the kernel cannot find it.
	other := filepath.Join(dir, "other")
	harness.Must(errors.Join(os.WriteFile(other, nil, 0o600),
		os.Truncate(other, harness.Got(os.Stat(file)).Size())))
	run(ctx, "mkfs.btrfs", "-q", "-f", "-K", "-d", "single", "-m", "raid1", other, file)
	return b, os.Remove(other)
}

func run(ctx context.Context, name string, args ...string) {
	if out, err := exec.CommandContext(ctx, name, args...).CombinedOutput(); err != nil {
		harness.Must(fmt.Errorf("%s %q: %w\n%s", name, args, err, out))
	}
}

// Mount mounts MountedDisk, unless it is mounted, writes a file, and records all disks' states.
func (b *Bystanders) Mount() (err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	defer harness.Catch(&err)
	if b.mounted {
		return nil
	}
	device := deviceOf(b.files[MountedDisk])
	if err := unix.Mount(device.Path, b.mountpoint, "ext4", unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("mount a bystander: %w", err)
	}
	b.mounted = true
	harness.Must(os.WriteFile(filepath.Join(b.mountpoint, "file"), []byte("somebody works here"),
		0o600))
	// While it freezes the filesystem, the kernel writes all data and empties the journal.
	harness.Must(errors.Join(SetFrozen(b.mountpoint, true), SetFrozen(b.mountpoint, false),
		device.Sync()))
	for i, file := range b.files {
		b.states[i] = harness.Got(ReadFileState(file))
	}
	return nil
}

// deviceOf returns the loop device of a backing file.
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

// Check returns an error if a disk was written to since the last check, or if MountedDisk is not
// mounted. Call it after each call of the driver.
func (b *Bystanders) Check() error { return b.check(false) }

// Compare does the same as Check, but also compares the disks' bytes.
func (b *Bystanders) Compare() error { return b.check(true) }

func (b *Bystanders) check(bytes bool) error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.mounted {
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

// compare compares a disk with its recorded state, and then records its present state.
func (b *Bystanders) compare(role int, bytes bool) (err error) {
	b.states[role], err = b.states[role].Compare("a bystander", b.files[role], bytes)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, roles[role])
	}
	return err
}

// File returns the path of the backing file of the disk with this role.
func (b *Bystanders) File(role int) string { return b.files[role] }

// Called checks the disks after a call, adds an error to Harm, and returns the call's error.
func (b *Bystanders) Called(err error) error {
	if harm := b.Check(); harm != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.harm = errors.Join(b.harm, harm)
	}
	return err
}

// Harm returns the errors that Called has found since the last call of Harm.
func (b *Bystanders) Harm() error {
	if b == nil {
		return nil
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	harm := b.harm
	b.harm = nil
	return harm
}

// Suspend compares the disks and unmounts MountedDisk. Mount ends the suspension.
func (b *Bystanders) Suspend() error {
	_, err := b.suspend()
	return err
}

// suspend does the same as Suspend, and reports whether MountedDisk was mounted.
func (b *Bystanders) suspend() (was bool, err error) {
	if b == nil {
		return false, nil
	}
	err = b.Compare()
	b.mu.Lock()
	defer b.mu.Unlock()
	if was = b.mounted; was {
		b.mounted, err = false, errors.Join(err, unix.Unmount(b.mountpoint, 0))
	}
	return was, err
}

// Close does the same as Suspend. Then it writes to BlankDisk, and returns an error if compare does
// not notice that: so every proof shows that its checks can fail.
func (b *Bystanders) Close() error {
	was, err := b.suspend()
	if !was {
		return err
	}
	blank, failed := os.OpenFile(b.files[BlankDisk], os.O_WRONLY, 0)
	if failed != nil {
		return errors.Join(err, failed)
	}
	_, failed = blank.WriteAt([]byte{1}, bystanderBytes/2)
	err = errors.Join(err, failed, blank.Close())
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.compare(BlankDisk, false) == nil {
		err = errors.Join(err, errors.New("a write to a bystander is not noticed"))
	}
	return err
}
