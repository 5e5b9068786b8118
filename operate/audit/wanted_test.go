package audit

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/racktest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/volume"
)

// persistent is a PersistentVolume as kubectl prints it.
func persistent(name, driver, handle string) string {
	return `{"apiVersion":"v1","kind":"PersistentVolume","metadata":{"name":"` + name +
		`","uid":"x"},"spec":{"claimRef":{"kind":"PersistentVolumeClaim","uid":"` + auditUID +
		`"},"csi":{"driver":"` + driver + `","volumeHandle":"` + handle + `"}}}`
}

func listOf(items ...string) string {
	return `{"apiVersion":"v1","kind":"List","metadata":{"resourceVersion":""},"items":[` +
		strings.Join(items, ",") + `]}`
}

func TestParseWanted(t *testing.T) {
	content := func(spec, status string) string {
		return `{"kind":"VolumeSnapshotContent","metadata":{"name":"c"},"spec":{"driver":"` +
			volume.DriverName + `",` + spec + `},"status":{` + status + `}}`
	}
	for _, test := range []struct {
		name, text string
		want       []handle
	}{
		{"handles, one in each line", "\n# a comment\n" + strings.ToUpper(racktest.Disk) + "\r\n  " +
			racktest.Snapshot + "\n" + racktest.Disk, []handle{{either, racktest.Disk, "line 3"},
			{either, racktest.Snapshot, "line 4"}}},
		{"nothing", "", nil},
		{"an empty list", listOf(), nil},
		{"volumes of two drivers", listOf(persistent("one", volume.DriverName, racktest.Disk),
			persistent("two", "ebs.csi.aws.com", racktest.Image)), []handle{{kindDisk, racktest.Disk,
			"PersistentVolume one"}}},
		{"a handle that is no UUID, which nothing on the rack has", listOf(persistent("one",
			volume.DriverName, "my-disk")), []handle{{kindDisk, "my-disk", "PersistentVolume one"}}},
		{"snapshots: taken, given, and in the making", listOf(
			content(`"source":{"volumeHandle":"x"}`, `"snapshotHandle":"`+racktest.Snapshot+`"`),
			content(`"source":{"snapshotHandle":"`+racktest.Image+`"}`, ""),
			content(`"source":{"volumeHandle":"x"}`, "")), []handle{
			{kindSnapshot, racktest.Snapshot, "VolumeSnapshotContent c"},
			{kindSnapshot, racktest.Image, "VolumeSnapshotContent c"}}},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := parseWanted([]byte(test.text), auditNow)
			csitest.Must(t, err)
			if diff := cmp.Diff(test.want, got.Handles, cmpopts.EquateEmpty()); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAnIncompleteListIsAnError(t *testing.T) {
	for name, text := range map[string]string{
		"a table":                 "NAME   CAPACITY\npv-1   1Gi\n",
		"a page":                  `{"kind":"List","metadata":{"continue":"x"},"items":[]}`,
		"pods":                    listOf(`{"kind":"Pod","metadata":{"name":"p"}}`),
		"an error":                `{"kind":"Status","status":"Failure"}`,
		"a volume without handle": listOf(persistent("one", volume.DriverName, "")),
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := parseWanted([]byte(text), auditNow); err == nil {
				t.Errorf("got %v", got.Handles)
			}
		})
	}
}

func TestAFileIsAsOldAsItsLastWrite(t *testing.T) {
	path := filepath.Join(t.TempDir(), "wanted")
	csitest.Must(t, os.WriteFile(path, []byte(racktest.Disk), 0o600))
	written := time.Now().Add(-48 * time.Hour).Truncate(time.Second)
	for name, want := range map[string]time.Time{"old": written, "from the future": time.Now()} {
		stamp := written
		if name != "old" {
			stamp = time.Now().Add(48 * time.Hour)
		}
		csitest.Must(t, os.Chtimes(path, stamp, stamp))
		got, err := (&wantedFile{path: path, began: time.Now()}).read(t.Context())
		if err != nil || got.listedAt.Sub(want).Abs() > time.Minute {
			t.Errorf("%s: got %v, %v, want %v", name, got.listedAt, err, want)
		}
	}
	if _, err := (&wantedFile{path: path + "x"}).read(t.Context()); err == nil {
		t.Error("a missing file is not an empty list")
	}
}

func TestD69AListOfLinesForDeletionNeedsAnEnd(t *testing.T) {
	json := listOf(persistent("one", volume.DriverName, racktest.Disk))
	for name, test := range map[string]struct {
		text     string
		complete bool
	}{
		"JSON":                         {json, true},
		"lines with an end":            {racktest.Disk + "\n# end\n", true},
		"an end without a newline":     {racktest.Disk + "\n#  end", true},
		"an empty list with an end":    {"# end\n", true},
		"lines that were cut off":      {racktest.Disk + "\n", false},
		"an end in the midst":          {"# end\n" + racktest.Disk + "\n", false},
		"nothing":                      {"", false},
		"a comment that is not an end": {racktest.Disk + "\n# the end\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "wanted")
			csitest.Must(t, os.WriteFile(path, []byte(test.text), 0o600))
			if _, err := (Options{Volumes: path}).wantedSource().read(t.Context()); err != nil {
				t.Errorf("without --delete: %v", err)
			}
			_, err := (Options{Volumes: path, Delete: true}).wantedSource().read(t.Context())
			if (err == nil) != test.complete || err != nil && !strings.Contains(err.Error(), "# end") {
				t.Errorf("with --delete: %v", err)
			}
		})
	}
}
