package proof

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Forgery is what a workload knows of its volume, and can write into files: the driver's records of
// a format and of a growth in progress, with everything that they name and the right checksum,
// superblocks, partition tables and an ownership tag. A driver that believes what a workload can
// write formats or repairs the disk because of it.
type Forgery struct {
	Volume, Disk, Filesystem string
	// SizeBytes is the disk's size, and NextBytes the one that it grows to.
	SizeBytes, NextBytes int64
	// Device shows the disk. Its first bytes are copied, and tell when it was mounted.
	Device string
	// Traced forgeries hold [Trace], by which they can be told from records of the driver's.
	Traced bool
}

// Trace is in the sector of a forged record, behind its text.
const Trace = "forged by a workload"

// record is a record as the driver writes it.
type record struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	GrowFrom   int64  `json:"growFrom,omitempty"`
	Mounted    int64  `json:"mounted,omitempty"`
	Checked    bool   `json:"checked,omitempty"`
}

// recordBytes is how much of a page is a record.
const recordBytes = 512

// page is a record in a page of its own. It has the magic and a version; the checksum of what
// follows it, at 20; the length of the text, at 24; and the text.
func (f Forgery) page(r record) []byte {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // it has nothing but texts and numbers
	}
	b := make([]byte, pageBytes)
	copy(b, "oxide-csi format")
	binary.LittleEndian.PutUint32(b[16:], 1)
	binary.LittleEndian.PutUint32(b[24:], uint32(len(text)))
	copy(b[28:recordBytes], text)
	if f.Traced {
		copy(b[recordBytes-len(Trace):], Trace)
	}
	binary.LittleEndian.PutUint32(b[20:],
		crc32.Checksum(b[24:recordBytes], crc32.MakeTable(crc32.Castagnoli)))
	return b
}

// FormatRecord is the record of a format of the disk, had it that size.
func (f Forgery) FormatRecord(size int64) []byte {
	return f.page(record{Volume: f.Volume, Disk: f.Disk, SizeBytes: size, Filesystem: f.Filesystem})
}

// GrowthRecord is the record of a growth to a size. A growth to the size that the disk has began at
// less: the driver's record lies behind the filesystem's old end.
func (f Forgery) GrowthRecord(size, mounted int64, checked bool) []byte {
	from := f.SizeBytes
	if size == from {
		from /= 2
	}
	return f.page(record{Volume: f.Volume, Disk: f.Disk, SizeBytes: size, Filesystem: f.Filesystem,
		GrowFrom: from, Mounted: mounted, Checked: checked})
}

// FormatSlots are the offsets of the driver's records of a format on a disk of that size.
func FormatSlots(size int64) []int64 {
	unit := int64(1 << 20)
	switch {
	case size >= 2<<30:
		unit = 128 << 20
	case size >= 128<<20:
		unit = 8 << 20
	}
	var slots []int64
	for _, part := range []int64{7, 15, 26} {
		slots = append(slots, size/32*part/unit*unit-64<<10)
	}
	return slots
}

// GrowthSlots are those of its records of a growth.
func GrowthSlots(size int64) []int64 {
	end := size &^ (pageBytes - 1)
	return []int64{end - 256<<10, end - 512<<10, end - 768<<10}
}

// mounted is when the disk's ext was last mounted; 0 for another filesystem.
func mounted(head []byte) int64 {
	const superblock, magic, low, high = 1024, 56, 0x2C, 0x275
	if sb := head[superblock:]; sb[magic] == 0x53 && sb[magic+1] == 0xEF {
		return int64(binary.LittleEndian.Uint32(sb[low:])) | int64(sb[high])<<32
	}
	return 0
}

// headBytes is how much of the start of the disk is copied: all superblocks there.
const headBytes = 128 << 10

// pages are all forgeries, each in a page, and the records alone.
func (f Forgery) pages() (all, records [][]byte, err error) {
	device, err := os.Open(f.Device)
	if err != nil {
		return nil, nil, err
	}
	defer device.Close()
	head := make([]byte, headBytes)
	if _, err := device.ReadAt(head, 0); err != nil {
		return nil, nil, err
	}
	at := mounted(head)
	for _, size := range []int64{f.SizeBytes, f.NextBytes} {
		records = append(records, f.GrowthRecord(size, at, true), f.FormatRecord(size),
			f.GrowthRecord(size, at, false))
	}
	tag := fmt.Appendf(nil, `{"cluster":"another","volume":%q,"use":"block","birth":"blank"}`,
		f.Volume)
	others := map[int64]string{
		0: "XFSB", 24: "BTRFS?", 56: "\x53\xef", 510: "\x55\xaa", 512: "EFI PART", 1024 + 56: "\x53\xef",
		64: "_BHRfS_M", 2048: "LABELONE", 3000: string(tag),
	}
	foreign := make([]byte, pageBytes)
	for at, text := range others {
		copy(foreign[at:], text)
	}
	table := make([]byte, pageBytes)
	copy(table[446:], []byte{0x80, 0, 2, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 0, 1, 0})
	copy(table[510:], []byte{0x55, 0xAA})
	all = append(slices.Clone(records), foreign, table, slices.Concat(tag,
		make([]byte, pageBytes-len(tag))))
	for page := range slices.Chunk(head, pageBytes) {
		if !bytes.Equal(page, make([]byte, pageBytes)) {
			all = append(all, page)
		}
	}
	return all, records, nil
}

// ForgedFiles are the files of a forgery, with what they hold.
type ForgedFiles map[string][sha256.Size]byte

// odd is how far the forgeries of a file are from where a page of the disk begins.
const odd = 1337

// Write writes files into a directory of the volume's filesystem, durably: the forgeries at the
// start of pages and at odd places, and a file that has records where the driver has its own, as
// far as files can be there.
func (f Forgery) Write(dir string) (ForgedFiles, error) {
	all, records, err := f.pages()
	if err != nil {
		return nil, err
	}
	together := bytes.Join(all, nil)
	files := ForgedFiles{}
	return files, errors.Join(
		files.write(dir, "forged-aligned", together),
		files.write(dir, "forged-odd", append(bytes.Repeat([]byte("odd"), odd)[:odd], together...)),
		files.writeSlots(dir, f, records), syncDir(dir))
}

// WriteFormats writes nothing but a file that has the records of a format where the driver has its
// own, so that hardly anything else is on the disk.
func (f Forgery) WriteFormats(dir string) (ForgedFiles, error) {
	_, records, err := f.pages()
	if err != nil {
		return nil, err
	}
	files := ForgedFiles{}
	return files, errors.Join(files.writeSlots(dir, f, records[1:2]), syncDir(dir))
}

func (files ForgedFiles) writeSlots(dir string, f Forgery, records [][]byte) (err error) {
	const name = "forged-slots"
	if err := f.fillSlots(dir, name, records); err != nil {
		return err
	}
	files[name], err = digest(filepath.Join(dir, name))
	return err
}

// roomBytes is what Fill leaves to others.
const roomBytes = 8 << 20

// Fill fills the filesystem with a file of one kind of record, growths or formats, to the last
// byte. Then it removes a file that it wrote first. There is a record every 512 bytes, for the
// blocks of a small ext lie anywhere.
func (f Forgery) Fill(dir string, growths bool) (files ForgedFiles, err error) {
	_, records, err := f.pages()
	if err != nil {
		return nil, err
	}
	page := records[1]
	if growths {
		page = records[0]
	}
	// Synced, it has its place before the other one.
	if err := (ForgedFiles{}).write(dir, "room", make([]byte, roomBytes)); err != nil {
		return nil, err
	}
	const name = "forged-records"
	w, err := os.Create(filepath.Join(dir, name))
	if err != nil {
		return nil, err
	}
	at := int64(0)
	for _, size := range []int{1 << 20, pageBytes} {
		piece := bytes.Repeat(page[:recordBytes], size/recordBytes)
		for err = nil; err == nil; {
			if _, err = w.WriteAt(piece, at); err == nil {
				at += int64(size)
			}
		}
		if !errors.Is(err, unix.ENOSPC) {
			return nil, errors.Join(err, w.Close())
		}
	}
	err = errors.Join(w.Truncate(at), os.Remove(filepath.Join(dir, "room")), w.Sync(), w.Close(),
		syncDir(dir))
	if err != nil {
		return nil, err
	}
	sum, err := digest(filepath.Join(dir, name))
	return ForgedFiles{name: sum}, err
}

// write writes a file durably.
func (files ForgedFiles) write(dir, name string, content []byte) error {
	path := filepath.Join(dir, name)
	w, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = w.Write(content)
	if err := errors.Join(err, w.Sync(), w.Close()); err != nil {
		return err
	}
	files[name], err = digest(path)
	return err
}

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Check demands that the files in a directory are what they were.
func (files ForgedFiles) Check(dir string) error {
	var errs []error
	for name, want := range files {
		errs = append(errs, CheckForged(filepath.Join(dir, name), want))
	}
	return errors.Join(errs...)
}

// CheckForged demands that one file is.
func CheckForged(path string, want [sha256.Size]byte) error {
	got, err := digest(path)
	if err == nil && got != want {
		err = fmt.Errorf("%s, which holds forged records, has other bytes than it had",
			filepath.Base(path))
	}
	return err
}

// fillSlots makes a file that has records at the places of the disk where the driver has its own.
// It gets nearly all free space for a moment, and keeps what is at those places. Only ext4 and xfs
// tell where on the disk a file's bytes are; on another filesystem the file has a few
// records.
//
// The file has no name until then, so that a crash gives the space back.
func (f Forgery) fillSlots(dir, name string, records [][]byte) (err error) {
	w, err := os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err == nil {
			err = unix.Linkat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", w.Fd()), unix.AT_FDCWD,
				filepath.Join(dir, name), unix.AT_SYMLINK_FOLLOW)
		}
		err = errors.Join(err, w.Sync(), w.Close())
	}()
	size := int64(0)
	if f.Filesystem == "ext4" || f.Filesystem == "xfs" {
		if size, err = takeSpace(w); err != nil {
			return err
		}
	}
	if size == 0 {
		_, err := w.Write(bytes.Repeat(bytes.Join(records, nil), 8))
		return err
	}
	extents, err := extentsOf(w)
	if err != nil {
		return err
	}
	wanted := f.wanted(records)
	kept := []int64{0}
	for slot, record := range wanted {
		for _, e := range extents {
			if slot >= e.physical && slot+pageBytes <= e.physical+e.length {
				at := e.logical + slot - e.physical
				if _, err := w.WriteAt(record, at); err != nil {
					return err
				}
				kept = append(kept, at)
			}
		}
	}
	slices.Sort(kept)
	for i, at := range kept {
		end := size
		if i+1 < len(kept) {
			end = kept[i+1]
		}
		if i > 0 {
			at += pageBytes
		}
		if at < end {
			err := unix.Fallocate(int(w.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at,
				end-at)
			if err != nil {
				return fmt.Errorf("give back the space of %s: %w", name, err)
			}
		}
	}
	return nil
}

// wanted are the records by their place on the disk. One alone is that of a format.
func (f Forgery) wanted(records [][]byte) map[int64][]byte {
	wanted := map[int64][]byte{}
	if len(records) == 1 {
		for _, slot := range FormatSlots(f.SizeBytes) {
			wanted[slot] = records[0]
		}
		return wanted
	}
	for i, size := range []int64{f.SizeBytes, f.NextBytes} {
		for _, slot := range FormatSlots(size) {
			wanted[slot] = records[3*i+1]
		}
		for n, slot := range GrowthSlots(size) {
			wanted[slot] = records[3*i+2*(n%2)]
		}
	}
	return wanted
}

// takeSpace gives a file nearly all free space.
func takeSpace(w *os.File) (size int64, err error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(w.Fd()), &st); err != nil {
		return 0, err
	}
	for size = int64(st.Bfree) * st.Bsize; size > 1<<20; size -= size / 64 {
		size &^= pageBytes - 1
		err = unix.Fallocate(int(w.Fd()), 0, 0, size)
		if !errors.Is(err, unix.ENOSPC) {
			break
		}
	}
	if err != nil {
		return 0, fmt.Errorf("take the free space: %w", err)
	}
	return max(size, 0), nil
}

// extent is a piece of a file, and where it is on the disk.
type extent struct{ logical, physical, length int64 }

// extentsOf asks the kernel for a file's extents (Documentation/filesystems/fiemap.rst).
func extentsOf(w *os.File) ([]extent, error) {
	const fiemap, most, sync = 0xC020660B, 1024, 1 // FS_IOC_FIEMAP, FIEMAP_FLAG_SYNC
	var request struct {
		start, length                  uint64
		flags, mapped, count, reserved uint32
		extents                        [most]struct {
			logical, physical, length uint64
			_                         [2]uint64
			flags                     uint32
			_                         [3]uint32
		}
	}
	request.length, request.flags, request.count = ^uint64(0), sync, most
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, w.Fd(), fiemap, uintptr(unsafe.Pointer(&request)))
	if errno != 0 {
		return nil, fmt.Errorf("ask for the extents of %s: %w", w.Name(), errno)
	}
	var all []extent
	for _, e := range request.extents[:request.mapped] {
		all = append(all, extent{int64(e.logical), int64(e.physical), int64(e.length)})
	}
	return all, nil
}
