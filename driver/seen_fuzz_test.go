package driver

import (
	"path/filepath"
	"strings"
	"testing"
)

// FuzzSeen holds that a record of a volume which is believed is whole and comes back as it was, and
// that every id has a file of its own in the state directory, and none elsewhere.
func FuzzSeen(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, id string) {
		file := seenFile(id)
		if filepath.Base(file) != file || len(file) > 100 || !strings.HasSuffix(file, seenSuffix) {
			t.Fatalf("the record of %q is %q", id, file)
		}
		if other := seenFile(id + "x"); other == file {
			t.Fatalf("%q and %q are both kept in %q", id, id+"x", file)
		}
		r, err := parseSeen(b)
		if err != nil {
			return
		}
		if r.Version != seenVersion || r.Volume == "" || r.Instance == "" || r.Disk == "" ||
			len(b) > seenMaxBytes {
			t.Fatalf("%q is the record %+v", b, r)
		}
		again, err := r.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", r, err)
		}
		if len(again) > seenMaxBytes {
			return // escapes made it too long to be read again
		}
		if same, err := parseSeen(again); err != nil || same != r {
			t.Fatalf("%+v becomes %q, and then %+v, %v", r, again, same, err)
		}
	})
}
