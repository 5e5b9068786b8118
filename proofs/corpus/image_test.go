//go:build linux

package corpus_test

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30
)

// image is a sparse file with the bytes of a disk. A change that fails ends the trial
// (harness.Must).
type image struct {
	Path  string
	Size  int64
	bases *bases
}

func newImage(path string, size int64) *image {
	im := &image{Path: path, Size: size}
	harness.Must(os.WriteFile(path, nil, 0o600))
	im.resize(size)
	return im
}

// resize changes the size of the file and the disk.
func (im *image) resize(size int64) {
	im.Size = size
	im.cut(size)
}

// cut changes the size of the file only.
func (im *image) cut(size int64) { harness.Must(os.Truncate(im.Path, size)) }

// at converts a negative offset, which counts from the end.
func (im *image) at(offset int64) int64 {
	if offset < 0 {
		return im.Size + offset
	}
	return offset
}

// write writes bytes at an offset. A negative offset counts from the end.
func (im *image) write(offset int64, b ...byte) {
	im.with(func(f *os.File) error {
		_, err := f.WriteAt(b, im.at(offset))
		return err
	})
}

func (im *image) wipe(offset, n int64) {
	im.with(func(f *os.File) error {
		return unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE,
			im.at(offset), n)
	})
}

func (im *image) with(do func(*os.File) error) {
	f := harness.Got(os.OpenFile(im.Path, os.O_RDWR, 0))
	harness.Must(errors.Join(do(f), f.Close()))
}

func (im *image) tool(name string, args ...string) {
	harness.Must(runTool(name, append(args, im.Path)...))
}

func runTool(name string, args ...string) error {
	out, err := exec.Command(name, args...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s %s: %w\n%s", name, strings.Join(args, " "), err, out)
	}
	return nil
}

// copyIn writes the bytes of another file at an offset, and skips zeros.
func (im *image) copyIn(from string, offset int64) {
	im.with(func(f *os.File) error {
		return proof.EachPage(from, func(at int64, b []byte) error {
			_, err := f.WriteAt(b, offset+at)
			return err
		})
	})
}

func (im *image) read(offset, n int64) []byte {
	b := make([]byte, n)
	im.with(func(f *os.File) error {
		_, err := f.ReadAt(b, im.at(offset))
		return err
	})
	return b
}

// pageBytes is the unit in which images are compared.
const pageBytes = 4096

// digest returns a hash of the file's size, and of its bytes between two offsets. If to is 0, they
// are all bytes from the first offset on. A hole has the same hash as zeros.
func (im *image) digest(from, to int64) string {
	sum := sha256.New()
	harness.Must(proof.EachPage(im.Path, func(at int64, page []byte) error {
		if at >= from && (to == 0 || at < to) {
			sum.Write(binary.LittleEndian.AppendUint64(nil, uint64(at)))
			sum.Write(page)
		}
		return nil
	}))
	return fmt.Sprintf(digestFormat, harness.Got(os.Stat(im.Path)).Size(), sum.Sum(nil)[:8])
}

const digestFormat = "%d bytes, %x"

// blank returns the digest of a blank disk of the image's size.
func (im *image) blank() string {
	return fmt.Sprintf(digestFormat, im.Size, sha256.New().Sum(nil)[:8])
}

// payloadName is the name of a file in every filesystem of the corpus. A filesystem without it was
// made by the driver.
const payloadName = "payload"

// bases keeps filesystems that trials copy, so that most trials need no mkfs of their own.
type bases struct {
	dir     string
	payload []byte

	// mu guards made, which maps a description of a filesystem to its file.
	mu   sync.Mutex
	made map[string]*base
}

type base struct {
	once sync.Once
	path string
	err  error
}

func newBases(dir string, r *rand.Rand) (*bases, error) {
	b := &bases{dir: filepath.Join(dir, "bases"), payload: randomBytes(r, 192*kib),
		made: map[string]*base{}}
	proto := fmt.Sprintf("/\n0 0\nd--755 0 0\n%s ---600 0 0 %s\n$\n", payloadName,
		filepath.Join(b.root(), payloadName))
	return b, errors.Join(os.MkdirAll(b.root(), 0o755),
		os.WriteFile(filepath.Join(b.root(), payloadName), b.payload, 0o600),
		os.WriteFile(b.proto(), []byte(proto), 0o600))
}

// root returns the directory with the files of each filesystem. proto returns the path of their
// description for mkfs.xfs.
func (b *bases) root() string  { return filepath.Join(b.dir, "root") }
func (b *bases) proto() string { return filepath.Join(b.dir, "proto") }

// get returns the file for a key, which it makes at the first call.
func (b *bases) get(key string, size int64, fill func(*image)) (path string) {
	key = fmt.Sprintf("%s of %d bytes", key, size)
	b.mu.Lock()
	one := b.made[key]
	if one == nil {
		one = &base{path: filepath.Join(b.dir, fmt.Sprintf("base-%d", len(b.made)))}
		b.made[key] = one
	}
	b.mu.Unlock()
	one.once.Do(func() {
		defer harness.Catch(&one.err)
		im := newImage(one.path, size)
		im.bases = b
		fill(im)
	})
	harness.Must(one.err)
	return one.path
}
