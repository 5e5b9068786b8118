// Package flightlog follows the flight records of drivers. The driver on a node appends a line of
// JSON to a volume's file for every change that it makes on the node, such as a format or a mount
// (docs/events.md). The requests to the rack's API do not show these changes.
//
// The package does not import the driver, and does not trust the files: it follows no link, reads
// only regular files, skips invalid lines, and limits the number of entries. It reads the files
// only in [Log.Newest].
package flightlog

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Entry is one line of a flight record. Its texts may be hostile.
type Entry struct {
	// Seq numbers the entries in the order in which Log read them.
	Seq int `json:"-"`
	// Change is the Seq of the entry that began the change. Without such an entry it equals Seq.
	Change int `json:"-"`

	Time    time.Time `json:"time"`
	Event   string    `json:"event"`
	Outcome string    `json:"outcome"`
	// Volume is the disk's ID. Disk is the disk's name, or "" if the driver did not know it.
	Volume     string `json:"volume"`
	Disk       string `json:"disk"`
	Instance   string `json:"instance"` // the instance's ID
	Device     string `json:"device"`
	Path       string `json:"path"`
	Filesystem string `json:"filesystem"`
	Detail     string `json:"detail"`
	Reason     string `json:"reason"`
	// Seconds is the duration of the change. It is 0 if the line has none.
	Seconds float64 `json:"seconds"`
}

// Outcomes of entries. An entry with Begun begins a change; any other outcome ends the change.
const (
	Begun = "begun"
	Done  = "done"
)

const (
	// kept is the greatest age of the entries that Newest returns.
	kept = time.Hour
	// maxEntries, maxLine and maxFiles limit the memory that hostile files can use.
	maxEntries = 5000
	maxLine    = 8 << 10
	maxFiles   = 4096
	// seldom is the least time between two reads of the files.
	seldom = 50 * time.Millisecond
)

// Log keeps the newest entries of flight records.
type Log struct {
	// Dirs are the directories with the flight records, or patterns of them (filepath.Match). They
	// must not change after the first use. A directory need not exist.
	Dirs []string

	mu sync.Mutex
	// mu guards the fields below.
	files   map[string]*file
	entries []Entry
	seq     int
	looked  time.Time
	// cleared is the time of the last Clear. Older entries are ignored.
	cleared time.Time
}

// Newest reads the lines that were written since the last call. It returns up to limit entries of
// the last hour for which keep() returns true, the newest first. For a change that has ended, it
// returns only the entry that ends it.
func (l *Log) Newest(limit int, keep func(*Entry) bool) (found []Entry) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	l.follow(now)
	for _, e := range slices.Backward(l.entries) {
		if len(found) == limit {
			break
		}
		if l.current(e, now) && keep(&e) {
			found = append(found, e)
		}
	}
	return found
}

// Clear drops all entries that were written until now.
func (l *Log) Clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.entries, l.cleared = nil, time.Now()
}

func (l *Log) current(e Entry, now time.Time) bool {
	return e.Time.After(now.Add(-kept)) && e.Time.After(l.cleared)
}

func (l *Log) follow(now time.Time) {
	if now.Sub(l.looked) < seldom {
		return
	}
	l.looked = now
	files := map[string]*file{}
	var fresh []Entry
	for _, dir := range l.Dirs {
		paths, _ := filepath.Glob(filepath.Join(dir, "*.jsonl")) // none for an invalid pattern
		for _, path := range paths {
			info, err := os.Lstat(path)
			// If a file did not change in the last hour (kept), all of its entries are too old.
			if err != nil || info.ModTime().Before(now.Add(-kept)) || len(files) == maxFiles {
				continue
			}
			f := l.files[path]
			if f == nil {
				f = &file{}
			}
			files[path] = f
			fresh = append(fresh, f.read(path, info)...)
		}
	}
	l.files = files
	slices.SortStableFunc(fresh, func(a, b Entry) int { return a.Time.Compare(b.Time) })
	for _, e := range fresh {
		if l.current(e, now) {
			l.add(e)
		}
	}
	if over := len(l.entries) - maxEntries; over > 0 {
		l.entries = slices.Delete(l.entries, 0, over)
	}
}

// add adds an entry. An entry that ends a change replaces the entry that began it.
func (l *Log) add(e Entry) {
	l.seq++
	e.Seq, e.Change = l.seq, l.seq
	if e.Outcome != Begun {
		for i := len(l.entries) - 1; i >= 0; i-- {
			b := l.entries[i]
			if b.Outcome == Begun && b.Event == e.Event && b.Volume == e.Volume &&
				b.Instance == e.Instance && b.Path == e.Path {
				e.Change = b.Change
				l.entries = slices.Delete(l.entries, i, i+1)
				break
			}
		}
	}
	l.entries = append(l.entries, e)
}

// maxRead is the number of bytes at the end of a file that Newest reads. A driver limits its files
// to half of this size.
const maxRead = 256 << 10

// file records how far the lines of a file were read.
type file struct {
	info os.FileInfo // the file's info at the last read
	// last is the hash of the last line that was read. An offset does not suffice, because the driver
	// drops the oldest lines of a file that is too long.
	last [sha256.Size]byte
}

// read returns the entries of the lines that were written since its last call. It reads nothing if
// path is the same file with the same size and time. Its next call reads an incomplete last line.
func (f *file) read(path string, now os.FileInfo) (fresh []Entry) {
	if f.info != nil && os.SameFile(f.info, now) && f.info.Size() == now.Size() &&
		f.info.ModTime().Equal(now.ModTime()) || !now.Mode().IsRegular() {
		return nil
	}
	// O_NONBLOCK keeps the open from waiting if the file was replaced by a pipe.
	r, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil // the file may exist at the next read
	}
	defer r.Close()
	info, err := r.Stat()
	if err != nil || !info.Mode().IsRegular() {
		return nil
	}
	begin := max(0, info.Size()-maxRead)
	text, err := io.ReadAll(io.NewSectionReader(r, begin, info.Size()-begin))
	if err != nil {
		return nil
	}
	f.info = info
	lines := bytes.SplitAfter(text, []byte("\n"))
	lines = lines[:len(lines)-1] // the last one is empty or incomplete
	if begin > 0 && len(lines) > 0 {
		lines = lines[1:] // the first one may be incomplete
	}
	unread := 0
	for n, line := range lines {
		if sha256.Sum256(line) == f.last {
			unread = n + 1
		}
	}
	for _, line := range lines[unread:] {
		if e, ok := parse(line); ok {
			fresh = append(fresh, e)
		}
	}
	if len(lines) > 0 {
		f.last = sha256.Sum256(lines[len(lines)-1])
	}
	return fresh
}

func parse(line []byte) (e Entry, ok bool) {
	if len(line) > maxLine || json.Unmarshal(line, &e) != nil {
		return Entry{}, false
	}
	return e, e.Event != "" && !e.Time.IsZero()
}
