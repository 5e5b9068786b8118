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

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Forgery writes files with bytes that a driver might trust: records of a format or growth in
// progress, with valid checksums; superblocks; partition tables; and an ownership tag. It uses only
// facts that a workload can know about its volume. A driver that trusts these files formats or
// repairs the disk.
type Forgery struct {
	Volume, Disk, Filesystem string
	// NextBytes is the size to which a proof grows the disk.
	SizeBytes, NextBytes int64
	// Device is the path of the disk's device. The forgery copies the first bytes of this device.
	Device string
	// Traced adds [Trace] to each record, so that a proof can tell forged records from the driver's.
	Traced bool
}

// Trace is the text at the end of each record that a Forgery with Traced writes.
const Trace = "forged by a workload"

// forgedRecord has the JSON format of the driver's records.
type forgedRecord struct {
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	SizeBytes  int64  `json:"sizeBytes"`
	Filesystem string `json:"filesystem"`
	GrowFrom   int64  `json:"growFrom,omitempty"`
	Mounted    int64  `json:"mounted,omitempty"`
	Checked    bool   `json:"checked,omitempty"`
}

// recordBytes is the size of a record, which is the first sector of a page.
const recordBytes = 512

// page returns a page with a record: a magic text and a version; at offset 20 the checksum of all
// later bytes of the record; at 24 the length of the JSON text; and at 28 this text.
func (f Forgery) page(r forgedRecord) []byte {
	text, err := json.Marshal(r)
	if err != nil {
		panic(err) // impossible: the record contains only texts and numbers
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

// FormatRecord returns a page with the record of a format on a disk of the given size.
func (f Forgery) FormatRecord(size int64) []byte {
	return f.page(forgedRecord{Volume: f.Volume, Disk: f.Disk, SizeBytes: size,
		Filesystem: f.Filesystem})
}

// GrowthRecord returns a page with a record of a growth to the given size. If the disk already has
// this size, the record names half of it as the old size, because the driver writes growth records
// only behind the old end of the filesystem.
func (f Forgery) GrowthRecord(size, mounted int64, checked bool) []byte {
	from := f.SizeBytes
	if size == from {
		from /= 2
	}
	return f.page(forgedRecord{Volume: f.Volume, Disk: f.Disk, SizeBytes: size,
		Filesystem: f.Filesystem, GrowFrom: from, Mounted: mounted, Checked: checked})
}

// FormatSlots returns the offsets of the driver's format records on a disk of the given size.
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

// GrowthSlots returns the offsets of the driver's growth records on a disk of the given size.
func GrowthSlots(size int64) []int64 {
	end := size &^ (pageBytes - 1)
	return []int64{end - 256<<10, end - 512<<10, end - 768<<10}
}

// mounted returns the time of the last mount from the ext superblock, or 0 without a superblock.
func mounted(head []byte) int64 {
	const superblock, magic, low, high = 1024, 56, 0x2C, 0x275
	if sb := head[superblock:]; sb[magic] == 0x53 && sb[magic+1] == 0xEF {
		return int64(binary.LittleEndian.Uint32(sb[low:])) | int64(sb[high])<<32
	}
	return 0
}

// headBytes is the length of the copy of the disk's start, where each filesystem has a superblock.
const headBytes = 128 << 10

func (f Forgery) pages() (all, records [][]byte) {
	device := harness.Got(os.Open(f.Device))
	defer device.Close()
	head := make([]byte, headBytes)
	harness.Got(device.ReadAt(head, 0))
	at := mounted(head)
	for _, size := range []int64{f.SizeBytes, f.NextBytes} {
		records = append(records, f.GrowthRecord(size, at, true), f.FormatRecord(size),
			f.GrowthRecord(size, at, false))
	}
	tag := fmt.Appendf(nil, `{"cluster":"another","volume":%q,"use":"block","birth":"blank"}`,
		f.Volume)
	foreign := make([]byte, pageBytes)
	for at, text := range map[int64]string{0: "XFSB", 24: "BTRFS?", 56: "\x53\xef", 64: "_BHRfS_M",
		510: "\x55\xaa", 512: "EFI PART", 1024 + 56: "\x53\xef", 2048: "LABELONE", 3000: string(tag)} {
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
	return all, records
}

// ForgedFiles maps the names of forged files to hashes of their content.
type ForgedFiles map[string][sha256.Size]byte

// odd is the offset of the first page in the file forged-odd. It is no multiple of the page size.
const odd = 1337

// Write writes three files durably into a directory on the volume. forged-aligned has all pages at
// multiples of the page size, forged-odd at other offsets. forged-slots has records in the blocks
// where the driver writes its own records, if the filesystem gives these blocks to a file.
func (f Forgery) Write(dir string) (files ForgedFiles, err error) {
	defer harness.Catch(&err)
	all, records := f.pages()
	together := bytes.Join(all, nil)
	files = ForgedFiles{}
	files.write(dir, "forged-aligned", together)
	files.write(dir, "forged-odd", append(bytes.Repeat([]byte("odd"), odd)[:odd], together...))
	files.writeSlots(dir, f, records)
	return files, SyncDir(dir)
}

// WriteFormats writes only the file forged-slots, with records of a format, so that nearly all
// other blocks of the disk remain free.
func (f Forgery) WriteFormats(dir string) (files ForgedFiles, err error) {
	defer harness.Catch(&err)
	_, records := f.pages()
	files = ForgedFiles{}
	files.writeSlots(dir, f, records[1:2])
	return files, SyncDir(dir)
}

// roomBytes is the space that is free after Fill.
const roomBytes = 8 << 20

// Fill fills the filesystem with one file of forged records, and then deletes another file, so that
// roomBytes are free. If growths is set, the records are of a growth, otherwise of a format. A
// record begins every 512 bytes, so each block of the file begins with a record.
func (f Forgery) Fill(dir string, growths bool) (files ForgedFiles, err error) {
	defer harness.Catch(&err)
	_, records := f.pages()
	page := records[1]
	if growths {
		page = records[0]
	}
	// write() syncs, so the kernel chooses blocks for "room" before those of "forged-records".
	(ForgedFiles{}).write(dir, "room", make([]byte, roomBytes))
	const name = "forged-records"
	w := harness.Got(os.Create(filepath.Join(dir, name)))
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
	// Remove "room" only after Sync: ext4 chooses the blocks of w's last bytes as late as in Sync.
	harness.Must(errors.Join(w.Truncate(at), w.Sync(), os.Remove(filepath.Join(dir, "room")),
		w.Close(), SyncDir(dir)))
	return ForgedFiles{name: harness.Got(digest(filepath.Join(dir, name)))}, nil
}

func (files ForgedFiles) write(dir, name string, content []byte) {
	path := filepath.Join(dir, name)
	w := harness.Got(os.Create(path))
	_, err := w.Write(content)
	harness.Must(errors.Join(err, w.Sync(), w.Close()))
	files[name] = harness.Got(digest(path))
}

// SyncDir makes the names in a directory durable.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// Check returns an error if the content of a file in the directory has changed.
func (files ForgedFiles) Check(dir string) (err error) {
	for name, want := range files {
		err = errors.Join(err, CheckForged(filepath.Join(dir, name), want))
	}
	return err
}

// CheckForged returns an error if the content of a file does not have the given hash.
func CheckForged(path string, want [sha256.Size]byte) error {
	got, err := digest(path)
	if err == nil && got != want {
		err = fmt.Errorf("the bytes of %s, which contains forged records, have changed",
			filepath.Base(path))
	}
	return err
}

// writeSlots writes the file forged-slots, with records at the disk's offsets where the driver
// writes its own. It gives the file nearly all free space, and then frees the file's other blocks.
// Only ext4 and xfs report a file's blocks, so other filesystems get the records at any offset.
//
// The file gets its name when it is complete, so a crash before that frees its blocks.
func (files ForgedFiles) writeSlots(dir string, f Forgery, records [][]byte) {
	const name = "forged-slots"
	w := harness.Got(os.OpenFile(dir, os.O_RDWR|unix.O_TMPFILE, 0o600))
	defer w.Close()
	size := int64(0)
	if f.Filesystem == "ext4" || f.Filesystem == "xfs" {
		size = takeSpace(w)
	}
	if size == 0 {
		harness.Got(w.Write(bytes.Repeat(bytes.Join(records, nil), 8)))
	} else {
		f.keepSlots(w, size, records)
	}
	path := filepath.Join(dir, name)
	harness.Must(unix.Linkat(unix.AT_FDCWD, fmt.Sprint("/proc/self/fd/", w.Fd()), unix.AT_FDCWD, path,
		unix.AT_SYMLINK_FOLLOW))
	harness.Must(errors.Join(w.Sync(), w.Close()))
	files[name] = harness.Got(digest(path))
}

// keepSlots writes records to w's blocks at the offsets in wanted, and frees all other blocks of w.
func (f Forgery) keepSlots(w *os.File, size int64, records [][]byte) {
	extents := extentsOf(w)
	kept := []int64{0}
	for slot, record := range f.wanted(records) {
		for _, e := range extents {
			if slot >= e.physical && slot+pageBytes <= e.physical+e.length {
				at := e.logical + slot - e.physical
				harness.Got(w.WriteAt(record, at))
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
			harness.Must(unix.Fallocate(int(w.Fd()),
				unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, end-at))
		}
	}
}

// wanted returns a forged record for each offset on the disk where the driver writes a record.
// If the parameter records has only one element, it must be the record of a format.
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

// takeSpace gives w nearly all free space, and returns w's size, or 0 if at most 1 MiB is free.
func takeSpace(w *os.File) (size int64) {
	var st unix.Statfs_t
	harness.Must(unix.Fstatfs(int(w.Fd()), &st))
	var err error
	for size = int64(st.Bfree) * st.Bsize; size > 1<<20; size -= size / 64 {
		size &^= pageBytes - 1
		if err = unix.Fallocate(int(w.Fd()), 0, 0, size); !errors.Is(err, unix.ENOSPC) {
			harness.Must(err)
			return size
		}
	}
	harness.Must(err)
	return 0
}

type extent struct{ logical, physical, length int64 }

// extentsOf asks the kernel for a file's extents (Linux: Documentation/filesystems/fiemap.rst).
func extentsOf(w *os.File) (all []extent) {
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
		harness.Must(fmt.Errorf("ask for the extents of %s: %w", w.Name(), errno))
	}
	for _, e := range request.extents[:request.mapped] {
		all = append(all, extent{int64(e.logical), int64(e.physical), int64(e.length)})
	}
	return all
}
