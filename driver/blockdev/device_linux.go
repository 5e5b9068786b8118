package blockdev

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/async"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

// SysfsSectorBytes is the unit of /sys/block/*/size, which does not depend on the block size.
const SysfsSectorBytes = 512

// errNoNode means that sysfs lists a device that has no device node yet.
var errNoNode = errors.New("no device node")

// multipathLeg matches the names of the hidden devices that the kernel adds for the paths to an
// NVMe multipath disk. They have the disk's serial and cannot be opened.
var multipathLeg = regexp.MustCompile(`^nvme\d+c\d+n\d+$`)

// Device describes a disk of this instance, as read from sysfs.
type Device struct {
	Name         string // such as nvme3n1; it does not identify the disk
	Path         string // of its device node
	Serial       string
	Major, Minor uint32
	SizeBytes    int64
	// DiskSeq is a number that the kernel gives to no later disk; 0 on kernels before 5.15.
	DiskSeq uint64
}

// Number returns the device number as mountinfo and sysfs write it.
func (d Device) Number() string { return fmt.Sprintf("%d:%d", d.Major, d.Minor) }

// Host finds disks in a sysfs and a device directory, which a simulated rack may have made.
type Host struct {
	Sysfs, Dev string
	Locks      string // the file that Lock locks; empty means that Lock locks nothing
	// Mounted, if not nil, returns for error texts the mount points of a device in all namespaces.
	Mounted func(Device) string
}

func (h Host) mounted(d Device) string {
	if h.Mounted == nil {
		return ""
	}
	return h.Mounted(d)
}

// Await waits, at most for the given time, until one device has the serial and a device node. It
// polls, because inotify does not report changes in sysfs, and udev may not be running.
func (h Host) Await(ctx context.Context, serial string, wait time.Duration) (Device, error) {
	backoff := async.Backoff{Pause: 20 * time.Millisecond, Max: 250 * time.Millisecond,
		End: time.Now().Add(wait)}
	for {
		found, err := h.Lookup(serial)
		if err == nil || (!csierr.Has(err, csierr.DeviceNotFound) && !errors.Is(err, errNoNode)) {
			return found, err
		}
		switch again, ended := backoff.Wait(ctx); {
		case ended != nil:
			return Device{}, fmt.Errorf("%w while waiting for the device: %s", ended, err.Error())
		case !again:
			return Device{}, err
		}
	}
}

// Lookup returns the device with the serial. None, or more than one, is an error.
func (h Host) Lookup(serial string) (Device, error) {
	all, err := h.List()
	if err != nil {
		return Device{}, err
	}
	var found []Device
	seen := make([]string, 0, len(all))
	for _, d := range all {
		seen = append(seen, fmt.Sprintf("%s %q", d.Name, d.Serial))
		if d.Serial == serial {
			found = append(found, d)
		}
	}
	switch len(found) {
	case 0:
		return Device{}, csierr.New(csierr.DeviceNotFound, "no device in %s has the serial %q; found: "+
			"%s; if the rack says that the disk is attached to this instance, it recorded an attach and "+
			"did not carry it out: stop the instance and start it again, or detach the disk while the "+
			"instance is stopped", filepath.Join(h.Sysfs, "block"), serial,
			cmp.Or(strings.Join(seen, ", "), "none"))
	case 1:
		return found[0], h.checkNode(found[0])
	}
	// Do not choose one of the two: it may contain another volume's data.
	return Device{}, csierr.New(csierr.DeviceNotUnique, "devices %s and %s both have the serial %q;"+
		" detach the disk that is not this volume's", found[0].Path, found[1].Path, serial)
}

func (h Host) checkNode(d Device) error {
	major, minor, err := NumberAt(d.Path)
	if errors.Is(err, fs.ErrNotExist) {
		return csierr.New(csierr.DeviceNotFound, "device %s with serial %q: %w %s", d.Name, d.Serial,
			errNoNode, d.Path)
	}
	if err != nil {
		return err
	}
	if major != d.Major || minor != d.Minor {
		return csierr.New(csierr.DeviceChanged, "%w of %s: %s is device %d:%d, sysfs reports %s",
			errNoNode, d.Name, d.Path, major, minor, d.Number())
	}
	return nil
}

// List returns the block devices that have a serial. It skips devices that vanish while it reads.
func (h Host) List() ([]Device, error) {
	dir := filepath.Join(h.Sysfs, "block")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("list the block devices: %w", err)
	}
	var all []Device
	for _, e := range entries {
		if multipathLeg.MatchString(e.Name()) {
			continue
		}
		d, err := h.read(e.Name())
		if errors.Is(err, fs.ErrNotExist) || Vanished(err) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read block device %s: %w", e.Name(), err)
		}
		all = append(all, d)
	}
	return all, nil
}

// WithNumber returns the disk that has the device number.
func (h Host) WithNumber(major, minor uint32) (Device, error) {
	all, err := h.List()
	if err != nil {
		return Device{}, err
	}
	i := slices.IndexFunc(all, func(d Device) bool { return d.Major == major && d.Minor == minor })
	if i < 0 {
		return Device{}, csierr.New(csierr.DeviceNotFound, "device %d:%d is not a disk of this instance",
			major, minor)
	}
	return all[i], nil
}

func (h Host) read(name string) (Device, error) {
	dir := filepath.Join(h.Sysfs, "block", name)
	serial, err := os.ReadFile(filepath.Join(dir, "device", "serial"))
	if err != nil {
		return Device{}, err
	}
	number, err := os.ReadFile(filepath.Join(dir, "dev"))
	if err != nil {
		return Device{}, err
	}
	d := Device{Name: name, Path: filepath.Join(h.Dev, name), Serial: parseSerial(serial)}
	if d.Major, d.Minor, err = ParseNumber(number); err != nil {
		return Device{}, err
	}
	sectors, err := readNumber(filepath.Join(dir, "size"))
	if err != nil {
		return Device{}, err
	}
	if sectors > (1<<63-1)/SysfsSectorBytes {
		return Device{}, fmt.Errorf("invalid size: %d sectors", sectors)
	}
	d.SizeBytes = int64(sectors) * SysfsSectorBytes
	if d.DiskSeq, err = readNumber(filepath.Join(dir, "diskseq")); errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return d, err
}

// parseSerial removes the padding of a serial in sysfs. A rack pads a serial with NULs to 20 bytes,
// the NVMe specification asks for spaces, and sysfs adds a newline.
func parseSerial(b []byte) string {
	return string(bytes.Trim(b, "\x00 \n\t"))
}

// ParseNumber parses a device number as sysfs writes it, such as "259:3\n".
func ParseNumber(b []byte) (major, minor uint32, err error) {
	text := strings.TrimSuffix(string(b), "\n")
	majorText, minorText, _ := strings.Cut(text, ":")
	a, err1 := strconv.ParseUint(majorText, 10, 32)
	i, err2 := strconv.ParseUint(minorText, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return 0, 0, fmt.Errorf("device number %.20q is not major:minor", text)
	}
	return uint32(a), uint32(i), nil
}

func readNumber(path string) (uint64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("%s contains %.20q, not a number", path, b)
	}
	return n, nil
}

// Counters returns the kernel's counters of the device. It flushes cached writes first, so that
// they are counted. The kernel updates a counter shortly after the end of a request, so Counters
// also reads from the device and waits until the read is counted. If accounting is switched off,
// Counters returns the zero value.
func (d *OpenDevice) Counters() (Counters, error) {
	if err := d.Flush(); err != nil {
		return Counters{}, err
	}
	<-time.After(time.Millisecond) // the kernel does not report when a counter is up to date
	before := d.diskstats()
	if _, err := d.Read(0, AlignBytes); err != nil {
		return Counters{}, err
	}
	for end := time.Now().Add(time.Second); time.Now().Before(end); <-time.After(time.Millisecond) {
		if now := d.diskstats(); now.ReadSectors > before.ReadSectors {
			return now, nil
		}
	}
	return Counters{}, nil
}

func (d *OpenDevice) diskstats() Counters {
	b, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		return Counters{}
	}
	return parseDiskstats(b, d.Major, d.Minor)
}

// descriptorPath returns a path that leads to the open device, even if Device.Path no longer does.
func (d *OpenDevice) descriptorPath() string {
	return filepath.Join("/proc/self/fd", strconv.Itoa(d.descriptor()))
}

// Root makes a tmpfs that contains only a device node of d, at the path d.Path, and opens the
// tmpfs's root directory.
//
// The mount table shows the path by which a device was mounted, and other programs use that path.
// So a mount has to use d.Path, which may lead to another disk in /dev by now. In a thread whose
// root is the tmpfs, the path leads to d. The tmpfs ends when the directory is closed.
func (d Device) Root() (*os.File, error) {
	fs, err := unix.Fsopen("tmpfs", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return nil, err
	}
	defer func() { _ = unix.Close(fs) }()
	if err := unix.FsconfigCreate(fs); err != nil {
		return nil, err
	}
	top, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	root := os.NewFile(uintptr(top), "/")
	if err := d.makeNode(top); err != nil {
		return nil, errors.Join(err, root.Close())
	}
	return root, nil
}

func (d Device) makeNode(top int) error {
	path := strings.TrimPrefix(d.Path, "/")
	for i, c := range path {
		if c != filepath.Separator {
			continue
		}
		if err := unix.Mkdirat(top, path[:i], 0o700); err != nil && !errors.Is(err, unix.EEXIST) {
			return err
		}
	}
	return unix.Mknodat(top, path, unix.S_IFBLK|0o600, int(unix.Mkdev(d.Major, d.Minor)))
}
