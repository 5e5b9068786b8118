//go:build linux

package corpus_test

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
)

// payloadName is the name of a file in every filesystem of the corpus. It distinguishes an old
// filesystem from a new one.
const payloadName = "payload"

// bases keeps finished filesystems, so that a disk made from one needs no mkfs of its own.
type bases struct {
	dir     string
	payload []byte

	// mu guards made, which maps the way in which a filesystem was made to its file.
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

// root returns the directory whose files are in each filesystem. proto describes the same
// files for mkfs.xfs.
func (b *bases) root() string  { return filepath.Join(b.dir, "root") }
func (b *bases) proto() string { return filepath.Join(b.dir, "proto") }

// get returns the file for a key, which it makes at the first call.
func (b *bases) get(key string, size int64, fill func(*image)) (string, error) {
	key = fmt.Sprintf("%s of %d bytes", key, size)
	b.mu.Lock()
	one := b.made[key]
	if one == nil {
		one = &base{path: filepath.Join(b.dir, fmt.Sprintf("base-%d", len(b.made)))}
		b.made[key] = one
	}
	b.mu.Unlock()
	one.once.Do(func() {
		im := newImage(one.path, size)
		im.bases = b
		fill(im)
		one.err = im.err
	})
	return one.path, one.err
}
