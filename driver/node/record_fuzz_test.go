package node

import (
	"path/filepath"
	"strings"
	"testing"
)

// FuzzRecord checks that a valid record of a volume is whole and comes back as it was, and that
// every id has a file of its own in the state directory.
func FuzzRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, id string) {
		file := recordFile(id)
		if filepath.Base(file) != file || len(file) > 100 || !strings.HasSuffix(file, recordSuffix) {
			t.Fatalf("the record of %q is %q", id, file)
		}
		if other := recordFile(id + "x"); other == file {
			t.Fatalf("%q and %q are both kept in %q", id, id+"x", file)
		}
		r, err := parseRecord(b)
		if err != nil {
			return
		}
		if r.Version != recordVersion || r.Volume == "" || r.Instance == "" || r.Disk == "" ||
			len(b) > maxRecordBytes {
			t.Fatalf("%q is the record %+v", b, r)
		}
		again, err := r.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", r, err)
		}
		if len(again) > maxRecordBytes {
			return // escapes made it too long to be read again
		}
		if same, err := parseRecord(again); err != nil || same != r {
			t.Fatalf("%+v becomes %q, and then %+v, %v", r, again, same, err)
		}
	})
}
