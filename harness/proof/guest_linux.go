package proof

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// InstanceID is the ID of the instance of a [GuestView].
const InstanceID = "5e3a9f62-7c1b-4e0b-9a3d-0f6f0c9b8a01"

// SerialBytes is the number of bytes of a disk's name that NVMe shows as the serial.
const SerialBytes = 20

// GuestView is the view of an instance: a /sys and a /dev with loop devices as its disks. Proofs
// that need no rack use it.
type GuestView struct{ dir string }

// detachLeft releases the devices of killed proofs, once for each process. If a device is still in
// use, the kernel releases it with its last user.
var detachLeft = sync.OnceValue(func() error {
	_, err := loopdev.DetachLeft(context.Background())
	if err != nil && !errors.Is(err, loopdev.ErrBusy) {
		return err
	}
	return nil
})

// NewGuestView makes a guest without disks in a directory.
func NewGuestView(dir string) (g GuestView, err error) {
	defer harness.Catch(&err)
	harness.Must(detachLeft())
	g = GuestView{dir}
	dmi := g.Sys("class/dmi/id")
	for _, d := range []string{dmi, g.Sys("block"), g.Node("")} {
		harness.Must(os.MkdirAll(d, 0o755))
	}
	for name, value := range map[string]string{
		"sys_vendor": "Oxide\n", "product_name": "OxVM\n", "product_serial": InstanceID + "\n",
		"product_uuid": InstanceID + "\n",
	} {
		harness.Must(os.WriteFile(filepath.Join(dmi, name), []byte(value), 0o444))
	}
	return g, nil
}

// Sys returns the path of an entry of the guest's /sys.
func (g GuestView) Sys(path string) string { return filepath.Join(g.dir, "sys", path) }

// Node returns the path of a device node in the guest's /dev.
func (g GuestView) Node(name string) string { return filepath.Join(g.dir, "dev", name) }

// Plug adds a disk in the kernel's order: the node first, so that a program that sees the
// directory in /sys also finds the node. The rack fills the serial's 20 bytes with NULs, and
// sysfs ends the line.
func (g GuestView) Plug(name, diskName string, loop loopdev.Device) error {
	serial := make([]byte, SerialBytes)
	copy(serial, diskName)
	return errors.Join(
		unix.Mknod(g.Node(name), unix.S_IFBLK|0o660, int(unix.Mkdev(loop.Major, loop.Minor))),
		os.MkdirAll(g.Sys("block/"+name+"/device"), 0o755),
		os.MkdirAll(g.Sys("block/"+name+"/queue"), 0o755),
		g.SetAttribute(name, "dev", fmt.Sprintf("%d:%d\n", loop.Major, loop.Minor)),
		g.SetAttribute(name, "size", fmt.Sprintf("%d\n", loop.SizeBytes/512)),
		g.SetAttribute(name, "diskseq", fmt.Sprintf("%d\n", loop.Sequence)),
		g.SetAttribute(name, "queue/logical_block_size", fmt.Sprintf("%d\n", loop.BlockSize)),
		g.SetAttribute(name, "device/serial", string(serial)+"\n"))
}

// SetAttribute sets an attribute of a disk in the guest's sysfs. The value may be wrong.
func (g GuestView) SetAttribute(name, attribute, value string) error {
	path := g.Sys("block/" + name + "/" + attribute)
	if err := os.RemoveAll(path); err != nil {
		return err
	}
	return os.WriteFile(path, []byte(value), 0o444)
}

// Unplug removes all disks.
func (g GuestView) Unplug() error {
	var errs []error
	for _, dir := range []string{g.Sys("block"), g.Node("")} {
		entries, err := os.ReadDir(dir)
		errs = append(errs, err)
		for _, e := range entries {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// UnmountBelow unmounts everything below a directory, the last mount first.
func UnmountBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		return unix.Unmount(path, unix.UMOUNT_NOFOLLOW)
	})
}

// EndMountsBelow removes every mount below a directory although it may be in use or frozen, as the
// end of an instance does.
func EndMountsBelow(dir string) error {
	return eachMountBelow(dir, func(path string) error {
		_ = SetFrozen(path, false)              // otherwise its device could never be released
		_ = unix.Unmount(path, unix.MNT_DETACH) // it may be gone already
		return nil
	})
}

func eachMountBelow(dir string, do func(path string) error) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		errs = append(errs, do(m.Mountpoint))
	}
	return errors.Join(errs...)
}

// SetFrozen freezes or thaws the filesystem at a path. A filesystem that is not frozen counts as
// thawed.
func SetFrozen(path string, freeze bool) error {
	// These ioctls stop and resume writing to a filesystem (linux/fs.h). x/sys lacks them.
	const freezeRequest, thawRequest = 0xC0045877, 0xC0045878 // FIFREEZE, FITHAW
	root, err := os.Open(path)
	if err != nil {
		return err
	}
	if freeze {
		err = unix.IoctlSetInt(int(root.Fd()), freezeRequest, 0)
	} else if err = unix.IoctlSetInt(int(root.Fd()), thawRequest, 0); errors.Is(err, unix.EINVAL) {
		err = nil
	}
	return errors.Join(err, root.Close())
}

// EachData calls do for each piece of data in a file, in order, and skips holes. A piece has
// at most 1 MiB. It is valid only during the call.
func EachData(path string, do func(at int64, b []byte) error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	room := make([]byte, 1<<20)
	var end int64
	for at := int64(0); ; {
		if at >= end {
			start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) {
				return nil
			}
			if err != nil {
				return fmt.Errorf("find data in %s: %w", path, err)
			}
			if end, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE); err != nil {
				return fmt.Errorf("find a hole in %s: %w", path, err)
			}
			at = start
		}
		n, err := f.ReadAt(room[:min(int64(len(room)), end-at)], at)
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if n == 0 {
			return nil // the file became shorter
		}
		if err := do(at, room[:n]); err != nil {
			return err
		}
		at += int64(n)
	}
}

// EachPage calls do for every page of a file that is not zero. It counts zeros, which is faster
// with the race detector than a comparison.
func EachPage(path string, do func(at int64, page []byte) error) error {
	return EachData(path, func(at int64, b []byte) error {
		for i := 0; i < len(b); i += pageBytes {
			page := b[i:min(i+pageBytes, len(b))]
			if bytes.Count(page, []byte{0}) == len(page) {
				continue
			}
			if err := do(at+int64(i), page); err != nil {
				return err
			}
		}
		return nil
	})
}

// digest returns a hash of a file's size and bytes. A hole and zeros have the same hash.
func digest(path string) (sum [sha256.Size]byte, err error) {
	defer harness.Catch(&err)
	hash := sha256.New()
	hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(harness.Got(os.Stat(path)).Size())))
	harness.Must(EachPage(path, func(at int64, page []byte) error {
		hash.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)))
		hash.Write(page)
		return nil
	}))
	return [sha256.Size]byte(hash.Sum(nil)), nil
}

// FileState is the state of a file at one moment. A write through a loop device updates the
// modification time of the backing file.
type FileState struct {
	modified time.Time
	sum      [sha256.Size]byte
}

// ReadFileState reads a file.
func ReadFileState(path string) (FileState, error) {
	info, err := os.Stat(path)
	if err != nil {
		return FileState{}, err
	}
	sum, err := digest(path)
	return FileState{info.ModTime(), sum}, err
}

// Compare returns an error that begins with the name if the file was written to since the state was
// read. It compares the bytes, too, if the file was written to or if bytes is true. It also returns
// the new state.
func (p FileState) Compare(name, path string, bytes bool) (now FileState, err error) {
	info, err := os.Stat(path)
	if err != nil {
		return p, fmt.Errorf("%s: %w", name, err)
	}
	same := info.ModTime().Equal(p.modified)
	if same && !bytes {
		return p, nil
	}
	now, err = ReadFileState(path)
	if err == nil && !same {
		err = fmt.Errorf("%s was written to at %s", name, now.modified)
	}
	if err == nil && now.sum != p.sum {
		err = fmt.Errorf("%s has other bytes than before", name)
	}
	return now, err
}
