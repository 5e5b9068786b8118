//go:build linux

package corpus_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

const (
	kib = int64(1) << 10
	mib = int64(1) << 20
	gib = int64(1) << 30
)

// image is a sparse file with a disk's content. A method that fails ends the trial (harness.Must).
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

func (im *image) resize(size int64) {
	im.Size = size
	im.cut(size)
}

// cut changes only the size of the file, so a part of the disk cannot be read.
func (im *image) cut(size int64) { harness.Must(os.Truncate(im.Path, size)) }

// at returns an offset from the start of the disk. A negative offset counts from the end.
func (im *image) at(offset int64) int64 {
	if offset < 0 {
		return im.Size + offset
	}
	return offset
}

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
	harness.Must(proof.RunTool(name, append(args, im.Path)...))
}

// copyIn writes the content of another file at an offset, except its zeros.
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

const pageBytes = 4096

// digest returns a hash of the file's size and of its bytes between two offsets. With to = 0 the
// range ends with the file. A hole has the same hash as zeros.
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

func (im *image) blank() string {
	return fmt.Sprintf(digestFormat, im.Size, sha256.New().Sum(nil)[:8])
}

// Every filesystem that a trial makes contains a file of this name. A filesystem without this file
// was made by the driver.
const payloadName = "payload"

// bases keeps filesystems that trials copy, so most trials run no mkfs of their own.
type bases struct {
	dir     string
	payload []byte

	// mu guards made. Each function in made returns the file of a filesystem, and makes it once.
	mu   sync.Mutex
	made map[string]func() (path string, err error)
}

func newBases(dir string, r *rand.Rand) (*bases, error) {
	b := &bases{dir: filepath.Join(dir, "bases"), payload: randomBytes(r, 192*kib),
		made: map[string]func() (string, error){}}
	proto := fmt.Sprintf("/\n0 0\nd--755 0 0\n%s ---600 0 0 %s\n$\n", payloadName,
		filepath.Join(b.root(), payloadName))
	return b, errors.Join(os.MkdirAll(b.root(), 0o755),
		os.WriteFile(filepath.Join(b.root(), payloadName), b.payload, 0o600),
		os.WriteFile(b.proto(), []byte(proto), 0o600))
}

// mkfs copies the content of the directory root() into each filesystem. The file proto() describes
// this content for mkfs.xfs.
func (b *bases) root() string  { return filepath.Join(b.dir, "root") }
func (b *bases) proto() string { return filepath.Join(b.dir, "proto") }

// get returns the file of the filesystem with the key. At the first call, fill() makes this file.
func (b *bases) get(key string, size int64, fill func(*image)) (path string) {
	key = fmt.Sprintf("%s of %d bytes", key, size)
	b.mu.Lock()
	file := b.made[key]
	if file == nil {
		path := filepath.Join(b.dir, fmt.Sprintf("base-%d", len(b.made)))
		file = sync.OnceValues(func() (_ string, err error) {
			defer harness.Catch(&err)
			im := newImage(path, size)
			im.bases = b
			fill(im)
			return path, nil
		})
		b.made[key] = file
	}
	b.mu.Unlock()
	return harness.Got(file())
}

type verdict struct {
	Outcome outcome
	Answer  error
	// Wrong describes what the driver did wrong, or is nil.
	Wrong error
	// Overwritten is set if the driver changed a disk that it must not change.
	Overwritten bool
}

// setupViolation describes what the driver did wrong before the trial's own call.
type setupViolation string

func (m setupViolation) Error() string { return string(m) }

// try runs a trial. Its error means that the trial could not be run.
func (b *bench) try(ctx context.Context, t *trial) (v verdict, err error) {
	f, err := b.newFixture(ctx, t)
	if f != nil {
		defer func() {
			f.keep = b.evidence && (err != nil || v.Wrong != nil)
			b.kept = b.kept || f.keep
			if f.keep {
				v.Wrong = errors.Join(v.Wrong, fmt.Errorf("see %s", f.dir))
			}
			err = errors.Join(err, f.end())
		}()
	}
	if errors.As(err, new(setupViolation)) {
		return verdict{Wrong: err}, nil
	}
	if err != nil {
		return v, err
	}
	defer harness.Catch(&err)
	before := f.digest()
	if slices.Equal(t.Want.Reasons, []string{notBlank}) && t.Set == nil && before == f.image.blank() {
		return v, errors.New("the trial wants a refusal because of the disk's content, and it is blank")
	}
	v.Answer = f.stage(ctx)
	if f.happened != nil {
		if err := f.happened(); err != nil {
			return v, fmt.Errorf("%w (%w)", err, v.Answer)
		}
	}
	v.Outcome, v.Wrong = f.judge(before, v.Answer)
	if v.Outcome == formatted {
		v.Overwritten = t.Want.Outcome != formatted
	}
	if decoyErr := f.untouchedDecoy(); decoyErr != nil {
		v.Wrong = errors.Join(v.Wrong, decoyErr)
		v.Overwritten = true
	}
	if t.Check != nil {
		v.Wrong = errors.Join(v.Wrong, f.checked())
	}
	if v.Answer == nil {
		if err := f.unstage(ctx); err != nil {
			v.Wrong = errors.Join(v.Wrong, fmt.Errorf("the volume cannot be unstaged: %w", err))
		}
	}
	if harm := b.Harm(); harm != nil {
		v.Wrong = errors.Join(v.Wrong, harm)
		v.Overwritten = true
	}
	return v, nil
}

func (f *fixture) checked() (err error) {
	defer harness.Catch(&err)
	return f.Check(f)
}

// digest hashes the bytes that the driver must keep if it refuses the disk.
func (f *fixture) digest() string {
	harness.Must(f.loop.Sync())
	return f.image.digest(0, f.Until)
}

func (f *fixture) judge(before string, answer error) (outcome, error) {
	harness.Must(f.loop.Sync())
	if answer != nil {
		after := f.digest()
		switch {
		case after != before && !f.Want.Begun:
			return formatted, fmt.Errorf("the disk was written (%s, now %s), and the answer is %w",
				before, after, answer)
		case f.Want.Outcome != refused && f.Want.Outcome != either:
			return refused, fmt.Errorf("want it %s, got %w", f.Want.Outcome, answer)
		}
		return refused, f.judgeRefusal(status.Convert(answer))
	}
	got, err := f.judgeMount()
	if err == nil && got != f.Want.Outcome && (got != mounted || f.Want.Outcome != either) {
		err = fmt.Errorf("want it %s, got it %s", f.Want.Outcome, got)
	}
	return got, err
}

func (f *fixture) judgeMount() (outcome, error) {
	mounts, err := harness.MountsAt(f.Staging)
	if err != nil {
		return "", err
	}
	if len(mounts) == 0 {
		return "", errors.New("the answer was OK, and nothing is mounted")
	}
	switch m := mounts[len(mounts)-1]; {
	case harness.MountedNumber(m) != fmt.Sprintf("%d:%d", f.loop.Major, f.loop.Minor):
		return mounted, fmt.Errorf("%s (%d:%d) is mounted, another disk than %s", m.Source, m.Major,
			m.Minor, f.loop.Path)
	case m.FSType != f.FS:
		return mounted, fmt.Errorf("a %s is mounted, not a %s", m.FSType, f.FS)
	}
	var got outcome
	harness.Unforked(func() { got, err = f.judgeFiles() })
	return got, err
}

func (f *fixture) judgeFiles() (outcome, error) {
	names, err := entries(f.Staging)
	if err != nil {
		return "", err
	}
	if slices.Contains(names, payloadName) {
		got, err := os.ReadFile(filepath.Join(f.Staging, payloadName))
		if err == nil && !bytes.Equal(got, f.bench.bases.payload) {
			err = errors.New("the filesystem's file has other bytes than it had")
		}
		return mounted, err
	}
	if len(names) > 0 {
		return formatted, fmt.Errorf("the new filesystem contains %q", names)
	}
	return formatted, os.WriteFile(filepath.Join(f.Staging, "new"), []byte("new"), 0o600)
}

func entries(dir string) ([]string, error) {
	list, err := os.ReadDir(dir)
	var names []string
	for _, e := range list {
		if e.Name() != "lost+found" {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func (f *fixture) judgeRefusal(answer *status.Status) error {
	w, message := f.Want, answer.Message()
	code := codes.FailedPrecondition.String()
	if w.Code != "" {
		code = w.Code
	}
	if answer.Code().String() != code {
		return fmt.Errorf("want %s, got %w", code, answer.Err())
	}
	reason, sentence, _ := strings.Cut(message, ": ")
	if !slices.Contains(w.Reasons, reason) {
		return fmt.Errorf("want a reason of %q, got %q", w.Reasons, message)
	}
	for _, words := range w.Says {
		if !strings.Contains(sentence, words) {
			return fmt.Errorf("the evidence does not contain %q: %q", words, message)
		}
	}
	if reason != notBlank && w.Outcome != either {
		return nil
	}
	named := slices.ContainsFunc(w.Names, func(name string) bool {
		return strings.Contains(strings.ToLower(sentence), strings.ToLower(name))
	})
	place, err := f.judgePlaces(sentence)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %q", err, message)
	case !named && (!place || w.Outcome == either):
		return fmt.Errorf("the evidence has neither one of %q nor a place: %q", w.Names, message)
	}
	return nil
}

var place = regexp.MustCompile(`offset (\d+)`)

// judgePlaces fails if the sentence names an offset beyond the disk, or one where all is zero.
func (f *fixture) judgePlaces(sentence string) (named bool, err error) {
	for _, m := range place.FindAllStringSubmatch(sentence, -1) {
		offset, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil || offset >= f.image.Size {
			return false, fmt.Errorf("the evidence names offset %s of a disk of %d bytes", m[1],
				f.image.Size)
		}
		at := offset &^ (512 - 1)
		sector := f.image.read(at, min(512, f.image.Size-at))
		if bytes.Count(sector, []byte{0}) == len(sector) {
			return false, fmt.Errorf("the evidence names offset %d, where all is zero", offset)
		}
		named = true
	}
	return named, nil
}

func (f *fixture) untouchedDecoy() error {
	return proof.EachData(f.decoy.Path, func(at int64, b []byte) error {
		if i := slices.IndexFunc(b, func(c byte) bool { return c != 0 }); i >= 0 {
			return fmt.Errorf("another disk was written, at offset %d", at+int64(i))
		}
		return nil
	})
}
