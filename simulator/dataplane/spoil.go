package dataplane

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// The tampers of this file are a product of three parts: the wrong that happens to a block, the
// moment in the life of a disk, and the place of the block. A fourth one may limit them to disks of
// one size.

// wrong is one kind of damage to a block of a victim. It is called when the file becomes a
// victim, and whenever the victim is unplugged later.
type wrong struct {
	name, says string
	do         func(v *victim) error
	// unplugged means that it happens only when the victim is unplugged.
	unplugged bool
}

var wrongs = []wrong{
	{name: "lost", says: "is zero, whatever is written",
		do: func(v *victim) error { return v.write(v.at, blankBlock) }},
	{name: "stale", says: "has what it had earlier", do: func(v *victim) error {
		return v.once(v.old != nil, func() error { return v.write(v.at, v.old) })
	}},
	{name: "foreign", says: "holds something of nobody's", do: func(v *victim) error {
		return v.once(true, func() error { return v.write(v.at, dirt()) })
	}},
	{name: "decayed", says: "holds something of nobody's when it comes back", unplugged: true,
		do: func(v *victim) error { return v.write(v.at, dirt()) }},
	{name: "shared", says: "is also one of another disk or snapshot", do: (*victim).share},
	{name: "torn", says: "has only its first half", do: func(v *victim) error {
		return v.write(v.at+tamperBlock/2, blankBlock[:tamperBlock/2])
	}},
	{name: "late", says: "has its bytes only after one more detach", do: func(v *victim) error {
		now, err := readBlock(v.path, v.at)
		if err != nil {
			return err
		}
		late := v.late
		if late == nil {
			late = blankBlock
		}
		v.late = now
		return v.write(v.at, late)
	}},
	{name: "swapped", says: "has exchanged its bytes with another block", do: (*victim).swap},
}

// moment is the moment at which a disk or a snapshot becomes a victim.
type moment struct {
	name, says string
	// find returns the victims of an event.
	find func(s *spoiler, p *Plane, e event) []*victim
}

var moments = []moment{
	{"new", "a new disk", (*spoiler).newDisk},
	{"large", "a new disk of more than 1 GiB, behind the first", (*spoiler).largeDisk},
	{"recreated", "a new disk with the name of a deleted one", (*spoiler).recreated},
	{"restored", "a disk restored from a snapshot", (*spoiler).restored},
	{"larger", "a disk restored from a smaller snapshot, behind its bytes", (*spoiler).larger},
	{"orphaned", "a restored disk, when its snapshot's disk is deleted", (*spoiler).orphaned},
	{"orphan", "a snapshot, when its disk is deleted", (*spoiler).orphan},
	{"unbacked", "a restored disk, when its snapshot is deleted", (*spoiler).unbacked},
}

// place is the place of a block: an offset in its file, or, if it is negative, from the end.
type place int64

// last is the place of a disk's last block.
const last place = -tamperBlock

// in returns the place in the range, or -1 if it is not there.
func (at place) in(from, to int64) int64 {
	offset := int64(at)
	if offset < 0 {
		offset += to
	}
	if offset < from || offset+tamperBlock > to {
		return -1
	}
	return offset
}

// spoils returns the product of wrongs and moments, at the last block, except two: a snapshot is
// never unplugged, so it has no damage of that time; and a check may not create two large disks, so
// a block of a large disk is not shared.
func spoils() (all []Tamper) {
	for _, w := range wrongs {
		for _, m := range moments {
			if (w.unplugged || w.name == "late") && m.name == "orphan" ||
				w.name == "shared" && m.name == "large" {
				continue
			}
			all = append(all, spoilOf(w, m, last, 0))
		}
	}
	return all
}

func spoilOf(w wrong, m moment, at place, bytes int64) Tamper {
	s := &spoiler{wrong: w, moment: m, at: at, bytes: bytes, names: map[string]string{},
		remains: map[string][]byte{}, originOf: map[string]string{}, sourceOf: map[string]string{}}
	name := fmt.Sprintf("%s:%s:%d", w.name, m.name, at)
	if bytes > 0 {
		name += fmt.Sprint(":", bytes)
	}
	return Tamper{Name: name, life: s.life,
		Says: fmt.Sprintf("the block at byte %d of %s %s", at, m.says, w.says)}
}

// TamperOf returns the tamper with a name: one of Tampers, or WRONG:MOMENT:PLACE or
// WRONG:MOMENT:PLACE:BYTES with any place, for disks of that size.
func TamperOf(name string) (Tamper, bool) {
	all := Tampers()
	if i := slices.IndexFunc(all, func(t Tamper) bool { return t.Name == name }); i >= 0 {
		return all[i], true
	}
	words := append(strings.Split(name, ":"), "0")
	if len(words) < 4 {
		return Tamper{}, false
	}
	w := slices.IndexFunc(wrongs, func(w wrong) bool { return w.name == words[0] })
	m := slices.IndexFunc(moments, func(m moment) bool { return m.name == words[1] })
	at, err := strconv.ParseInt(words[2], 10, 64)
	bytes, errBytes := strconv.ParseInt(words[3], 10, 64)
	if w < 0 || m < 0 || errors.Join(err, errBytes) != nil {
		return Tamper{}, false
	}
	return spoilOf(wrongs[w], moments[m], place(at), bytes), true
}

// happening is a kind of event.
type happening int

const (
	diskMade happening = iota
	diskCloned
	diskPlugging
	diskUnplugged
	diskRemoving
	diskRemoved
	snapshotTaken
	snapshotRemoving
	snapshotRemoved
)

// event is a change of a disk or a snapshot.
type event struct {
	what happening
	// disk is the disk's ID. name is its name, when it is plugged. bytes is its size, when it is
	// created or plugged.
	disk, name string
	bytes      int64
	// fault is that of a disk that is plugged.
	fault *Fault
	// snapshot is the file of the event's snapshot or image.
	snapshot string
}

// spoiler is one active tamper of the product.
type spoiler struct {
	wrong  wrong
	moment moment
	at     place
	// bytes is the size of the victims, or 0.
	bytes int64

	mu sync.Mutex
	// mu guards the fields below.
	//
	// names are the names of the disks that were plugged, by ID. remains has a block of each deleted
	// disk, by name, and last has the block of the disk that was deleted last.
	names   map[string]string
	remains map[string][]byte
	last    []byte
	// originOf has the disk of each snapshot's file, and sourceOf the source file of each restored
	// disk.
	originOf, sourceOf map[string]string
	// held is the content that a snapshot's file had when it was removed.
	held    []byte
	victims []*victim
}

// life records an event, and spoils the block of each victim.
func (s *spoiler) life(p *Plane, e event) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	path := p.DiskPath(e.disk)
	switch e.what {
	case diskCloned:
		s.sourceOf[e.disk] = e.snapshot
	case snapshotTaken:
		s.originOf[e.snapshot] = e.disk
	case diskRemoving:
		if size, err := fileSize(path); err == nil {
			s.last, _ = readBlock(path, s.at.in(0, size))
			s.remains[s.names[e.disk]] = s.last
		}
	case snapshotRemoving:
		if size, err := fileSize(e.snapshot); err == nil {
			s.held, _ = readBlock(e.snapshot, s.at.in(0, size))
		}
	}
	fresh := s.moment.find(s, p, e)
	if e.what == diskPlugging {
		s.names[e.disk] = e.name
	}
	var errs []error
	for _, v := range s.victims {
		if e.what == diskUnplugged && (v.path == path || slices.Contains(v.peers, path)) {
			errs = append(errs, s.wrong.do(v))
		}
	}
	for _, v := range fresh {
		if !s.wrong.unplugged {
			errs = append(errs, s.wrong.do(v))
		}
	}
	s.victims = append(s.victims, fresh...)
	return errors.Join(errs...)
}

// victim turns a file into a victim. Its block is in the given range.
func (s *spoiler) victim(path string, from, to int64, old []byte, peers ...string) []*victim {
	v := &victim{path: path, at: s.at.in(from, to), old: old}
	if size, err := fileSize(path); v.at < 0 || err != nil || s.bytes > 0 && size != s.bytes {
		return nil
	}
	if v.at == 0 {
		v.other = tamperBlock
	}
	for _, peer := range peers {
		if exists(peer) {
			v.peers = append(v.peers, peer)
		}
	}
	v.shared, _ = readBlock(path, v.at) // the next step fails for an unreadable file
	return []*victim{v}
}

func (s *spoiler) newDisk(p *Plane, e event) []*victim {
	if e.what != diskMade {
		return nil
	}
	return s.victim(p.DiskPath(e.disk), 0, e.bytes, s.last, p.anotherFile(e.disk, s.at.in(0, e.bytes)))
}

func (s *spoiler) largeDisk(p *Plane, e event) []*victim {
	if e.what != diskMade || e.bytes <= 1<<30 {
		return nil
	}
	return s.victim(p.DiskPath(e.disk), 1<<30, e.bytes, s.last, p.anotherFile(e.disk, 0))
}

func (s *spoiler) recreated(p *Plane, e event) []*victim {
	old, known := s.remains[e.name]
	if e.what != diskPlugging || !known || s.names[e.disk] != "" {
		return nil
	}
	peer := ""
	for snapshot, origin := range s.originOf {
		if s.names[origin] == e.name {
			peer = snapshot
		}
	}
	return s.victim(p.DiskPath(e.disk), 0, e.bytes, old, peer)
}

func (s *spoiler) restored(p *Plane, e event) []*victim {
	if size, err := fileSize(e.snapshot); e.what != diskCloned || err != nil || size != e.bytes {
		return nil
	}
	return s.victim(p.DiskPath(e.disk), 0, e.bytes, s.otherMoment(e.snapshot), e.snapshot)
}

func (s *spoiler) larger(p *Plane, e event) []*victim {
	size, err := fileSize(e.snapshot)
	if e.what != diskCloned || err != nil || size >= e.bytes {
		return nil
	}
	return s.victim(p.DiskPath(e.disk), size, e.bytes, s.last,
		p.anotherFile(e.disk, s.at.in(size, e.bytes)))
}

func (s *spoiler) orphaned(p *Plane, e event) (all []*victim) {
	for disk, snapshot := range s.sourceOf {
		size, err := fileSize(snapshot)
		if e.what == diskRemoved && err == nil && s.originOf[snapshot] == e.disk &&
			exists(p.DiskPath(disk)) {
			old, _ := readBlock(snapshot, s.at.in(0, size))
			all = append(all, s.victim(p.DiskPath(disk), 0, size, old, snapshot)...)
		}
	}
	return all
}

func (s *spoiler) orphan(p *Plane, e event) (all []*victim) {
	for snapshot, origin := range s.originOf {
		size, err := fileSize(snapshot)
		if e.what != diskRemoved || err != nil || origin != e.disk {
			continue
		}
		all = append(all, s.victim(snapshot, 0, size, s.otherMoment(snapshot),
			s.madeFrom(p, snapshot, "")...)...)
	}
	return all
}

func (s *spoiler) unbacked(p *Plane, e event) (all []*victim) {
	for disk, snapshot := range s.sourceOf {
		path := p.DiskPath(disk)
		size, err := fileSize(path)
		if e.what == snapshotRemoved && err == nil && snapshot == e.snapshot {
			all = append(all, s.victim(path, 0, size, s.held, s.madeFrom(p, snapshot, disk)...)...)
		}
	}
	return all
}

// otherMoment returns the block's content in another snapshot of the same disk, or nil.
func (s *spoiler) otherMoment(snapshot string) []byte {
	for other, origin := range s.originOf {
		size, err := fileSize(other)
		if err == nil && other != snapshot && origin == s.originOf[snapshot] {
			block, _ := readBlock(other, s.at.in(0, size))
			return block
		}
	}
	return nil
}

// madeFrom returns the files of the other disks that were restored from a snapshot.
func (s *spoiler) madeFrom(p *Plane, snapshot, not string) (paths []string) {
	for disk, source := range s.sourceOf {
		if source == snapshot && disk != not {
			paths = append(paths, p.DiskPath(disk))
		}
	}
	return paths
}

// anotherFile returns the file of another disk that has a block at the offset, or "".
func (p *Plane) anotherFile(disk string, at int64) string {
	paths, _ := filepath.Glob(p.DiskPath("*")) // fails only for an invalid pattern
	for _, path := range paths {
		size, err := fileSize(path)
		if err == nil && size >= at+tamperBlock && path != p.DiskPath(disk) {
			return path
		}
	}
	return ""
}

// victim is a file with a block that is spoiled.
type victim struct {
	path      string
	at, other int64
	// old is the earlier content of the block, if it is known. late is the content that it will get
	// later.
	old, late []byte
	// peers are the files that share the block, and shared is its last common content.
	peers  []string
	shared []byte
	done   bool
}

// once calls do the first time that possible is true.
func (v *victim) once(possible bool, do func() error) error {
	if v.done || !possible {
		return nil
	}
	v.done = true
	return do()
}

// share copies the block from the file that has written it to the others.
func (v *victim) share() error {
	files := append([]string{v.path}, v.peers...)
	for _, path := range files {
		block, err := readBlock(path, v.at)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err != nil || bytes.Equal(block, v.shared) || bytes.Equal(block, blankBlock) {
			continue
		}
		v.shared = block
		var errs []error
		for _, other := range files {
			if other != path {
				errs = append(errs, writeBlock(other, v.at, block))
			}
		}
		return errors.Join(errs...)
	}
	return nil
}

// swap exchanges two blocks that differ.
func (v *victim) swap() error {
	one, err := readBlock(v.path, v.at)
	if err != nil {
		return err
	}
	two, err := readBlock(v.path, v.other)
	if err != nil {
		return err
	}
	return v.once(!bytes.Equal(one, two), func() error {
		return errors.Join(v.write(v.at, two), v.write(v.other, one))
	})
}

func (v *victim) write(at int64, data []byte) error { return writeBlock(v.path, at, data) }

var blankBlock = make([]byte, tamperBlock)

func fileSize(path string) (int64, error) {
	st, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return st.Size(), nil
}

// readBlock reads a block of a file. Bytes behind the end are zero.
func readBlock(path string, at int64) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	block := make([]byte, tamperBlock)
	if _, err = f.ReadAt(block, at); errors.Is(err, io.EOF) {
		err = nil
	}
	return block, err
}

// writeBlock writes to a file, if it still exists.
func writeBlock(path string, at int64, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	_, err = f.WriteAt(data, at)
	return errors.Join(err, f.Close())
}
