// Package flight is the driver's flight recorder. It logs each change that the driver has made to a
// disk, a mount or the rack, in one line with stable keys. On a node it also writes two entries to
// the volume's file: one before the change (Begin) and one after it (End).
//
// If the process is killed in between, the change stays open until a later call sees that it was
// made (Confirm). Nothing depends on the entries: if the recorder cannot write, no call fails.
package flight

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// Outcome is the progress of a change.
type Outcome string

// The outcomes. If a change has only the entry Begun, it is unknown whether the change was made:
// the process ended, or the rack did not answer.
const (
	Begun  Outcome = "begun"
	Done   Outcome = "done"
	Failed Outcome = "failed"
)

// Fields describe a change. Volume, Snapshot and Instance are ids. No field may contain a secret,
// so mount flags have no field: CSI calls them sensitive.
type Fields struct {
	Volume   string `json:"volume,omitempty"`
	Snapshot string `json:"snapshot,omitempty"`
	Name     string `json:"name,omitempty"` // of the snapshot on the rack
	Disk     string `json:"disk,omitempty"` // the name on the rack
	Instance string `json:"instance,omitempty"`
	Device   string `json:"device,omitempty"` // such as /dev/nvme1n1
	// DiskSeq is the device's diskseq, which is new after each attach. Confirm ends only a change with
	// the same DiskSeq, because another node may have written to the disk between two attaches.
	DiskSeq    uint64 `json:"diskseq,omitempty"`
	Path       string `json:"path,omitempty"` // the staging or target path
	Filesystem string `json:"filesystem,omitempty"`
	Detail     string `json:"detail,omitempty"`  // such as mkfs's options
	Request    string `json:"request,omitempty"` // the rack's id of the request
	Claim      string `json:"claim,omitempty"`   // namespace/name of the PVC or the VolumeSnapshot
	Reason     string `json:"reason,omitempty"`  // of a failure (docs/reasons.md)
	// Seen means that a later call saw the result of the change, and recorded its end with Confirm.
	Seen    bool    `json:"seen,omitempty"`
	Seconds float64 `json:"seconds,omitempty"` // how long the change took
}

// Entry is one line of a volume's file.
type Entry struct {
	Time    time.Time `json:"time"`
	Event   Event     `json:"event"`
	Outcome Outcome   `json:"outcome"`
	Fields

	// key is the same for all entries about a change, even if the change is repeated.
	key string
}

func keyOf(e Event, f Fields) string {
	subject := []string{string(e), f.Volume, f.Snapshot, f.Name, f.Instance, f.Path}
	if f.Volume == "" {
		subject = append(subject, f.Disk) // before the disk's creation the volume has no id
	}
	return strings.Join(subject, "\x00")
}

type text struct {
	key   string
	value *string
}

func (f *Fields) texts() []text {
	return []text{{"volume", &f.Volume}, {"snapshot", &f.Snapshot}, {"name", &f.Name},
		{"disk", &f.Disk}, {"instance", &f.Instance}, {"device", &f.Device}, {"path", &f.Path},
		{"filesystem", &f.Filesystem}, {"detail", &f.Detail}, {"request", &f.Request},
		{"claim", &f.Claim}, {"reason", &f.Reason}}
}

func (f Fields) with(more Fields) Fields {
	others := more.texts()
	for i, field := range f.texts() {
		*field.value = cmp.Or(*others[i].value, *field.value)
	}
	f.Seen, f.DiskSeq = f.Seen || more.Seen, max(f.DiskSeq, more.DiskSeq)
	f.Seconds = cmp.Or(more.Seconds, f.Seconds)
	return f
}

func (f Fields) attrs() []slog.Attr {
	var attrs []slog.Attr
	for _, field := range f.texts() {
		if *field.value != "" {
			attrs = append(attrs, slog.String(field.key, *field.value))
		}
	}
	if f.Seen {
		attrs = append(attrs, slog.Bool("seen", true))
	}
	return append(attrs, slog.Float64("seconds", f.Seconds))
}

type history interface {
	// add adds an entry. If the parameter always is false, it adds the end of a change only while the
	// change is open, so that no two processes report the same change.
	add(e Entry, always bool) (added bool, err error)
}

// Recorder records the changes that one process makes.
type Recorder struct {
	Log *slog.Logger
	// Dir is the directory of the volumes' files. If it is "", open changes are kept in memory.
	Dir string
	// Observe, if not nil, is called with the last entry of each change that was made.
	Observe func(Entry)

	once sync.Once
	kept history
}

func (r *Recorder) history() history {
	r.once.Do(func() {
		r.kept = &memory{}
		if r.Dir != "" {
			r.kept = &files{dir: r.Dir}
		}
	})
	return r.kept
}

// add adds an entry, and logs a change that was made. It returns false if the write failed.
func (r *Recorder) add(e Entry, always bool) (recorded bool) {
	added, err := r.history().add(e, always)
	if err != nil {
		r.Log.Warn("the flight recorder cannot write its file", "volume", e.Volume,
			"error", csierr.WithoutPath(err))
		added = e.Outcome == Done && !e.Seen // a second log line is better than none
	}
	if !added || e.Outcome != Done {
		return err == nil
	}
	attrs := append([]slog.Attr{slog.String("event", string(e.Event))}, e.attrs()...)
	r.Log.LogAttrs(context.Background(), slog.LevelInfo, e.Event.Says(), attrs...)
	if r.Observe != nil {
		r.Observe(e)
	}
	return err == nil
}

// Call records the changes of one CSI call. The zero value records nothing.
type Call struct {
	recorder *Recorder
	fields   Fields
	request  *atomic.Pointer[string]
}

type callKey struct{}

// With returns a context for one CSI call. The recorder adds these fields to the call's changes.
func With(ctx context.Context, r *Recorder, f Fields) context.Context {
	return context.WithValue(ctx, callKey{}, Call{r, f, &atomic.Pointer[string]{}})
}

// Of returns the Call in the context, or the zero value.
func Of(ctx context.Context) Call {
	c, _ := ctx.Value(callKey{}).(Call)
	return c
}

// About returns a copy of the call that adds these fields to each change.
func (c Call) About(f Fields) Call {
	c.fields = c.fields.with(f)
	return c
}

// Answered records the id of a request that the rack has answered. Only the first one after Begin
// counts, because that request makes the change.
func Answered(ctx context.Context, request string) {
	if c := Of(ctx); c.recorder != nil {
		c.request.CompareAndSwap(nil, &request)
	}
}

// Change is a change that Begin has recorded. Call End when its outcome is known.
type Change struct {
	recorded bool // Begin's entry was written
	ended    bool
	call     Call
	entry    Entry
}

// Begin records a change right before the caller makes it.
func (c Call) Begin(event Event, f Fields) *Change {
	if c.recorder == nil {
		return &Change{}
	}
	e := Entry{Time: time.Now().UTC(), Event: event, Outcome: Begun, Fields: c.fields.with(f)}
	e.key = keyOf(event, e.Fields)
	recorded := c.recorder.add(e, false)
	c.request.Store(nil)
	return &Change{recorded: recorded, call: c, entry: e}
}

// End records the end of the change, which was made if err is nil and otherwise failed. Do not call
// End if the outcome is unknown. Only the first call of End has an effect.
func (c *Change) End(err error, more Fields) {
	if c.call.recorder == nil || c.ended {
		return
	}
	c.ended = true
	e := c.entry
	e.Fields = e.with(more)
	e.Outcome, e.Seconds = Done, time.Since(c.entry.Time).Seconds()
	e.Time = time.Now().UTC()
	if id := c.call.request.Load(); id != nil && !e.Seen {
		e.Request = *id
	}
	if err != nil {
		e.Outcome, e.Reason = Failed, string(csierr.ReasonOf(err))
	}
	c.call.recorder.add(e, !c.recorded)
}

// Confirm ends the open change with this event and these fields, if there is one. Call it after
// seeing that the change was made. The last parameter contains fields that were unknown at Begin.
func (c Call) Confirm(event Event, f, more Fields) {
	if c.recorder == nil {
		return
	}
	e := Entry{Time: time.Now().UTC(), Event: event, Outcome: Done, Fields: c.fields.with(f)}
	e.key = keyOf(event, e.Fields)
	e.Fields, e.Seen = e.with(more), true
	c.recorder.add(e, false)
}

// Note records a change that has no Begin.
func (c Call) Note(event Event, f Fields) {
	if c.recorder != nil {
		c.recorder.add(Entry{Time: time.Now().UTC(), Event: event, Outcome: Done,
			Fields: c.fields.with(f)}, true)
	}
}

// Event is the type of a change, such as DiskCreated.
type Event string

// A controller makes the first six changes, on the rack. A node makes the others, to a disk's bytes
// or to mounts.
const (
	DiskCreated     Event = "DiskCreated"
	DiskDeleted     Event = "DiskDeleted"
	DiskAttached    Event = "DiskAttached"
	DiskDetached    Event = "DiskDetached"
	SnapshotCreated Event = "SnapshotCreated"
	SnapshotDeleted Event = "SnapshotDeleted"

	ProvenBlank        Event = "ProvenBlank"
	FormatResumed      Event = "FormatResumed"
	Formatted          Event = "Formatted"
	RecordErased       Event = "RecordErased"
	FilesystemChecked  Event = "FilesystemChecked"
	FilesystemRepaired Event = "FilesystemRepaired"
	FilesystemGrown    Event = "FilesystemGrown"
	Mounted            Event = "Mounted"
	Published          Event = "Published"
	Unpublished        Event = "Unpublished"
	Unmounted          Event = "Unmounted"
)

type explained struct {
	Event         Event
	Says, Meaning string
}

// Events lists all events, roughly in the order in which they happen to a volume.
var Events = []explained{
	{DiskCreated, "disk created", "The rack made the volume's disk. With `seen=true` the answer had " +
		"been lost, and a repeated call found the disk."},
	{DiskAttached, "disk attached", "The rack attached the disk to the node's instance."},
	{ProvenBlank, "disk proven blank", "The driver has read the disk, as far as `detail` says, and " +
		"found only zeroes, or what its own unfinished format wrote."},
	{FormatResumed, "unfinished format resumed", "An earlier format of this volume was " +
		"interrupted. The driver erases what it left, and formats the disk anew."},
	{Formatted, "disk formatted", "The disk has a new filesystem; `detail` has the command's " +
		"options."},
	{RecordErased, "record of a format erased", "The driver erased the record of an unfinished " +
		"format or growth before a workload got the disk as a raw device."},
	{FilesystemChecked, "filesystem checked", "e2fsck has checked the filesystem, after an unclean " +
		"unmount or before a growth."},
	{FilesystemRepaired, "filesystem repaired", "e2fsck has corrected errors in this check."},
	{FilesystemGrown, "filesystem grown", "The filesystem was smaller than its disk, for example " +
		"after a restore to a larger volume."},
	{Mounted, "volume mounted", "The filesystem is mounted at the staging path."},
	{Published, "volume published", "A workload has the volume at the target path."},
	{Unpublished, "volume unpublished", "The target path is unmounted."},
	{Unmounted, "volume unmounted", "The staging path is unmounted, and what was cached is written."},
	{DiskDetached, "disk detached", "The rack detached the disk from the instance."},
	{SnapshotCreated, "snapshot created", "The rack took a snapshot of the disk."},
	{SnapshotDeleted, "snapshot deleted", "The rack deleted the snapshot."},
	{DiskDeleted, "disk deleted", "The rack deleted the disk and its data."},
}

// Says returns the event's log message.
func (e Event) Says() string {
	for _, known := range Events {
		if known.Event == e {
			return known.Says
		}
	}
	return string(e)
}

const openLimit = 1000

// memory keeps the open changes of a controller, which has no files.
type memory struct {
	mu sync.Mutex
	// guarded by mu
	open map[string]int
}

func (m *memory) add(e Entry, always bool) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	known := m.open[e.key] > 0
	switch {
	case e.Outcome == Failed && m.open[e.key] > 1:
		m.open[e.key]-- // an earlier attempt's outcome is still unknown
		return true, nil
	case e.Outcome != Begun:
		delete(m.open, e.key)
		return known || always, nil
	case m.open == nil:
		m.open = map[string]int{}
	}
	if len(m.open) >= openLimit {
		for key := range m.open { // forget any change, so that the map stays limited
			delete(m.open, key)
			break
		}
	}
	m.open[e.key]++
	return true, nil
}

// DirName is the directory of the volumes' files in a node's state directory.
const DirName = "flight"

const (
	// When a file reaches maxBytes, its last keepEntries entries are kept.
	keepEntries = 200
	maxBytes    = 128 << 10
	// Confirm searches only the last recentBytes of a file for Begin's entry: few entries follow it.
	recentBytes = 8 << 10
	// If there are maxVolumes files, a new file replaces the one written longest ago.
	maxVolumes = 256
	suffix     = ".jsonl"
)

// NewSuffix is the suffix of ReplaceFile's temporary file.
const NewSuffix = ".new"

// files keeps a file for each volume, with a line for each entry. One write adds a line, so the
// line is complete even if the process dies. Readers skip lines that a power failure has cut off.
type files struct{ dir string }

// FileName returns the name of a volume's file: the id if it is a UUID, otherwise its hash.
func FileName(volumeID string) string {
	if id, ok := volume.ParseID(volumeID); ok {
		return id + suffix
	}
	sum := sha256.Sum256([]byte(volumeID))
	return hex.EncodeToString(sum[:]) + suffix
}

func (s *files) add(e Entry, always bool) (added bool, err error) {
	path := filepath.Join(s.dir, FileName(e.Volume))
	f, err := s.open(path, e.Outcome == Begun || always)
	if errors.Is(err, fs.ErrNotExist) {
		// Without a file, Confirm has no open change to end. But if e is from End, somebody has removed
		// the file since Begin: report the entry as added, so that the change is logged.
		return !e.Seen, nil
	}
	if err != nil {
		return false, err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	last := int64(recentBytes)
	if !e.Seen && e.Outcome != Begun && !always {
		last = maxBytes
	}
	entries, size, err := readLast(f, last, e.Event)
	if err != nil {
		return false, err
	}
	if e.Outcome != Begun && !always && !slices.ContainsFunc(Open(entries), e.sameAs) {
		return false, nil
	}
	line, err := json.Marshal(e)
	if err != nil {
		return false, err
	}
	line = append(line, '\n')
	if size+int64(len(line)) > maxBytes {
		if entries, _, err = readLast(f, maxBytes, ""); err != nil {
			return false, err
		}
		return true, replace(path, append(entries[max(0, len(entries)-keepEntries+1):], e))
	}
	// A power failure may have cut off the last line.
	if size > 0 && !endsLine(f, size) {
		line = append([]byte{'\n'}, line...)
	}
	_, err = f.Write(line)
	return err == nil, err
}

// sameAs reports whether both entries belong to one change. They do not if the disk was detached
// between the two entries.
func (e Entry) sameAs(other Entry) bool {
	away := e.DiskSeq != 0 && other.DiskSeq != 0 && e.DiskSeq != other.DiskSeq
	return e.Event == other.Event && e.Path == other.Path && !away
}

// Open returns the Begun entries of the open changes. If a change was tried several times, a Failed
// entry ends only one try, because the outcome of the others is unknown.
func Open(entries []Entry) []Entry {
	var open []Entry
	for _, e := range entries {
		switch e.Outcome {
		case Begun:
			open = append(open, e)
		case Done:
			open = slices.DeleteFunc(open, e.sameAs)
		case Failed:
			if i := slices.IndexFunc(open, e.sameAs); i >= 0 {
				open = slices.Delete(open, i, i+1)
			}
		}
	}
	return open
}

func (s *files) open(path string, make bool) (*os.File, error) {
	flags := os.O_RDWR | os.O_APPEND | noFollow
	if make {
		if err := s.makeRoom(path); err != nil {
			return nil, err
		}
		flags |= os.O_CREATE
	}
	for {
		f, err := os.OpenFile(path, flags, 0o600)
		if err != nil {
			return nil, err
		}
		if err := lock(f); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		// Another process may have replaced the file before this one locked it.
		if now, err := os.Lstat(path); err == nil {
			if mine, err := f.Stat(); err == nil && os.SameFile(mine, now) {
				return f, nil
			}
		}
		_ = f.Close()
	}
}

// makeRoom creates the directory for a new file. In a full directory it removes the oldest file.
func (s *files) makeRoom(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return err
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil || len(entries) < maxVolumes {
		return err
	}
	var oldest fs.FileInfo
	for _, entry := range entries {
		info, err := entry.Info()
		if err == nil && info.Mode().IsRegular() && strings.Contains(info.Name(), suffix) &&
			(oldest == nil || info.ModTime().Before(oldest.ModTime())) {
			oldest = info
		}
	}
	if oldest == nil {
		return nil
	}
	err = os.Remove(filepath.Join(s.dir, oldest.Name()))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

func replace(path string, entries []Entry) error {
	var text bytes.Buffer
	encoder := json.NewEncoder(&text)
	for _, e := range entries {
		if err := encoder.Encode(e); err != nil {
			return err
		}
	}
	return ReplaceFile(path, text.Bytes())
}

// ReplaceFile replaces a file of the state directory atomically, without a sync. It removes an
// earlier temporary file and never writes to that file, which may be a link.
func ReplaceFile(path string, b []byte) error {
	_ = os.Remove(path + NewSuffix)
	f, err := os.OpenFile(path+NewSuffix, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	return os.Rename(path+NewSuffix, path)
}

func endsLine(f *os.File, size int64) bool {
	last := make([]byte, 1)
	_, err := f.ReadAt(last, size-1)
	return err == nil && last[0] == '\n'
}

// readLast returns the valid entries in the last bytes of the file, and the file's size. If event
// is not "", it may omit entries of other events.
func readLast(f *os.File, last int64, event Event) (entries []Entry, size int64, err error) {
	info, err := f.Stat()
	if err != nil {
		return nil, 0, err
	}
	if !info.Mode().IsRegular() {
		return nil, 0, errors.New("it is not a regular file")
	}
	r := io.NewSectionReader(f, max(0, info.Size()-last), last)
	return parse(r, []byte(event)), info.Size(), nil
}

// parse returns the entries whose lines contain the text. It does not decode the other lines,
// because decoding takes much longer than reading.
func parse(r io.Reader, text []byte) (entries []Entry) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, maxBytes)
	for lines.Scan() {
		var e Entry
		if bytes.Contains(lines.Bytes(), text) && json.Unmarshal(lines.Bytes(), &e) == nil &&
			e.Event != "" && !e.Time.IsZero() {
			entries = append(entries, e)
		}
	}
	return entries
}

// Read returns a volume's entries, the oldest first, or none if the volume has no file.
func Read(dir, volumeID string) ([]Entry, error) {
	f, err := os.OpenFile(filepath.Join(dir, FileName(volumeID)), os.O_RDONLY|noFollow, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	entries, _, err := readLast(f, maxBytes, "")
	return entries, err
}
