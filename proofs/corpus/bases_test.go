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

// payloadName is the file that every filesystem here holds, by which an old one is told from a new
// one.
const payloadName = "payload"

// bases keeps finished filesystems, so that the disks made from one need no mkfs each.
type bases struct {
	dir     string
	payload []byte

	// mu guards made, the files by how they were made.
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

// root is the directory whose files each filesystem gets, and proto says the same to mkfs.xfs.
func (b *bases) root() string  { return filepath.Join(b.dir, "root") }
func (b *bases) proto() string { return filepath.Join(b.dir, "proto") }

// get makes a file once.
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
