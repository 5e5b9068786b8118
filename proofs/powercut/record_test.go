//go:build linux

package powercut_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/flakydisk"
)

// recording contains the log of a disk whose volume was used. A sampler makes images from the log.
type recording struct {
	name   string
	volume volume
	base   *flakydisk.Image
	// log contains all entries except reads. stage contains all entries before NodeStageVolume
	// answered OK.
	log, stage []flakydisk.LogEntry
	ledger     ledger
	// final is the disk's content at the end, and kept contains the promises that hold then.
	final *flakydisk.Image
	kept  map[string]promise
	// grows is set if the driver must grow the filesystem.
	grows bool
	// blank is set if the driver may format the disk: it is blank, or has an unfinished format.
	blank bool
	// readWhole is set if the driver reads the whole disk to prove that it is blank.
	readWhole bool
	// used is an index in the log. From this entry on the disk is in use, so no driver may format it.
	used int
}

// recorder acts as a volume's workload, and records what the volume must keep.
type recorder struct {
	*recording
	place *placement
	disk  *flakydisk.Disk
	rand  *rand.Rand
	// prefix and files make the names of files unique.
	prefix string
	files  int
	// loose contains what was written without fsync. An unstage makes it durable.
	loose map[string]promise
}

// record attaches a disk with the content of the recording's base, calls do(), and stores the
// disk's log in the recording.
func record(ctx context.Context, b *bench, r *recording, random *rand.Rand,
	do func(context.Context, *recorder), faults ...flakydisk.Fault) (err error) {
	image := r.base.Fork()
	disk := flakydisk.NewDisk(image)
	place, err := b.show(ctx, r.volume, disk)
	defer func() { err = errors.Join(err, place.hide()) }()
	defer harness.Catch(&err)
	harness.Must(err)
	disk.StartLog(true)
	for _, f := range faults {
		disk.AddFault(f)
	}
	rec := &recorder{recording: r, place: place, disk: disk, rand: random,
		prefix: fmt.Sprintf("%08x", random.Uint32()), loose: map[string]promise{}}
	do(ctx, rec)
	r.log = disk.Log()
	staged := slices.IndexFunc(r.log, func(r flakydisk.LogEntry) bool {
		return r.Kind == flakydisk.Note
	})
	r.stage = slices.Clone(r.log[:staged])
	r.log = slices.DeleteFunc(r.log, func(r flakydisk.LogEntry) bool {
		return r.Kind == flakydisk.Read
	})
	disk.WithStore(func(flakydisk.Store) { r.final = image.Fork() })
	r.kept, _ = r.ledger.at(len(r.ledger.events))
	if r.blank {
		r.used = usedFrom(r.base, r.log)
	}
	return nil
}

func (r *recorder) happened(e event) {
	r.ledger.events = append(r.ledger.events, e)
	r.disk.Note(note(len(r.ledger.events)))
}

// promise records which contents a file may have from now on. A nil content is a missing file.
func (r *recorder) promise(name string, contents ...[]byte) {
	r.happened(event{promises: map[string]promise{name: {contents: contents}}})
}

func (r *recorder) undecided(name string) {
	r.happened(event{promises: map[string]promise{name: {anything: true}}})
}

func (r *recorder) stage(ctx context.Context) {
	harness.Must(r.place.stage(ctx))
	r.happened(event{staged: true})
	harness.Must(r.place.publish(ctx))
}

func (r *recorder) unstage(ctx context.Context) {
	harness.Must(r.place.unpublish(ctx))
	harness.Must(r.place.unstage(ctx))
	r.happened(event{promises: r.loose})
}

func (r *recorder) content() []byte {
	var key [32]byte
	for i := range key {
		key[i] = byte(r.rand.Uint32())
	}
	b := make([]byte, 1+r.rand.IntN(96<<10))
	_, _ = rand.NewChaCha8(key).Read(b)
	return b
}

func (r *recorder) work(rounds int) {
	for range rounds {
		r.files++
		name := fmt.Sprintf("file-%s-%d", r.prefix, r.files)
		r.writeNew(name)
		switch r.rand.IntN(4) {
		case 0:
			r.replace(name)
		case 1:
			r.overwrite(name)
		case 2:
			r.remove(name)
		case 3:
			r.writeLoose()
		}
	}
}

func (r *recorder) path(name string) string { return filepath.Join(r.place.Target, name) }

func (r *recorder) write(name string, content []byte, flags int) error {
	f, err := os.OpenFile(r.path(name), os.O_WRONLY|flags, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(content, 0)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// writeNew creates a file, and also syncs the directory, because an fsync does not sync the name.
func (r *recorder) writeNew(name string) {
	content := r.content()
	r.undecided(name)
	harness.Must(r.write(name, content, os.O_CREATE|os.O_EXCL))
	harness.Must(proof.SyncDir(r.place.Target))
	r.promise(name, content)
}

func (r *recorder) forge() {
	files := harness.Got(proof.Forgery{Volume: r.volume.id, Disk: r.volume.disk,
		Filesystem: r.volume.access, SizeBytes: r.base.Size(), NextBytes: r.volume.grownTo(),
		Device: r.place.loop.Path, Traced: true}.Write(r.place.Target))
	promises := map[string]promise{}
	for name, sum := range files {
		promises[name] = promise{forged: &sum}
	}
	r.happened(event{promises: promises})
}

func (r *recorder) current(name string) []byte {
	now, _ := r.ledger.at(len(r.ledger.events))
	return now[name].contents[0]
}

func (r *recorder) replace(name string) {
	old, content := r.current(name), r.content()
	r.promise(name, old, content)
	harness.Must(r.write(name+".new", content, os.O_CREATE|os.O_EXCL))
	harness.Must(os.Rename(r.path(name+".new"), r.path(name)))
	harness.Must(proof.SyncDir(r.place.Target))
	r.promise(name, content)
}

func (r *recorder) overwrite(name string) {
	content := bytes.Clone(r.current(name))
	for i := range len(content) / 2 {
		content[i] ^= 0x5A
	}
	r.undecided(name)
	harness.Must(r.write(name, content, 0))
	r.promise(name, content)
}

func (r *recorder) remove(name string) {
	r.promise(name, r.current(name), nil)
	harness.Must(os.Remove(r.path(name)))
	harness.Must(proof.SyncDir(r.place.Target))
	r.promise(name, nil)
}

// writeLoose writes a file, or a sector of a raw device, without fsync.
func (r *recorder) writeLoose() {
	if r.volume.raw() {
		device := harness.Got(os.OpenFile(r.place.Target, os.O_WRONLY, 0))
		_, err := device.WriteAt(r.content()[:1], 4*mib)
		harness.Must(errors.Join(err, device.Close()))
		return
	}
	name, content := fmt.Sprintf("loose-%s-%d", r.prefix, r.files), r.content()
	r.undecided(name)
	r.loose[name] = promise{contents: [][]byte{content}}
	harness.Must(os.WriteFile(r.path(name), content, 0o600))
}

// workRaw syncs only some of its writes, and never the last: the unstage makes the rest durable.
func (r *recorder) workRaw(rounds int) {
	device := harness.Got(os.OpenFile(r.place.Target, os.O_RDWR, 0))
	defer func() { harness.Must(device.Close()) }()
	for round := range rounds {
		offset := r.rand.Int64N(r.base.Size()/(2*mib)) * 2 * mib
		content := bytes.Repeat(r.content()[:1], 512*(1+r.rand.IntN(64)))
		name := fmt.Sprint(offset)
		r.undecided(name)
		harness.Got(device.WriteAt(content, offset))
		if round == rounds-1 || r.rand.IntN(3) == 0 {
			r.loose[name] = promise{contents: [][]byte{content}}
			continue
		}
		delete(r.loose, name)
		harness.Must(device.Sync())
		r.promise(name, content)
	}
}

// mark begins each record that the driver writes to a disk.
var mark = []byte("oxide-csi format")

// marked reports whether data begin with a record of the driver that no workload has forged.
func marked(data []byte) bool {
	return bytes.HasPrefix(data, mark) &&
		!bytes.Contains(data[:min(len(data), flakydisk.SectorBytes)], []byte(proof.Trace))
}

func marks(m *flakydisk.Image) (offsets []int64) {
	m.EachPage(func(offset int64, data []byte) bool {
		if marked(data) {
			offsets = append(offsets, offset)
		}
		return true
	})
	return offsets
}

// usedFrom returns the index of the flush that makes the erasure of all format records durable.
// From this flush on, the driver must not format the disk.
func usedFrom(base *flakydisk.Image, log []flakydisk.LogEntry) int {
	now, places := base.Fork(), map[int64]bool{}
	for _, at := range marks(base) {
		places[at] = true
	}
	begun, erased := len(places) > 0, false
	for i, r := range log {
		switch {
		case r.Kind == flakydisk.Flush && erased:
			return i
		case !r.Changes():
			continue
		}
		if flakydisk.Apply(now, flakydisk.Whole(r)) != nil {
			return 0
		}
		if r.Kind == flakydisk.Write && marked(r.Data) {
			places[r.Offset], begun = true, true
		}
		maps.DeleteFunc(places, func(at int64, _ bool) bool {
			b := make([]byte, len(mark))
			_, err := now.ReadAt(b, at)
			return err == nil && !bytes.Equal(b, mark)
		})
		erased = begun && len(places) == 0
	}
	return len(log)
}

// promise describes what a file, or a range of a raw volume, may contain: one of contents (nil if
// the file is missing), anything while the workload writes it, or forged records with this hash.
type promise struct {
	anything bool
	forged   *[sha256.Size]byte
	contents [][]byte
}

// event changes the promises. A note with the event's number is in the disk's log.
type event struct {
	// promises contains what may be read from each file or range from now on.
	promises map[string]promise
	// staged is set if NodeStageVolume has answered OK.
	staged bool
}

// ledger contains the promises that hold after each event.
type ledger struct {
	first  map[string]promise
	events []event
}

// at() returns the promises after this number of events, and whether the volume was staged by then.
func (l *ledger) at(events int) (promises map[string]promise, staged bool) {
	promises = maps.Clone(l.first)
	if promises == nil {
		promises = map[string]promise{}
	}
	for _, e := range l.events[:events] {
		maps.Copy(promises, e.promises)
		staged = staged || e.staged
	}
	return promises, staged
}

func note(number int) string { return strconv.Itoa(number) }

func checkFiles(dir string, promises map[string]promise, forged *proof.Invariant) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(promises)) {
		want := promises[name]
		if want.forged != nil {
			errs = append(errs, forged.Checked(proof.CheckForged(filepath.Join(dir, name), *want.forged)))
			continue
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			got, err = nil, nil
		} else if got == nil {
			got = []byte{}
		}
		if err == nil && !want.anything && !slices.ContainsFunc(want.contents, func(c []byte) bool {
			return bytes.Equal(c, got) && (c == nil) == (got == nil)
		}) {
			err = fmt.Errorf("%s has %s, which is none of the %d contents that it may have", name,
				describe(got), len(want.contents))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func describe(content []byte) string {
	if content == nil {
		return "gone"
	}
	return fmt.Sprintf("%d bytes", len(content))
}

// checkRanges checks the promises about a raw device. The name of a promise is its range's offset.
func checkRanges(device *os.File, promises map[string]promise) error {
	var errs []error
	for _, name := range slices.Sorted(maps.Keys(promises)) {
		want := promises[name]
		if want.anything {
			continue
		}
		offset, err := strconv.ParseInt(name, 10, 64)
		got := make([]byte, len(want.contents[0]))
		if err == nil {
			_, err = device.ReadAt(got, offset)
		}
		if err == nil && !bytes.Equal(got, want.contents[0]) {
			err = fmt.Errorf("the range at %s is not what was written", name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
