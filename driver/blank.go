//go:build linux

package driver

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
)

const (
	// edgeBytes is how much of the start and of the end of a disk is read before it is formatted.
	edgeBytes = 1 << 20
	// headBytes holds the superblocks of the filesystems the driver makes.
	headBytes = 128 << 10
)

// content is what a disk holds: one known filesystem, or nothing at all. Everything else is
// refused.
type content struct {
	Blank      bool
	Filesystem superblock
}

// inspect says what the open device holds. It only reads.
//
// blkid is asked, but what it does not find proves nothing: it answers "nothing" for a device that
// is not there, for random bytes and for a filesystem whose device was cut short. So blank is only
// what blkid knows nothing of and whose first and last MiB were read and are zero.
//
// A single filesystem whose superblock carries a correct checksum, with no mark of anything else
// around it, needs no blkid: it is not going to be overwritten, only mounted.
func (h *heldDevice) inspect() (content, error) {
	unreadable := func(err error) error {
		return refuse(ReasonDeviceUnreadable, "what the disk holds cannot be known: %w", err)
	}
	head, err := h.readAt(0, min(h.SizeBytes, headBytes))
	if err != nil {
		return content{}, unreadable(err)
	}
	found := findSuperblocks(head)
	var ask func() (signature, error)
	if len(found) == 0 {
		// This takes about as long as reading the edges does.
		ask = inBackground(func() (signature, error) { return blkid(h.file) })
	} else {
		ask = func() (signature, error) { return blkid(h.file) }
	}
	edges, err := h.readEdges()
	if err == nil && len(found) == 1 && edges.proves(found[0]) {
		return content{Filesystem: found[0]}, nil
	}
	known, probeErr := ask()
	if err != nil {
		return content{}, unreadable(err)
	}
	if probeErr != nil {
		return content{}, fmt.Errorf("probe %s: %w", h.Path, probeErr)
	}
	return judge(h.Path, edges, found, known)
}

// inBackground starts f at once; what it returns waits for the result, and has to be called.
func inBackground[T any](f func() (T, error)) func() (T, error) {
	var result T
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		result, err = f()
	}()
	return func() (T, error) {
		<-done
		return result, err
	}
}

// judge decides from what was read and from what blkid knows.
func judge(path string, e edges, found []superblock, known signature) (content, error) {
	first, dirty := e.firstNonZero()
	switch {
	case !dirty && !known.any():
		return content{Blank: true}, nil
	case len(found) == 1 && known.Type == found[0].Type && known.Table == "" && !known.Ambiguous &&
		!found[0].Unfinished:
		return content{Filesystem: found[0]}, nil
	case known.any():
		return content{}, refuse(ReasonDiskNotBlank, "%s holds %s; the driver neither formats nor "+
			"mounts it (its first byte that is not zero is at offset %d)", path, known, first)
	case len(found) > 0 && found[0].Unfinished:
		return content{}, refuse(ReasonDiskNotBlank, "%s holds an unfinished %s filesystem; the "+
			"driver neither formats nor mounts it", path, found[0].Type)
	}
	return content{}, refuse(ReasonDiskNotBlank, "%s holds data of an unknown kind: the byte at "+
		"offset %d is not zero; the driver formats only a disk whose first and last MiB are zero",
		path, first)
}

// edges is the start and the end of a disk.
type edges struct {
	head, tail []byte
	size       int64
}

// readEdges reads the first and the last MiB; of a smaller disk, all of it twice.
func (h *heldDevice) readEdges() (e edges, err error) {
	n := min(h.SizeBytes, edgeBytes)
	e.size = h.SizeBytes
	if e.head, err = h.readAt(0, n); err != nil {
		return edges{}, err
	}
	e.tail, err = h.readAt(h.SizeBytes-n, n)
	return e, err
}

// firstNonZero is the offset of the first byte that is not zero in what was read.
func (e edges) firstNonZero() (int64, bool) {
	if i := nonZero(e.head); i >= 0 {
		return int64(i), true
	}
	if i := nonZero(e.tail); i >= 0 {
		return e.size - int64(len(e.tail)) + int64(i), true
	}
	return 0, false
}

// nonZero is the index of the first byte that is not zero, or -1. It compares whole pages, which is
// what makes a MiB cost microseconds.
func nonZero(b []byte) int {
	var page [4096]byte
	for at := 0; at < len(b); at += len(page) {
		part := b[at:min(at+len(page), len(b))]
		if bytes.Equal(part, page[:len(part)]) {
			continue
		}
		for i, c := range part {
			if c != 0 {
				return at + i
			}
		}
	}
	return -1
}

// proves says that the filesystem is whole by its own account and that nothing else shows at the
// places where partition tables and RAID members keep their marks. Boot code or an old table before
// the superblock makes blkid decide.
func (e edges) proves(sb superblock) bool {
	if !sb.Checked || sb.Unfinished || e.size < 2*edgeBytes {
		return false
	}
	before := 0
	switch sb.Type {
	case fsExt3, fsExt4:
		before = extOffset
	case fsBtrfs:
		before = btrfsOffset
	}
	if nonZero(e.head[:before]) >= 0 {
		return false
	}
	for _, blockBytes := range []int{512, 4096} {
		if bytes.HasPrefix(e.tail[len(e.tail)-blockBytes:], []byte("EFI PART")) {
			return false
		}
	}
	// md keeps its superblock 64 KiB (format 0.90) or 8 KiB (format 1.0) before the end, aligned.
	for _, at := range []int64{e.size&^(64<<10-1) - 64<<10, (e.size/512 - 16) &^ 7 * 512} {
		in := e.tail[at-(e.size-int64(len(e.tail))):]
		const mdMagic = 0xa92b4efc
		if binary.LittleEndian.Uint32(in) == mdMagic || binary.BigEndian.Uint32(in) == mdMagic {
			return false
		}
	}
	return true
}

// signature is what blkid says of a disk.
type signature struct {
	Type      string // a filesystem, or a member of something
	Table     string // a partition table
	Ambiguous bool   // more than one thing, and blkid will not choose
}

func (s signature) any() bool { return s != signature{} }

func (s signature) String() string {
	var words []string
	if s.Table != "" {
		words = append(words, "a partition table ("+s.Table+")")
	}
	if s.Type != "" {
		words = append(words, s.Type)
	}
	if s.Ambiguous {
		words = append(words, "the marks of several filesystems or tables at once")
	}
	return strings.Join(words, " and ")
}

// The exit states of blkid -p (blkid(8)).
const (
	blkidFound     = 0
	blkidNothing   = 2
	blkidAmbiguous = 8
)

// blkid probes the open device: the program inherits the descriptor, so that it cannot be led to
// another device.
func blkid(f *os.File) (signature, error) {
	result, err := runTool([]*os.File{f}, "blkid", "-p", "-o", "export", "/proc/self/fd/3")
	if err != nil {
		return signature{}, err
	}
	switch result.Exit {
	case blkidFound:
		return parseBlkid(result.Stdout)
	case blkidNothing:
		return signature{}, nil
	case blkidAmbiguous:
		return signature{Ambiguous: true}, nil
	}
	return signature{}, result.failure("blkid", f.Name())
}

// parseBlkid reads the output of blkid -o export. One that names neither a type nor a table is an
// error: something was found.
func parseBlkid(output string) (signature, error) {
	var s signature
	for line := range strings.Lines(output) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch key {
		case "TYPE":
			s.Type = value
		case "PTTYPE":
			s.Table = value
		}
	}
	if !s.any() {
		return s, refuse(ReasonNodeToolFailed, "blkid found something but names neither a type "+
			"nor a partition table")
	}
	return s, nil
}
