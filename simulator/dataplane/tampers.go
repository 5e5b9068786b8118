package dataplane

import (
	"bytes"
	"context"
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
	"time"
)

// Tamper makes a data plane damage bytes or devices on purpose. The data checks of the conformance
// suite must notice the damage. A field that is nil does nothing.
type Tamper struct {
	Name, Says string

	// source replaces the path of the file from which the plane copies a new disk.
	source func(f Files, path string) (string, error)
	// shown() returns the properties of d that a guest sees. others has all devices of the guest.
	shown func(d Device, others []*plugged) Device
	// copied() may change the file of a snapshot after the plane has copied the disk d to it.
	copied func(ctx context.Context, p *Plane, snapshot *os.File, d *plugged) error
	// With keeps, a guest still sees detached disks. With elsewhere, all guests see attached disks.
	keeps, elsewhere bool
	// The plane calls life() for every event of a disk or a snapshot.
	life func(p *Plane, e event) error
}

type tampering struct {
	plane *Plane

	mu sync.Mutex
	// mu guards the fields below.
	now Tamper
	// undo maps a disk's ID to functions that hide the disk from guests that should not see it. The
	// key "" has the functions for detached disks.
	undo map[string][]func() error
}

// Tamper activates t and removes the previous tamper's devices and files. A zero t does no damage.
func (p *Plane) Tamper(t Tamper) error {
	p.tampering.mu.Lock()
	undo := p.tampering.undo
	p.tampering.now, p.tampering.undo = t, map[string][]func() error{}
	p.tampering.mu.Unlock()
	var errs []error
	for _, all := range undo {
		for _, remove := range all {
			errs = append(errs, remove())
		}
	}
	return errors.Join(append(errs, RemoveTree(p.tampering.path("")))...)
}

func (a *tampering) tamper() Tamper {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.now
}

func (a *tampering) path(name string) string { return filepath.Join(a.plane.Dir, "tamper", name) }

// life passes an event on to the tamper. After a failed operation it only returns the error.
func (a *tampering) life(e event, failed error) error {
	if t := a.tamper(); failed == nil && t.life != nil {
		return t.life(a.plane, e)
	}
	return failed
}

func (a *tampering) appearance(d *plugged) Device {
	if t := a.tamper(); t.shown != nil {
		return t.shown(d.spec, a.plane.guests.devices(d.guest))
	}
	return d.spec
}

func (a *tampering) copied(ctx context.Context, snapshot *os.File, d *plugged) error {
	if t := a.tamper(); t.copied != nil {
		return t.copied(ctx, a.plane, snapshot, d)
	}
	return nil
}

func (a *tampering) showElsewhere(d *plugged) error {
	if !a.tamper().elsewhere {
		return nil
	}
	var errs []error
	for id := range a.plane.guests.all() {
		if id == d.spec.InstanceID {
			continue
		}
		other := a.plane.view(id)
		name, err := other.freeName(d.guest.random)
		if err == nil {
			err = other.show(d.spec, *d.loop, name)
		}
		if errs = append(errs, err); err == nil {
			a.mu.Lock()
			a.undo[d.spec.DiskID] = append(a.undo[d.spec.DiskID], func() error { return other.remove(name) })
			a.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

// hidden() removes a device from the guests to which showElsewhere has shown it.
func (a *tampering) hidden(diskID string) (err error) {
	a.mu.Lock()
	all := a.undo[diskID]
	delete(a.undo, diskID)
	a.mu.Unlock()
	for _, remove := range all {
		err = errors.Join(err, remove())
	}
	return err
}

// keeps() reports whether d stays in its guest after a detach, and if so, records how to remove it.
func (a *tampering) keeps(d *plugged) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.now.keeps || d.loop == nil {
		return false
	}
	a.undo[""] = append(a.undo[""], func() error {
		return errors.Join(a.plane.hide(d), a.plane.forceDetach(*d.loop, ""))
	})
	return true
}

const (
	tamperBlock = 4096
	// lateDevice is longer than any check waits for a device.
	lateDevice = 10 * time.Minute
	// tear() begins to copy after tornWrites writes, or after the time tornWait without a write.
	tornWrites = 32
	tornWait   = 5 * time.Second
)

// Tampers returns all tampers.
func Tampers() []Tamper {
	return append([]Tamper{
		{Name: "swapped-disks", Says: "a disk exchanges its bytes with another one when it is attached",
			life: at(diskPlugging, swapDisks)},
		{Name: "stale-read", Says: "an attached disk has the bytes that it had at the detach before " +
			"the last one", life: staleRead},
		{Name: "torn-snapshot", Says: "half of the blocks of a snapshot are later than the rest",
			copied: tear},
		{Name: "serial-missing", Says: "devices have no serial",
			shown: func(d Device, _ []*plugged) Device { d.DiskName = ""; return d }},
		{Name: "serial-doubled", Says: "the second device of a guest has the serial of the first one",
			shown: doubleSerial},
		{Name: "device-smaller", Says: "devices have half the size of their disks",
			life: faulty(func(e event) { e.fault.SizeBytes = e.bytes / 2 })},
		{Name: "device-larger", Says: "devices have twice the size of their disks",
			life: faulty(func(e event) { e.fault.SizeBytes = e.bytes * 2 })},
		{Name: "device-late", Says: "devices appear after ten minutes",
			life: faulty(func(e event) { e.fault.Delay = lateDevice })},
		{Name: "device-never", Says: "an attach succeeds, and no device appears",
			life: faulty(func(e event) { e.fault.Never = true })},
		{Name: "device-left", Says: "a detached disk stays in its guest", keeps: true},
		{Name: "delete-another", Says: "a deletion of a disk deletes the bytes of another one",
			life: at(diskRemoved, deleteAnother)},
		{Name: "other-snapshot", Says: "a disk is restored from another snapshot", source: otherSource},
		{Name: "device-elsewhere", Says: "an attached disk is a device of every other guest, too",
			elsewhere: true},
	}, corruptions()...)
}

func at(what happening, do func(*Plane, event) error) func(*Plane, event) error {
	return func(p *Plane, e event) error {
		if e.what != what {
			return nil
		}
		return do(p, e)
	}
}

func faulty(change func(event)) func(*Plane, event) error {
	return at(diskPlugging, func(_ *Plane, e event) error { change(e); return nil })
}

// otherDisk returns the path of a disk other than diskID for which fits() is true, or "".
func (f Files) otherDisk(diskID string, fits func(id string, sizeBytes int64) bool) string {
	paths, _ := filepath.Glob(f.DiskPath("*")) // fails only for an invalid pattern
	for _, path := range paths {
		id := strings.TrimSuffix(filepath.Base(path), ".img")
		if size, err := fileSize(path); err == nil && id != diskID && fits(id, size) {
			return path
		}
	}
	return ""
}

func holdsSomething(path string) bool {
	file, err := os.Open(path)
	if err != nil {
		return false
	}
	defer func() { _ = file.Close() }()
	_, _, err = nextNonZero(file, 0)
	return err == nil
}

func deleteAnother(p *Plane, _ event) error {
	path := p.Files.otherDisk("", func(id string, _ int64) bool {
		return p.guests.disk(id) == nil && holdsSomething(p.Files.DiskPath(id))
	})
	if path == "" {
		return nil
	}
	size, err := fileSize(path)
	return errors.Join(err, os.Truncate(path, 0), os.Truncate(path, size))
}

func (f Files) replace(path, source string) error {
	size, err := fileSize(source)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o700)
	}
	if err != nil {
		return err
	}
	fresh := path + ".fresh"
	err = f.create(fresh, func(f *os.File) error {
		return fill(context.Background(), f, source, size)
	})
	if err != nil {
		return err
	}
	return os.Rename(fresh, path)
}

func swapDisks(p *Plane, e event) error {
	own := p.Files.DiskPath(e.disk)
	other := p.Files.otherDisk(e.disk, func(id string, size int64) bool {
		return p.guests.disk(id) == nil && size == e.bytes
	})
	if other == "" {
		return nil
	}
	aside := own + ".swap"
	return errors.Join(os.Rename(own, aside), os.Rename(other, own), os.Rename(aside, other))
}

// staleRead gives an attached disk the content that it had at the detach before the last one.
func staleRead(p *Plane, e event) error {
	last, older := p.tampering.path(e.disk), p.tampering.path(e.disk+".older")
	var err error
	switch e.what {
	case diskPlugging:
		err = p.Files.replace(p.Files.DiskPath(e.disk), older)
	case diskUnplugged:
		if err = os.Rename(last, older); err == nil || errors.Is(err, fs.ErrNotExist) {
			err = p.Files.replace(last, p.Files.DiskPath(e.disk))
		}
	}
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// tear lets the guest write for a while, and then copies every second block to the snapshot again.
func tear(ctx context.Context, p *Plane, snapshot *os.File, d *plugged) error {
	before, err := countWrites(*d.loop)
	last, came := before, time.Now()
	for err == nil && last.requests < before.requests+tornWrites && time.Since(came) < tornWait {
		now, failed := countWrites(*d.loop)
		if now.requests > last.requests {
			last, came = now, time.Now()
		}
		err = errors.Join(failed, pause(ctx, 10*time.Millisecond))
	}
	if err = errors.Join(err, d.loop.Sync()); err != nil {
		return err
	}
	disk, err := os.Open(p.Files.DiskPath(d.spec.DiskID))
	if err != nil {
		return err
	}
	defer func() { _ = disk.Close() }()
	block := make([]byte, tamperBlock)
	for end := int64(0); ; {
		var start int64
		if start, end, err = nextData(disk, end); errors.Is(err, errNoData) {
			return nil
		}
		const two = 2 * tamperBlock
		for at := start / two * two; err == nil && at < end; at += two {
			var n int
			if n, err = disk.ReadAt(block, at); err == nil || errors.Is(err, io.EOF) {
				_, err = snapshot.WriteAt(block[:n], at)
			}
		}
		if err != nil {
			return err
		}
	}
}

func doubleSerial(d Device, others []*plugged) Device {
	for _, other := range others {
		if other.spec.DiskID != d.DiskID && other.node != "" {
			d.DiskName = other.spec.DiskName
			break
		}
	}
	return d
}

func dirt() []byte { return bytes.Repeat([]byte("somebody else's "), tamperBlock/16) }

// otherSource returns the path of another snapshot that is not larger, or path if there is none.
func otherSource(f Files, path string) (string, error) {
	own, err := fileSize(path)
	if err != nil || filepath.Dir(path) != filepath.Dir(f.SnapshotPath("")) {
		return path, err
	}
	paths, err := filepath.Glob(f.SnapshotPath("*"))
	for _, other := range paths {
		if size, err := fileSize(other); err == nil && other != path && size <= own {
			return other, nil
		}
	}
	return path, err
}

// A corruption damages one block of a victim: the file of a disk or a snapshot. It combines the
// kind of damage, the moment at which a file becomes a victim, and the block's place in the file.

// damage is a kind of damage. do() runs when a file becomes a victim, and after each unplug.
type damage struct {
	name, effect string
	do           func(v *victim) error
	// unplugged means that do() runs only after an unplug.
	unplugged bool
}

var damages = []damage{
	{name: "lost", effect: "is zero, whatever is written",
		do: func(v *victim) error { return v.write(v.at, blankBlock) }},
	{name: "stale", effect: "has the bytes that it had earlier", do: func(v *victim) error {
		return v.once(v.old != nil, func() error { return v.write(v.at, v.old) })
	}},
	{name: "foreign", effect: "has bytes that nobody has written", do: func(v *victim) error {
		return v.once(true, func() error { return v.write(v.at, dirt()) })
	}},
	{name: "decayed", effect: "has other bytes after a detach", unplugged: true,
		do: func(v *victim) error { return v.write(v.at, dirt()) }},
	{name: "shared", effect: "is also a block of another disk or snapshot", do: (*victim).share},
	{name: "torn", effect: "has only its first half", do: func(v *victim) error {
		return v.write(v.at+tamperBlock/2, blankBlock[:tamperBlock/2])
	}},
	{name: "late", effect: "has its bytes only after one more detach", do: func(v *victim) error {
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
	{name: "swapped", effect: "has exchanged its bytes with another block", do: (*victim).swap},
}

type moment struct {
	name, object string
	// when is the kind of event for which find() is called. find() returns the files to damage.
	when happening
	find func(c *corruption, f Files, e event) []*victim
}

var moments = []moment{
	{"new", "a new disk", diskMade, newBehind(0)},
	{"large", "a new disk, behind its first GiB", diskMade, newBehind(1 << 30)},
	{"recreated", "a new disk with the name of a deleted one", diskPlugging, (*corruption).recreated},
	{"restored", "a disk restored from a snapshot", diskCloned, (*corruption).restored},
	{"larger", "a disk, behind the bytes of its smaller snapshot", diskCloned,
		(*corruption).larger},
	{"orphaned", "a restored disk, when the disk of its snapshot is deleted", diskRemoved,
		(*corruption).orphaned},
	{"orphan", "a snapshot, when its disk is deleted", diskRemoved, (*corruption).orphan},
	{"unbacked", "a restored disk, when its snapshot is deleted", snapshotRemoved,
		(*corruption).unbacked},
}

// place is the offset of a block in a file. A negative offset counts from the end.
type place int64

const last place = -tamperBlock

// in() returns the block's offset, or -1 if the block is not within the bytes [from, to) of a file.
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

// corruptions combines every damage with every moment, at the last block. It omits damages of a
// snapshot that need an unplug, because snapshots are never plugged into a guest. It also omits
// the damage "shared" in a large disk, because a test of it would need two large disks.
func corruptions() (all []Tamper) {
	for _, d := range damages {
		for _, m := range moments {
			if (d.unplugged || d.name == "late") && m.name == "orphan" ||
				d.name == "shared" && m.name == "large" {
				continue
			}
			all = append(all, corruptionOf(d, m, last, 0))
		}
	}
	return all
}

func corruptionOf(d damage, m moment, at place, bytes int64) Tamper {
	c := &corruption{damage: d, moment: m, at: at, bytes: bytes, names: map[string]string{},
		remains: map[string][]byte{}, originOf: map[string]string{}, sourceOf: map[string]string{}}
	name := fmt.Sprintf("%s:%s:%d", d.name, m.name, at)
	if bytes > 0 {
		name += fmt.Sprint(":", bytes)
	}
	block := fmt.Sprint("the block at byte ", at)
	if at == last {
		block = "the last block"
	}
	return Tamper{Name: name, life: c.life, Says: "in " + m.object + ", " + block + " " + d.effect}
}

// TamperOf finds a tamper by its name: one of Tampers, or DAMAGE:MOMENT:PLACE, where PLACE is any
// offset of a block. DAMAGE:MOMENT:PLACE:BYTES damages only files of BYTES bytes.
func TamperOf(name string) (Tamper, bool) {
	all := Tampers()
	if i := slices.IndexFunc(all, func(t Tamper) bool { return t.Name == name }); i >= 0 {
		return all[i], true
	}
	words := append(strings.Split(name, ":"), "0")
	if len(words) < 4 {
		return Tamper{}, false
	}
	d := slices.IndexFunc(damages, func(d damage) bool { return d.name == words[0] })
	m := slices.IndexFunc(moments, func(m moment) bool { return m.name == words[1] })
	at, err := strconv.ParseInt(words[2], 10, 64)
	bytes, errBytes := strconv.ParseInt(words[3], 10, 64)
	if d < 0 || m < 0 || errors.Join(err, errBytes) != nil {
		return Tamper{}, false
	}
	return corruptionOf(damages[d], moments[m], place(at), bytes), true
}

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

type event struct {
	what happening
	// disk is a disk's ID. Only a plug sets name, and only a plug or a creation sets bytes (the size).
	disk, name string
	bytes      int64
	// The plane plugs the disk in with this fault. Tamper.life() can change the fault's fields.
	fault *Fault
	// snapshot is the path of the event's snapshot or image.
	snapshot string
}

type corruption struct {
	damage damage
	moment moment
	at     place
	// bytes is the size that a file must have to become a victim; 0 means any size.
	bytes int64

	mu sync.Mutex
	// mu guards the fields below.
	//
	// names maps the ID of each disk that was ever plugged in to its name. remains maps the name of
	// each deleted disk to its block at the place "at". last is the newest of these blocks.
	names   map[string]string
	remains map[string][]byte
	last    []byte
	// originOf maps a snapshot's path to its disk's ID, sourceOf a disk's ID to its source's path.
	originOf, sourceOf map[string]string
	// held is the block at the place "at" of the snapshot that was deleted last.
	held    []byte
	victims []*victim
}

// life damages a file when it becomes a victim, and again when its disk is unplugged.
func (c *corruption) life(p *Plane, e event) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	path := p.Files.DiskPath(e.disk)
	switch e.what {
	case diskCloned:
		c.sourceOf[e.disk] = e.snapshot
	case snapshotTaken:
		c.originOf[e.snapshot] = e.disk
	case diskRemoving:
		if size, err := fileSize(path); err == nil {
			c.last, _ = readBlock(path, c.at.in(0, size))
			c.remains[c.names[e.disk]] = c.last
		}
	case snapshotRemoving:
		if size, err := fileSize(e.snapshot); err == nil {
			c.held, _ = readBlock(e.snapshot, c.at.in(0, size))
		}
	}
	var fresh []*victim
	if e.what == c.moment.when {
		fresh = c.moment.find(c, p.Files, e)
	}
	if e.what == diskPlugging {
		c.names[e.disk] = e.name
	}
	var errs []error
	c.victims = append(c.victims, fresh...)
	for _, v := range c.victims {
		if e.what == diskUnplugged && (v.path == path || slices.Contains(v.peers, path)) ||
			!c.damage.unplugged && slices.Contains(fresh, v) {
			errs = append(errs, c.damage.do(v))
		}
	}
	return errors.Join(errs...)
}

// victim makes a file a victim. It returns nil if the size is wrong or the file lacks the block.
func (c *corruption) victim(path string, from, to int64, old []byte, peers ...string) []*victim {
	v := &victim{path: path, at: c.at.in(from, to), old: old}
	if size, err := fileSize(path); v.at < 0 || err != nil || c.bytes > 0 && size != c.bytes {
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
	v.shared, _ = readBlock(path, v.at) // if it cannot be read, the damage fails
	return []*victim{v}
}

// newBehind's function makes a new disk a victim, unless the block to damage is before "from".
func newBehind(from int64) func(*corruption, Files, event) []*victim {
	return func(c *corruption, f Files, e event) []*victim {
		least := c.at.in(from, e.bytes) + tamperBlock
		return c.victim(f.DiskPath(e.disk), from, e.bytes, c.last,
			f.otherDisk(e.disk, func(_ string, size int64) bool { return size >= least }))
	}
}

func (c *corruption) recreated(f Files, e event) []*victim {
	old, known := c.remains[e.name]
	if !known || c.names[e.disk] != "" {
		return nil
	}
	peer := ""
	for snapshot, origin := range c.originOf {
		if c.names[origin] == e.name {
			peer = snapshot
		}
	}
	return c.victim(f.DiskPath(e.disk), 0, e.bytes, old, peer)
}

func (c *corruption) restored(f Files, e event) []*victim {
	if size, err := fileSize(e.snapshot); err != nil || size != e.bytes {
		return nil
	}
	return c.victim(f.DiskPath(e.disk), 0, e.bytes, c.otherMoment(e.snapshot), e.snapshot)
}

func (c *corruption) larger(f Files, e event) []*victim {
	size, err := fileSize(e.snapshot)
	if err != nil || size >= e.bytes {
		return nil
	}
	return newBehind(size)(c, f, e)
}

func (c *corruption) orphaned(f Files, e event) (all []*victim) {
	for disk, snapshot := range c.sourceOf {
		size, err := fileSize(snapshot)
		if err == nil && c.originOf[snapshot] == e.disk && exists(f.DiskPath(disk)) {
			old, _ := readBlock(snapshot, c.at.in(0, size))
			all = append(all, c.victim(f.DiskPath(disk), 0, size, old, snapshot)...)
		}
	}
	return all
}

func (c *corruption) orphan(f Files, e event) (all []*victim) {
	for snapshot, origin := range c.originOf {
		if size, err := fileSize(snapshot); err == nil && origin == e.disk {
			all = append(all, c.victim(snapshot, 0, size, c.otherMoment(snapshot),
				c.madeFrom(f, snapshot, "")...)...)
		}
	}
	return all
}

func (c *corruption) unbacked(f Files, e event) (all []*victim) {
	for disk, snapshot := range c.sourceOf {
		path := f.DiskPath(disk)
		if size, err := fileSize(path); err == nil && snapshot == e.snapshot {
			all = append(all, c.victim(path, 0, size, c.held, c.madeFrom(f, snapshot, disk)...)...)
		}
	}
	return all
}

// otherMoment returns the block's content in another snapshot of the same disk, or nil.
func (c *corruption) otherMoment(snapshot string) []byte {
	for other, origin := range c.originOf {
		size, err := fileSize(other)
		if err == nil && other != snapshot && origin == c.originOf[snapshot] {
			block, _ := readBlock(other, c.at.in(0, size))
			return block
		}
	}
	return nil
}

func (c *corruption) madeFrom(f Files, snapshot, not string) (paths []string) {
	for disk, source := range c.sourceOf {
		if source == snapshot && disk != not {
			paths = append(paths, f.DiskPath(disk))
		}
	}
	return paths
}

type victim struct {
	path      string
	at, other int64
	// old is an earlier content of the block, or nil. late is the content to write at the next unplug.
	old, late []byte
	// share() keeps the block equal in path and in peers. shared is the block's last known content.
	peers  []string
	shared []byte
	done   bool
}

func (v *victim) once(possible bool, do func() error) error {
	if v.done || !possible {
		return nil
	}
	v.done = true
	return do()
}

// share finds the file in which the block has changed, and copies the block to the other files.
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

func (v *victim) swap() error {
	one, err := readBlock(v.path, v.at)
	two, unread := readBlock(v.path, v.other)
	if err := errors.Join(err, unread); err != nil {
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

// readBlock reads a block of a file. It returns zeroes for bytes behind the file's end.
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
