//go:build linux

package node

import (
	"bytes"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

// FuzzMetadata checks that a file of any content gives an id that the file has after its key, or an
// error that shows none of the content.
func FuzzMetadata(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte) {
		id, err := parseMetadata(b)
		if (id == "") == (err == nil) || strings.ContainsAny(id, "\n") {
			t.Fatalf("parseMetadata(%q) = %q, %v", b, id, err)
		}
		if err == nil && (!bytes.Contains(b, []byte(id)) ||
			!bytes.Contains(b, []byte(InstanceIDKey))) {
			t.Fatalf("parseMetadata(%q) = %q", b, id)
		}
		more, moreErr := parseMetadata(append(bytes.Clone(b), "\n# a comment\nOTHER=x\n"...))
		if err == nil && (more != id || moreErr != nil) {
			t.Fatalf("with a comment %q becomes %q, %v", id, more, moreErr)
		}
	})
}

// FuzzNodeIdentity checks that a node has an identity only when all sources that have one agree,
// and that SMBIOS counts only on Oxide's machines.
func FuzzNodeIdentity(f *testing.F) {
	dir, err := os.MkdirTemp("", "identity")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { _ = os.RemoveAll(dir) })
	dmi := filepath.Join(dir, "class/dmi/id")
	if err := os.MkdirAll(dmi, 0o755); err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, explicit string, metadata, vendor, serial []byte) {
		n := Identity{Explicit: explicit, SysfsRoot: dir}
		must(t, os.WriteFile(filepath.Join(dmi, "sys_vendor"), vendor, 0o600))
		must(t, os.WriteFile(filepath.Join(dmi, "product_serial"), serial, 0o600))
		if len(metadata) > 0 {
			n.MetadataFile = filepath.Join(dir, "metadata")
			must(t, os.WriteFile(n.MetadataFile, metadata, 0o600))
		}
		id, err := InstanceID(n)
		if err != nil {
			if strings.ContainsAny(err.Error(), "\n") {
				t.Fatalf("an error of several lines: %q", err)
			}
			return
		}
		if !csitest.UUID.MatchString(id) {
			t.Fatalf("the identity is %q", id)
		}
		opinions := []string{explicit}
		if len(metadata) > 0 {
			opinions = append(opinions, string(metadata))
		}
		if string(bytes.Trim(vendor, "\x00 \n\t")) == "Oxide" {
			opinions = append(opinions, string(bytes.Trim(serial, "\x00 \n\t")))
		}
		claimed := false
		for _, opinion := range opinions {
			claimed = claimed || opinion != ""
			if opinion != "" && !strings.Contains(strings.ToLower(opinion), id) {
				t.Fatalf("the identity is %q, but somebody says %q", id, opinion)
			}
		}
		if !claimed {
			t.Fatalf("the identity is %q, and nobody said so", id)
		}
	})
}

// FuzzRecord checks that a valid record of a volume is whole and comes back as it was, and that
// every id has a file of its own in the state directory.
func FuzzRecord(f *testing.F) {
	f.Fuzz(func(t *testing.T, b []byte, id string) {
		file := recordFile(id)
		if filepath.Base(file) != file || len(file) > 80 || !strings.HasSuffix(file, recordSuffix) ||
			strings.Trim(file, "0123456789abcdef-.json") != "" {
			t.Fatalf("the record of %q is %q", id, file)
		}
		if other := recordFile(id + "x"); other == file {
			t.Fatalf("%q and %q are both kept in %q", id, id+"x", file)
		}
		own := volumeRecord{Version: recordVersion, Volume: strings.ToValidUTF8("v"+id, "?"),
			Instance: instance, Disk: "d", Block: len(b)%2 == 1}
		whole, err := own.encode()
		if err != nil {
			t.Fatalf("%+v cannot be written: %v", own, err)
		}
		if len(whole) <= maxRecordBytes {
			if same, err := parseRecord(whole); err != nil || same != own {
				t.Fatalf("%+v becomes %q, and then %+v, %v", own, whole, same, err)
			}
			if r, err := parseRecord(whole[:len(b)%(len(whole)-1)]); err == nil {
				t.Fatalf("%q, truncated, is taken for %+v", whole, r)
			}
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
