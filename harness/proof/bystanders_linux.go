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

// The roles of bystanders, and of their files.
const (
	MountedDisk = iota
	MemberDisk
	BlankDisk
	bystanders
)

// Member is a kind of storage on several disks: a bystander is one of them, the others are absent.
type Member string

// The kinds of members. The kernel finds them by a number or a UUID in the other part.
const (
	Journal     Member = "the journal of an ext4"
	BtrfsMember Member = "one of two devices of a btrfs"
)

// Bystanders are three disks of an instance on which no call works: an ext4 with files that is
// mounted read-write, a [Member], and a blank disk. Nothing may ever write to them.
//
// The kernel does not change the mounted disk on its own: the inode tables are complete, the
// journal is empty, and reading a file does not update its access time. A write through a loop
// device updates the modification time of the backing file, so it is cheap to check the disks
// after each call.
//
// A nil *Bystanders has no disks, and its checks succeed.
type Bystanders struct {
	count *Invariant
	// files are the backing files, by role. The first disk is mounted at mountpoint.
	files      [bystanders]string
	mountpoint string

	// mu guards the fields below.
	mu      sync.Mutex
	states  [bystanders]FileState
	mounted bool
	harm    error
}

var roles = [bystanders]string{"the mounted disk", "the member", "the blank disk"}

// bystanderBytes is the size of disks without a rack. mkfs.btrfs refuses smaller disks.
const bystanderBytes = 128 << 20

// NewGuestBystanders makes the disks in a directory. The guest sees them after Show.
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

// GuestBystanders are the bystanders of a [GuestView]. The zero value has none.
type GuestBystanders struct {
	*Bystanders
	guest GuestView
	loops []loopdev.Device
}

// Show attaches the disks to the guest. Guest.Unplug removes them.
func (b *GuestBystanders) Show() error {
	var errs []error
	for i, loop := range b.loops {
		errs = append(errs, b.guest.Plug(fmt.Sprintf("nvme%dn1", 7+i), fmt.Sprint("bystander-", i),
			loop))
	}
	return errors.Join(errs...)
}

// Loop returns the loop device of the bystander with this role.
func (b *GuestBystanders) Loop(role int) loopdev.Device { return b.loops[role] }

// Close compares the disks byte for byte and detaches their devices.
func (b *GuestBystanders) Close() error {
	errs := []error{b.Bystanders.Close()}
	for _, loop := range b.loops {
		errs = append(errs, loop.Detach(context.Background()))
	}
	return errors.Join(errs...)
}

// NewBystanders writes the content of the disks to their files, by role. The files must be
// blank and must not be attached yet. Call Mount when they are attached. The mount point is
// below the directory.
func NewBystanders(ctx context.Context, dir string, files [bystanders]string, member Member,
	count *Invariant) (b *Bystanders, err error) {
	defer harness.Catch(&err)
	b = &Bystanders{count: count, files: files, mountpoint: filepath.Join(dir, "mounted")}
	harness.Must(os.MkdirAll(b.mountpoint, 0o755))
	// The filesystem has few inodes and a small journal, because all of it is written now.
	run(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-N", "64", "-J", "size=4",
		"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", files[MountedDisk])
	file := files[MemberDisk]
	if member == Journal {
		run(ctx, "mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", file, "1024")
		return b, nil
	}
	// The first of the two devices is deleted, so nothing has the device number 1.
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

// Mount mounts the first disk, from its present device, unless it is mounted, and writes a file.
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
	// A freeze writes all data to their final place and empties the journal.
	harness.Must(errors.Join(SetFrozen(b.mountpoint, true), SetFrozen(b.mountpoint, false),
		device.Sync()))
	for i, file := range b.files {
		b.states[i] = harness.Got(ReadFileState(file))
	}
	return nil
}

// deviceOf finds the loop device whose backing file this is.
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

// Check returns an error if something was written to the disks, or if the first one is not
// mounted. Call it after every call of the driver. Check reports each change once.
func (b *Bystanders) Check() error { return b.check(false) }

// Compare does the same as Check, and compares the disks byte for byte.
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

// compare compares a disk with its last state, and then replaces that state.
func (b *Bystanders) compare(role int, bytes bool) (err error) {
	b.states[role], err = b.states[role].Compare("a bystander", b.files[role], bytes)
	if err != nil {
		err = fmt.Errorf("%w: %s", err, roles[role])
	}
	return err
}

// File returns the path of the backing file of a role's disk.
func (b *Bystanders) File(role int) string { return b.files[role] }

// Called runs Check after a call, keeps the result for Harm, and returns the call's error.
func (b *Bystanders) Called(err error) error {
	if harm := b.Check(); harm != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.harm = errors.Join(b.harm, harm)
	}
	return err
}

// Harm returns the changes that calls have made to the disks since the last call of Harm.
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

// Suspend compares the disks and unmounts the first one. Mount ends the suspension.
func (b *Bystanders) Suspend() error {
	_, err := b.suspend()
	return err
}

// suspend also reports whether the first disk was mounted.
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

// Close compares the disks and unmounts the first one. Then it writes to the blank one and returns
// an error if the checks do not notice this, so every proof shows that it can fail.
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
