package proof

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// The roles of bystanders, and of their files.
const (
	MountedDisk = iota
	MemberDisk
	BlankDisk
	bystanders
)

// Member is what an unmounted bystander is a part of. The other part is absent.
type Member string

// The kinds of members. A mount of the other part finds the member by the number or the UUID that
// the other part names.
const (
	Journal     Member = "the journal of an ext4"
	BtrfsMember Member = "one of two devices of a btrfs"
)

// Bystanders are three disks of an instance that no call is about: an ext4 with files that is
// mounted for writing, a [Member], and a blank disk. Nothing may ever write to them.
//
// The mounted one does not change by itself: its inode tables are complete, its journal is empty,
// and reading a file does not note the time. A write through a loop device changes the time of the
// file that it shows, so that a look at it after each call costs next to nothing.
//
// Nil are none, which nothing can happen to.
type Bystanders struct {
	count *Invariant
	// files are the disks' bytes, by role, and mountpoint is where the first one is mounted.
	files      [bystanders]string
	mountpoint string

	// mu guards the rest.
	mu       sync.Mutex
	pictures [bystanders]picture
	mounted  bool
	harm     error
}

// picture is what a disk was like.
type picture struct {
	modified time.Time
	sum      [sha256.Size]byte
}

var roles = [bystanders]string{"the mounted disk", "the member", "the blank disk"}

// bystanderBytes is the size of disks that are made for an instance without a rack, from which on
// mkfs.btrfs takes them.
const bystanderBytes = 128 << 20

// NewGuestBystanders makes the three disks for a guest, with a directory for their files. The guest
// sees them after Show.
func NewGuestBystanders(ctx context.Context, g Guest, dir string, member Member, count *Invariant) (
	b *GuestBystanders, err error) {
	var files [bystanders]string
	for i := range files {
		files[i] = filepath.Join(dir, fmt.Sprint("bystander-", i))
		if err := errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(files[i], nil, 0o600),
			os.Truncate(files[i], bystanderBytes)); err != nil {
			return nil, err
		}
	}
	made, err := NewBystanders(ctx, dir, files, member, count)
	if err != nil {
		return nil, err
	}
	b = &GuestBystanders{Bystanders: made, guest: g}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.Close())
		}
	}()
	for i, file := range files {
		loop, err := loopdev.Attach(ctx, loopdev.Config{Path: file,
			Serial: fmt.Sprintf("bystander-%d-%.16s", i, rand.Text()), Owner: loopdev.Process()})
		if err != nil {
			return b, err
		}
		b.loops = append(b.loops, loop)
	}
	return b, b.Mount()
}

// GuestBystanders are those of a [Guest], with their loop devices. The zero value has none.
type GuestBystanders struct {
	*Bystanders
	guest Guest
	loops []loopdev.Device
}

// Show plugs the disks into the guest. Guest.Unplug takes them away again.
func (b *GuestBystanders) Show() error {
	var errs []error
	for i, loop := range b.loops {
		errs = append(errs, b.guest.Plug(fmt.Sprintf("nvme%dn1", 7+i), fmt.Sprint("bystander-", i),
			loop))
	}
	return errors.Join(errs...)
}

// Loop is the device of a role.
func (b *GuestBystanders) Loop(role int) loopdev.Device { return b.loops[role] }

// Close compares the disks byte for byte and takes them away.
func (b *GuestBystanders) Close() error {
	errs := []error{b.Bystanders.Close()}
	for _, loop := range b.loops {
		errs = append(errs, loop.Detach(context.Background()))
	}
	return errors.Join(errs...)
}

// NewBystanders writes what the disks hold to their files, by role, which are blank and not
// attached yet. Mount follows, when they are; the mount point is below the directory.
func NewBystanders(ctx context.Context, dir string, files [bystanders]string, member Member,
	count *Invariant) (*Bystanders, error) {
	b := &Bystanders{count: count, files: files, mountpoint: filepath.Join(dir, "mounted")}
	if err := os.MkdirAll(b.mountpoint, 0o755); err != nil {
		return nil, err
	}
	// Few inodes and a small journal, for all of it is written now.
	err := run(ctx, "mke2fs", "-q", "-F", "-t", "ext4", "-N", "64", "-J", "size=4",
		"-E", "lazy_itable_init=0,lazy_journal_init=0,nodiscard", files[MountedDisk])
	if err == nil {
		err = b.makeMember(ctx, dir, member)
	}
	return b, err
}

// makeMember makes the member. Of a btrfs it leaves the device with the number 1 to nobody.
func (b *Bystanders) makeMember(ctx context.Context, dir string, member Member) error {
	file := b.files[MemberDisk]
	if member == Journal {
		return run(ctx, "mke2fs", "-q", "-F", "-b", "4096", "-O", "journal_dev", file, "1024")
	}
	info, err := os.Stat(file)
	if err != nil {
		return err
	}
	other := filepath.Join(dir, "other")
	err = errors.Join(os.WriteFile(other, nil, 0o600), os.Truncate(other, info.Size()))
	if err == nil {
		err = run(ctx, "mkfs.btrfs", "-q", "-f", "-K", "-d", "single", "-m", "raid1", other, file)
	}
	return errors.Join(err, os.Remove(other))
}

func run(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %q: %w\n%s", name, args, err, out)
	}
	return nil
}

// The kernel's ioctls to stop and resume writing to a filesystem (linux/fs.h). x/sys lacks them.
const (
	ioctlFreeze = 0xC0045877 // FIFREEZE
	ioctlThaw   = 0xC0045878 // FITHAW
)

// Mount mounts the first disk, on whichever device it has now, and writes a file there. It does
// nothing if the disk is mounted.
func (b *Bystanders) Mount() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.mounted {
		return nil
	}
	device, err := deviceOf(b.files[MountedDisk])
	if err != nil {
		return err
	}
	if err := unix.Mount(device.Path, b.mountpoint, "ext4", unix.MS_NOATIME, ""); err != nil {
		return fmt.Errorf("mount a bystander: %w", err)
	}
	b.mounted = true
	err = os.WriteFile(filepath.Join(b.mountpoint, "file"), []byte("somebody works here"), 0o600)
	if err != nil {
		return err
	}
	// A freeze writes everything to its place and empties the journal.
	root, err := os.Open(b.mountpoint)
	if err != nil {
		return err
	}
	err = errors.Join(unix.IoctlSetInt(int(root.Fd()), ioctlFreeze, 0),
		unix.IoctlSetInt(int(root.Fd()), ioctlThaw, 0), root.Close(), device.Sync())
	if err != nil {
		return err
	}
	for i, file := range b.files {
		if b.pictures[i], err = take(file); err != nil {
			return err
		}
	}
	return nil
}

// deviceOf finds the loop device that shows a file.
func deviceOf(file string) (loopdev.Device, error) {
	var st unix.Stat_t
	if err := unix.Stat(file, &st); err != nil {
		return loopdev.Device{}, err
	}
	all, err := loopdev.List()
	if err != nil {
		return loopdev.Device{}, err
	}
	for _, d := range all {
		if d.BackingInode == st.Ino && d.BackingDevice == st.Dev && !d.Releasing {
			return d, nil
		}
	}
	return loopdev.Device{}, fmt.Errorf("%s has no loop device", file)
}

func take(file string) (picture, error) {
	info, err := os.Stat(file)
	if err != nil {
		return picture{}, err
	}
	sum, err := digest(file)
	return picture{info.ModTime(), sum}, err
}

// Check demands that nothing was written to the disks, and that the mounted one is mounted. Call it
// after every call. A change is reported once.
func (b *Bystanders) Check() error { return b.check(false) }

// Compare is Check, and demands that the disks are byte for byte what they were.
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
		errs = append(errs, b.look(i, bytes))
	}
	mounted, err := mountinfo.Mounted(b.mountpoint)
	if err == nil && !mounted {
		b.mounted, err = false, errors.New("a bystander was unmounted")
	}
	return b.count.Checked(errors.Join(append(errs, err)...))
}

// File is the file that holds the bytes of a role's disk.
func (b *Bystanders) File(role int) string { return b.files[role] }

// Called is Check after a call, and keeps what the call did to them for Harm. It passes on the
// call's error.
func (b *Bystanders) Called(err error) error {
	if harm := b.Check(); harm != nil {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.harm = errors.Join(b.harm, harm)
	}
	return err
}

// Harm is what calls have done to them since it was last asked for.
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

// look compares a disk with its picture, which becomes what is seen.
func (b *Bystanders) look(role int, bytes bool) error {
	info, err := os.Stat(b.files[role])
	if err != nil {
		return err
	}
	same := info.ModTime().Equal(b.pictures[role].modified)
	if same && !bytes {
		return nil
	}
	now, err := take(b.files[role])
	if err == nil && !same {
		err = fmt.Errorf("a bystander was written to at %s: %s", now.modified, roles[role])
	}
	if err == nil && now.sum != b.pictures[role].sum {
		err = fmt.Errorf("a bystander has other bytes than it had: %s", roles[role])
	}
	b.pictures[role] = now
	return err
}

// Suspend compares the disks and unmounts the first one, before their instance ends. Until Mount is
// called they are not looked at.
func (b *Bystanders) Suspend() error {
	if b == nil {
		return nil
	}
	err := b.Compare()
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.mounted {
		return err
	}
	b.mounted = false
	return errors.Join(err, unix.Unmount(b.mountpoint, 0))
}

// Close compares the disks and unmounts the first one for good. It then writes to the blank one and
// demands that the write is noticed, so that every proof shows that it could have failed.
func (b *Bystanders) Close() error {
	if b == nil {
		return nil
	}
	errs := []error{b.Compare()}
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.mounted {
		return errors.Join(errs...)
	}
	b.mounted = false
	errs = append(errs, unix.Unmount(b.mountpoint, 0))
	blank, err := os.OpenFile(b.files[BlankDisk], os.O_WRONLY, 0)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	_, err = blank.WriteAt([]byte{1}, bystanderBytes/2)
	errs = append(errs, err, blank.Close())
	if b.look(BlankDisk, false) == nil {
		errs = append(errs, errors.New("a write to a bystander is not noticed"))
	}
	return errors.Join(errs...)
}
