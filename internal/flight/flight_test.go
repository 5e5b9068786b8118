//go:build linux

package flight

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const someVolume = "6f1f1d4e-0d2f-4d0c-9a53-3c1e8f9b6a01"

type recording struct {
	*Recorder
	log  bytes.Buffer
	seen []Entry
}

func record(dir string) *recording {
	r := &recording{}
	r.Recorder = &Recorder{Dir: dir, Log: slog.New(slog.NewTextHandler(&r.log, nil)),
		Observe: func(e Entry) { r.seen = append(r.seen, e) }}
	return r
}

func (r *recording) call(ctx context.Context) Call {
	return Of(With(ctx, r.Recorder, Fields{Volume: someVolume, Path: "/staging"}))
}

func outcomes(t *testing.T, dir string) string {
	t.Helper()
	entries := csitest.Got(Read(dir, someVolume))(t)
	var all []string
	for _, e := range entries {
		all = append(all, fmt.Sprintf("%s %s", e.Event, e.Outcome))
	}
	return strings.Join(all, ", ")
}

func TestRecorderLogsOnlySuccessfulChangesAndEachOnce(t *testing.T) {
	for name, dir := range map[string]string{"in memory": "", "in files": t.TempDir()} {
		t.Run(name, func(t *testing.T) {
			r := record(dir)
			call := r.call(t.Context()).About(Fields{Disk: "csi-x", Device: "/dev/nvme1n1"})
			call.Confirm(Mounted, Fields{}, Fields{}) // no change is open
			change := call.Begin(Mounted, Fields{Filesystem: "ext4"})
			change.End(csierr.New(csierr.NodeToolFailed, "no"), Fields{})
			call.Confirm(Mounted, Fields{}, Fields{}) // the change has failed
			if len(r.seen) != 0 {
				t.Fatalf("said %+v", r.seen)
			}
			change = call.Begin(Mounted, Fields{Filesystem: "ext4"})
			change.End(nil, Fields{})
			change.End(nil, Fields{})
			call.Confirm(Mounted, Fields{}, Fields{})
			if len(r.seen) != 1 || strings.Count(r.log.String(), "event=Mounted") != 1 {
				t.Fatalf("said %+v", r.seen)
			}
			for _, want := range []string{`msg="volume mounted"`, "volume=" + someVolume, "disk=csi-x",
				"device=/dev/nvme1n1", "path=/staging", "filesystem=ext4", "seconds="} {
				if !strings.Contains(r.log.String(), want) {
					t.Errorf("the line lacks %s: %s", want, r.log.String())
				}
			}
		})
	}
}

func TestConfirmLogsAChangeBegunByADeadProcess(t *testing.T) {
	dir := t.TempDir()
	record(dir).call(t.Context()).Begin(Mounted, Fields{})
	after := record(dir)
	after.call(t.Context()).Begin(Mounted, Fields{}).End(errors.New("no"), Fields{})
	after.call(t.Context()).Confirm(Mounted, Fields{}, Fields{Filesystem: "xfs"})
	after.call(t.Context()).Confirm(Mounted, Fields{}, Fields{})
	const want = "Mounted begun, Mounted begun, Mounted failed, Mounted done"
	if got := outcomes(t, dir); got != want {
		t.Errorf("the file has %s, want %s", got, want)
	}
	if len(after.seen) != 1 || !after.seen[0].Seen || after.seen[0].Filesystem != "xfs" {
		t.Errorf("said %+v", after.seen)
	}
}

func TestConfirmIgnoresChangesBeforeADetach(t *testing.T) {
	dir := t.TempDir()
	record(dir).call(t.Context()).About(Fields{DiskSeq: 7}).Begin(Formatted, Fields{})
	after := record(dir)
	after.call(t.Context()).About(Fields{DiskSeq: 8}).Confirm(Formatted, Fields{}, Fields{})
	if len(after.seen) != 0 {
		t.Errorf("recorded %+v, although another node may have formatted the disk", after.seen)
	}
	after.call(t.Context()).About(Fields{DiskSeq: 7}).Confirm(Formatted, Fields{}, Fields{})
	if len(after.seen) != 1 {
		t.Errorf("said %+v", after.seen)
	}
}

func TestTwoProcessesNeverLogTheSameChange(t *testing.T) {
	dir := t.TempDir()
	one, other := record(dir), record(dir)
	change := one.call(t.Context()).Begin(Unmounted, Fields{})
	other.call(t.Context()).Confirm(Unmounted, Fields{}, Fields{})
	change.End(nil, Fields{})
	if len(one.seen) != 0 || len(other.seen) != 1 {
		t.Errorf("said %+v and %+v", one.seen, other.seen)
	}
}

func TestConfirmLogsAChangeWhoseAnswerWasLost(t *testing.T) {
	r := record("")
	ctx := With(t.Context(), r.Recorder, Fields{Claim: "default/data"})
	disk := Fields{Disk: "csi-x"}
	Of(ctx).Begin(DiskCreated, disk) // no answer
	again := With(t.Context(), r.Recorder, Fields{Claim: "default/data"})
	change := Of(again).Begin(DiskCreated, disk)
	Answered(again, "refused-1")
	change.End(csierr.New(csierr.NameTaken, "it exists"), Fields{})
	Of(again).Confirm(DiskCreated, disk, Fields{Volume: someVolume})
	if len(r.seen) != 1 || r.seen[0].Volume != someVolume || !r.seen[0].Seen ||
		r.seen[0].Request != "" || r.seen[0].Claim != "default/data" {
		t.Errorf("said %+v", r.seen)
	}
	change = Of(again).Begin(DiskDeleted, Fields{Volume: someVolume})
	Answered(again, "request-2")
	Answered(again, "a later request")
	change.End(nil, Fields{})
	if last := r.seen[len(r.seen)-1]; last.Event != DiskDeleted || last.Request != "request-2" {
		t.Errorf("said %+v", last)
	}
}

func TestAChangeIsLoggedEvenIfItsFirstEntryWasLost(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, FileName(someVolume))
	removed := record(dir)
	change := removed.call(t.Context()).Begin(Mounted, Fields{})
	csitest.Must(t, os.Remove(path))
	change.End(nil, Fields{})
	csitest.Must(t, os.Mkdir(path, 0o700)) // a directory, so writes fail
	unwritten := record(dir)
	change = unwritten.call(t.Context()).Begin(Unmounted, Fields{})
	csitest.Must(t, os.Remove(path))
	change.End(nil, Fields{})
	if len(removed.seen) != 1 || len(unwritten.seen) != 1 {
		t.Errorf("said %+v and %+v", removed.seen, unwritten.seen)
	}
}

func TestRecorderFilesArePrivateAndOfLimitedSize(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "flight")
	path := filepath.Join(dir, FileName(someVolume))
	elsewhere := filepath.Join(t.TempDir(), "elsewhere")
	csitest.Must(t, os.WriteFile(elsewhere, nil, 0o600))
	r := record(dir)
	for i := range 500 {
		if i == 1 {
			csitest.Must(t, os.Symlink(elsewhere, path+NewSuffix))
		}
		r.call(t.Context()).Begin(Published, Fields{Detail: strings.Repeat("x", 200)}).End(nil, Fields{})
	}
	if b, err := os.ReadFile(elsewhere); err != nil || len(b) > 0 {
		t.Errorf("%d bytes were written through a link, %v", len(b), err)
	}
	info := csitest.Got(os.Stat(path))(t)
	if info.Size() > maxBytes || info.Mode().Perm() != 0o600 {
		t.Errorf("the file has %d bytes and the mode %s", info.Size(), info.Mode())
	}
	entries := csitest.Got(Read(dir, someVolume))(t)
	if len(entries) < keepEntries || len(r.seen) != 500 {
		t.Errorf("the file has %d entries of %d changes", len(entries), len(r.seen))
	}
	dirInfo := csitest.Got(os.Stat(dir))(t)
	if dirInfo.Mode().Perm() != 0o700 {
		t.Errorf("the directory has the mode %s", dirInfo.Mode())
	}
}

func TestRecorderKeepsALimitedNumberOfFiles(t *testing.T) {
	dir := t.TempDir()
	r := record(dir)
	for i := range maxVolumes + 10 {
		ctx := With(t.Context(), r.Recorder, Fields{Volume: fmt.Sprintf("volume %d", i)})
		Of(ctx).Begin(Mounted, Fields{}).End(nil, Fields{})
	}
	files := csitest.Got(os.ReadDir(dir))(t)
	newest := csitest.Got(Read(dir, fmt.Sprintf("volume %d", maxVolumes+9)))(t)
	if len(files) != maxVolumes || len(newest) != 2 {
		t.Errorf("%d files, and %d entries of the newest volume", len(files), len(newest))
	}
}

func TestRecorderLogsChangesInSpiteOfADamagedFile(t *testing.T) {
	for name, put := range map[string]func(path string) error{
		"a torn line": func(path string) error {
			return os.WriteFile(path, []byte(`{"time":"2026-01-01T00:00:00Z","event":"Mou`), 0o600)
		},
		"bytes of something else": func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte{0, 1, '\n', 0xff}, 4096), 0o600)
		},
		"a link":      func(path string) error { return os.Symlink("/etc/passwd", path) },
		"a directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"a file above the limit": func(path string) error {
			return os.WriteFile(path, bytes.Repeat([]byte("{}\n"), 3*maxBytes), 0o600)
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			csitest.Must(t, put(filepath.Join(dir, FileName(someVolume))))
			r := record(dir)
			r.call(t.Context()).Begin(Mounted, Fields{}).End(nil, Fields{})
			if len(r.seen) != 1 || strings.Count(r.log.String(), "event=Mounted") != 1 {
				t.Errorf("said %+v\n%s", r.seen, r.log.String())
			}
		})
	}
}

func TestConcurrentProcessesLoseNoEntries(t *testing.T) {
	dir := t.TempDir()
	const processes, changes = 4, 20
	var all sync.WaitGroup
	for i := range processes {
		all.Go(func() {
			r := record(dir)
			ctx := With(t.Context(), r.Recorder, Fields{Volume: someVolume, Path: fmt.Sprint(i)})
			for range changes {
				Of(ctx).Begin(Published, Fields{}).End(nil, Fields{})
			}
		})
	}
	all.Wait()
	entries := csitest.Got(Read(dir, someVolume))(t)
	if len(entries) != 2*processes*changes {
		t.Errorf("%d entries, want %d", len(entries), 2*processes*changes)
	}
}

func TestEveryEventHasItsOwnMessage(t *testing.T) {
	said := map[string]Event{}
	for _, e := range Events {
		if other, twice := said[e.Says]; twice || e.Meaning == "" {
			t.Errorf("%s has the message %q of %q, or no meaning", e.Event, e.Says, other)
		}
		said[e.Says] = e.Event
	}
}
