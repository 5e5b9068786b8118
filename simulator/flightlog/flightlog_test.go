package flightlog

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
)

// record is a flight record that a test writes, with a Log that follows the record.
type record struct {
	*Log
	t    *testing.T
	path string
	last int
}

func newRecord(t *testing.T) *record {
	dir := t.TempDir()
	return &record{Log: &Log{Dirs: []string{filepath.Join(dir, "plugin-*", "flight")}}, t: t,
		path: filepath.Join(dir, "plugin-1", "flight", "v.jsonl")}
}

// line returns a line of a record. words has an event and, optionally, an outcome and a path.
func line(words string) string {
	w := strings.Fields(words + " done -")
	return fmt.Sprintf(`{"time":%q,"event":%q,"outcome":%q,"volume":"v","path":%q}`+"\n",
		time.Now().UTC().Format(time.RFC3339Nano), w[0], w[1], w[2])
}

func (r *record) append(text string) {
	r.t.Helper()
	looptest.Must(r.t, os.MkdirAll(filepath.Dir(r.path), 0o700))
	f := looptest.Got(os.OpenFile(r.path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600))(r.t)
	looptest.Got(f.WriteString(text))(r.t)
	looptest.Must(r.t, f.Close())
}

// replace renames a new file over the record, as a driver does when it drops old lines.
func (r *record) replace(text string) {
	r.t.Helper()
	looptest.Must(r.t, os.WriteFile(r.path+".new", []byte(text), 0o600))
	looptest.Must(r.t, os.Rename(r.path+".new", r.path))
}

// next returns the events of the entries that are new since its last call, the oldest first.
func (r *record) next() string {
	r.looked = time.Time{} // make Newest read the file at once
	words, last := "", r.last
	for _, e := range r.Newest(100, func(e *Entry) bool {
		r.last = max(r.last, e.Seq)
		return e.Seq > last
	}) {
		words = strings.TrimSpace(e.Event + " " + words)
	}
	return words
}

func TestALogReturnsEachNewLineOnce(t *testing.T) {
	one, two, three, four, five := line("One"), line("Two"), line("Three"), line("Four"), line("Five")
	type step struct {
		what string
		do   func(*record)
		want string
	}
	nothing := step{"nothing new", func(*record) {}, ""}
	for name, steps := range map[string][]step{
		"a file to which lines are appended": {
			{"no directory", func(*record) {}, ""},
			{"two lines", func(r *record) { r.append(one + two) }, "One Two"}, nothing,
			{"a third line", func(r *record) { r.append(three) }, "Three"}, nothing,
		},
		"a file with an incomplete line": {
			{"a part", func(r *record) { r.append(one + two[:20]) }, "One"},
			{"the rest", func(r *record) { r.append(two[20:]) }, "Two"},
			{"a line that a power cut has torn", func(r *record) { r.append(three[:20]) }, ""},
			{"the next line", func(r *record) { r.append("\n" + four) }, "Four"},
		},
		"a file that loses its oldest lines": {
			{"two lines", func(r *record) { r.append(one + two) }, "One Two"},
			{"the last of them, and another one", func(r *record) { r.replace(two + three) }, "Three"},
			nothing,
			{"other lines", func(r *record) { r.replace(four + five) }, "Four Five"}, nothing,
		},
		"a file that is truncated": {
			{"two lines", func(r *record) { r.append(one + two) }, "One Two"},
			{"nothing", func(r *record) { looptest.Must(t, os.Truncate(r.path, 0)) }, ""},
			{"a line", func(r *record) { r.append(three) }, "Three"},
			{"truncated, and then longer than before", func(r *record) {
				looptest.Must(t, os.Truncate(r.path, 0))
				r.append(four + five + line("Six"))
			}, "Four Five Six"},
		},
		"a file that is removed and created again": {
			{"a line", func(r *record) { r.append(one) }, "One"},
			{"no file", func(r *record) { looptest.Must(t, os.Remove(r.path)) }, ""},
			{"another file", func(r *record) { r.append(two) }, "Two"},
		},
		"a file that is too long": {
			{"the last lines", func(r *record) {
				r.append(one + strings.Repeat("x", maxRead-10) + "\n" + two)
			}, "Two"},
			{"a line", func(r *record) { r.append(three) }, "Three"},
		},
		"a file with invalid lines": {
			{"anything", func(r *record) {
				r.append("\n{}\nnull\n[1]\n{\"event\":1}\n\x00\xff\n" +
					`{"event":"NoTime"}` + "\n" +
					`{"time":"2006-01-02T15:04:05Z","event":"LongAgo"}` + "\n" +
					strings.Replace(one, "One", strings.Repeat("x", maxLine), 1) + two)
			}, "Two"},
		},
		"a file that is replaced by a link or a pipe": {
			{"a line", func(r *record) { r.append(one) }, "One"},
			{"a link", func(r *record) {
				looptest.Must(t, os.Rename(r.path, r.path+".old"))
				looptest.Must(t, os.Symlink(r.path+".old", r.path))
				looptest.Must(t, os.WriteFile(r.path+".old", []byte(one+two), 0o600))
			}, ""},
			{"a pipe", func(r *record) {
				looptest.Must(t, os.Remove(r.path))
				looptest.Command(t, "mkfifo", r.path)
			}, ""},
		},
		"a log that is cleared": {
			{"a line", func(r *record) { r.append(one) }, "One"},
			{"cleared", func(r *record) { r.append(two); r.Clear() }, ""},
			{"a later line", func(r *record) { r.append(line("Later")) }, "Later"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRecord(t)
			for _, s := range steps {
				s.do(r)
				if got := r.next(); got != s.want {
					t.Fatalf("%s: the log has %q, want %q", s.what, got, s.want)
				}
			}
		})
	}
}

func TestTheLastEntryOfAChangeReplacesItsFirstEntry(t *testing.T) {
	r := newRecord(t)
	shown := func() (all string) {
		r.looked = time.Time{}
		for _, e := range r.Newest(100, func(*Entry) bool { return true }) {
			all = fmt.Sprintf("%s %s %d, ", e.Event, e.Outcome, e.Change) + all
		}
		return strings.TrimSuffix(all, ", ")
	}
	for _, test := range []struct{ line, want string }{
		{"Mounted begun /a", "Mounted begun 1"},
		{"Mounted done /b", "Mounted begun 1, Mounted done 2"},
		{"Published begun /a", "Mounted begun 1, Mounted done 2, Published begun 3"},
		{"Mounted failed /a", "Mounted done 2, Published begun 3, Mounted failed 1"},
		{"Mounted done /a", "Mounted done 2, Published begun 3, Mounted failed 1, Mounted done 5"},
	} {
		r.append(line(test.line))
		if got := shown(); got != test.want {
			t.Errorf("after %s the log has %q, want %q", test.line, got, test.want)
		}
	}
}

func TestALogKeepsOnlyTheNewestEntries(t *testing.T) {
	r := newRecord(t)
	lines := line("First")
	for n := range maxEntries + 10 {
		if lines += line(fmt.Sprintf("Event%d", n)); n%500 == 0 {
			r.append(lines)
			r.next()
			lines = ""
		}
	}
	r.append(lines)
	r.next()
	if got := len(r.entries); got != maxEntries {
		t.Errorf("the log keeps %d entries, want %d", got, maxEntries)
	}
	newest := r.Newest(2, func(e *Entry) bool { return !strings.HasSuffix(e.Event, "8") })
	got, err := json.Marshal([]string{newest[0].Event, newest[1].Event})
	if want := `["Event5009","Event5007"]`; err != nil || string(got) != want {
		t.Errorf("the two newest entries without an 8 are %s, want %s", got, want)
	}
}
