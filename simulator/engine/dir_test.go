package engine

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/looptest"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/dataplane"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/store"
)

func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	found := map[string]string{}
	looptest.Must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.Type().IsRegular() {
			var text []byte
			if filepath.Ext(path) != ".img" {
				text, err = os.ReadFile(path)
			}
			found[path] = fmt.Sprintf("%x", sha256.Sum256(text))
		}
		return err
	}))
	return found
}

func openIn(t *testing.T, dir string) (*Simulation, error) {
	return Open(context.WithoutCancel(t.Context()), Config{Dir: dir, Volatile: true,
		Devices: dataplane.NoDevices, Log: slog.New(slog.DiscardHandler),
		Disks: []DiskSpec{{Name: "d", SizeBytes: 1 << 30}}})
}

func rackDir(t *testing.T) (dir, disk string) {
	t.Helper()
	dir = t.TempDir()
	r := looptest.Got(openIn(t, dir))(t)
	looptest.Must(t, r.Close())
	disks, err := filepath.Glob(filepath.Join(dir, "disks", "*"))
	if err != nil || len(disks) != 1 {
		t.Fatalf("the rack has the disks %v (%v)", disks, err)
	}
	return dir, disks[0]
}

func TestPrepareDirRefusesForeignDirectories(t *testing.T) {
	const magic = markText + "\nversion "
	for _, test := range []struct {
		name, path string // path is relative to the directory; a trailing slash means a directory
		text       string
		want       string // part of the refusal; "" means that the directory is accepted
	}{
		{"an empty directory", "", "", ""},
		{"the root of a filesystem", "lost+found/", "", ""},
		{"an identity that the user chose", "identity", "", ""},
		{"empty guest views", "guests/0a1de000/", "", ""},
		{"a guest view that is not empty", "guests/0a1de000/dev/", "", `it holds "guests"`},
		{"a file beside the guest views", "guests/note", "", `it holds "guests"`},
		{"a user's file", "thesis.txt", "", `it holds "thesis.txt"`},
		{"a file VERSION of another program", "VERSION", "2\n", `it holds "VERSION"`},
		{"an empty mark", markFile, "", ""},
		{"a mark", markFile, magic + "2\n", ""},
		{"a mark of another version", markFile, magic + "7\n", `says version "7"`},
		{"a mark of another program", markFile, "ours", "is not a simulator's mark"},
		{"a mark that is a directory", markFile + "/x/", "", "is not a small file"},
		{"a long mark", markFile, magic + strings.Repeat("2", 2000), "is not a small file"},
		{"disks without records", "disks/x.img", "", `it holds "disks"`},
	} {
		t.Run(test.name, func(t *testing.T) {
			dir := t.TempDir()
			path := filepath.Join(dir, test.path)
			looptest.Must(t, os.MkdirAll(filepath.Dir(path), 0o755))
			if strings.HasSuffix(test.path, "/") {
				looptest.Must(t, os.MkdirAll(path, 0o755))
			} else if test.path != "" {
				looptest.Must(t, os.WriteFile(path, []byte(test.text), 0o600))
			}
			err := prepareDir(dir, "")
			switch {
			case test.want == "":
				if err != nil {
					t.Errorf("prepareDir = %v, want it taken", err)
				}
			case err == nil || !strings.Contains(err.Error(), test.want):
				t.Errorf("prepareDir = %v, want an error with %q", err, test.want)
			default:
				if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
					t.Errorf("a refused directory has %v (%v)", left, err)
				}
			}
		})
	}
}

// TestOpenRefusesADirectoryWithForeignFiles replaces each file of a rack's directory, and each file
// that the rack would create, by a link, a pipe or another user's file. The rack must refuse the
// directory without waiting for a pipe, and must not change the foreign files.
func TestOpenRefusesADirectoryWithForeignFiles(t *testing.T) {
	dir, _ := rackDir(t)
	stranger, aside := t.TempDir(), filepath.Join(t.TempDir(), "aside")
	theirs := filepath.Join(stranger, "theirs")
	looptest.Must(t, os.WriteFile(theirs, []byte("theirs"), 0o600))
	plants := map[string]func(path string) error{
		"a link to a file":      func(path string) error { return os.Symlink(theirs, path) },
		"a link to a directory": func(path string) error { return os.Symlink(stranger, path) },
		"a pipe": func(path string) error {
			looptest.Command(t, "mkfifo", path)
			return nil
		},
		"a second name": func(path string) error { return os.Link(theirs, path) },
		"another user's file": func(path string) error {
			return errors.Join(os.WriteFile(path, nil, 0o666), os.Chown(path, 12345, 12345))
		},
	}
	if os.Geteuid() != 0 {
		delete(plants, "another user's file")
	}
	entries := looptest.Got(fs.Glob(os.DirFS(dir), "*"))(t)
	inside := looptest.Got(fs.Glob(os.DirFS(dir), "*/*"))(t)
	for _, name := range append(entries, inside...) {
		for _, path := range []string{filepath.Join(dir, name), filepath.Join(dir, name+".tmp")} {
			for what, plant := range plants {
				if filepath.Base(path) == recordsFile+".tmp" && what == "a second name" {
					continue // a killed simulator leaves this hard link, and the next start removes it
				}
				there := os.Rename(path, aside) == nil
				looptest.Must(t, plant(path))
				if r, err := openIn(t, dir); err == nil {
					t.Errorf("a rack has %s at %s (%v)", what, path, r.Close())
				}
				if text, err := os.ReadFile(theirs); string(text) != "theirs" {
					t.Fatalf("with %s at %s the stranger has %q (%v)", what, path, text, err)
				}
				looptest.Must(t, os.Remove(path))
				if there {
					looptest.Must(t, os.Rename(aside, path))
				}
			}
		}
	}
	disks := filepath.Join(dir, "disks")
	looptest.Must(t, errors.Join(os.Chmod(dir, 0o777), os.Chmod(disks, 0o777)))
	r := looptest.Got(openIn(t, dir))(t)
	looptest.Must(t, r.Close())
	for _, path := range []string{dir, disks} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s is %v (%v): others can write there", path, info.Mode(), err)
		}
	}
}

func TestOpenReportsDamagedRecordsAndKeepsTheDisk(t *testing.T) {
	dir, disk := rackDir(t)
	records := filepath.Join(dir, recordsFile)
	whole := looptest.Got(os.ReadFile(records))(t)
	size := os.Getpagesize()
	damaged := map[string][]byte{"missing": nil, "empty": {}}
	random := rand.New(rand.NewPCG(1, 2))
	for at := 0; at < len(whole); at += size {
		with := func(name string, change func(page []byte)) {
			text := append([]byte{}, whole...)
			change(text[at:min(at+size, len(text))])
			damaged[fmt.Sprintf("page %d %s", at/size, name)] = text
		}
		for _, fill := range []byte{0, 1, 2, 0x7f, 0xff} {
			with(fmt.Sprintf("of %#x", fill), func(page []byte) {
				for i := range page {
					page[i] = fill
				}
			})
		}
		with("as another one", func(page []byte) { copy(page, whole[(at+size)%len(whole):]) })
		for i := range 16 {
			with(fmt.Sprintf("with another byte %d", i), func(page []byte) {
				page[i] ^= 1 << random.IntN(8)
			})
			with(fmt.Sprintf("with others %d", i), func(page []byte) {
				for range 8 {
					page[random.IntN(256)] = byte(random.Uint32())
				}
			})
		}
		damaged[fmt.Sprintf("cut at page %d", at/size)] = whole[:at]
		damaged[fmt.Sprintf("cut in page %d", at/size)] = whole[:min(at+100, len(whole))]
	}
	refused := 0
	for name, text := range damaged {
		looptest.Must(t, os.Remove(records))
		if text != nil {
			looptest.Must(t, os.WriteFile(records, text, 0o600))
		}
		before := content(t, dir)
		r, err := openIn(t, dir)
		if err == nil {
			looptest.Must(t, r.Close())
		} else {
			refused++
			if after := content(t, dir); len(after) != len(before) || after[records] != before[records] {
				t.Errorf("%s: a refused directory changed", name)
			}
		}
		if len(text) < size*2 {
			if err == nil || !strings.Contains(err.Error(), "copy") {
				t.Errorf("%s: open = %v, want what to do", name, err)
			}
		} else if err != nil && !errors.Is(err, store.ErrDamaged) &&
			!strings.Contains(err.Error(), "record") {
			t.Errorf("%s: open = %v", name, err)
		}
		if _, err := os.Stat(disk); err != nil {
			t.Fatalf("%s: the disk is gone", name)
		}
		looptest.Must(t, os.RemoveAll(records))
		looptest.Must(t, os.WriteFile(records, whole, 0o600))
	}
	if refused < len(damaged)/4 {
		t.Errorf("%d of %d damages were noticed, which shows little", refused, len(damaged))
	}
}

func TestAProcessOfAnotherHostDoesNotCountAsEnded(t *testing.T) {
	us := strings.Fields(thisProcess())
	for _, c := range []struct {
		machine, boot string
		want          bool
	}{{us[0], us[1], false}, {us[0], "earlier", true}, {"another", "earlier", false}} {
		if got := ended(c.machine + " " + c.boot + " " + us[2]); got != c.want {
			t.Errorf("ended for the boot %q of %q = %v, want %v", c.boot, c.machine, got, c.want)
		}
	}
}
