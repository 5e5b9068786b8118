package proof_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) { namespace.Main(m) }

// plug makes a guest and attaches bystanders to it.
func plug(t *testing.T, member proof.Member) (*proof.GuestBystanders, string) {
	t.Helper()
	dir := t.TempDir()
	guest, err := proof.NewGuestView(filepath.Join(dir, "guest"))
	csitest.Must(t, err)
	b, err := proof.NewGuestBystanders(t.Context(), guest, filepath.Join(dir, "bystanders"), member,
		&proof.Invariant{})
	csitest.Must(t, err)
	return b, filepath.Join(dir, "bystanders")
}

func TestUnchangedBystandersPassEveryCheck(t *testing.T) {
	b, dir := plug(t, proof.Journal)
	if _, err := os.ReadFile(filepath.Join(dir, "mounted", "file")); err != nil {
		t.Error(err)
	}
	unix.Sync()
	for _, err := range []error{b.Check(), b.Compare(), b.Suspend(), b.Mount(), b.Check(), b.Close()} {
		if err != nil {
			t.Error(err)
		}
	}
}

// Check notices most writes. Close compares the bytes and notices all.
func TestAWriteToABystanderIsNoticed(t *testing.T) {
	write := func(path string, at int64) error {
		file, err := os.OpenFile(path, os.O_WRONLY|os.O_SYNC, 0)
		if err != nil {
			return err
		}
		_, err = file.WriteAt([]byte{1}, at)
		return errors.Join(err, file.Close())
	}
	poke := func(role int) func(*proof.GuestBystanders, string) error {
		return func(b *proof.GuestBystanders, _ string) error { return write(b.Loop(role).Path, 77<<20) }
	}
	for name, c := range map[string]struct {
		member proof.Member
		do     func(b *proof.GuestBystanders, dir string) error
		// silent writes do not change the time of the file. Only the bytes show them.
		silent bool
	}{
		"a byte of the journal":           {proof.Journal, poke(proof.MemberDisk), false},
		"a byte of the member of a btrfs": {proof.BtrfsMember, poke(proof.MemberDisk), false},
		"a byte of the blank disk":        {proof.Journal, poke(proof.BlankDisk), false},
		"a file of the mounted disk": {proof.Journal,
			func(_ *proof.GuestBystanders, dir string) error {
				return write(filepath.Join(dir, "mounted", "file"), 0)
			}, false},
		"a missing mount": {proof.Journal, func(_ *proof.GuestBystanders, dir string) error {
			return unix.Unmount(filepath.Join(dir, "mounted"), 0)
		}, false},
		"a byte, with the file's old modification time": {proof.Journal,
			func(_ *proof.GuestBystanders, dir string) error {
				path := filepath.Join(dir, "bystander-2")
				info, err := os.Stat(path)
				if err != nil {
					return err
				}
				return errors.Join(write(path, 9), os.Chtimes(path, time.Time{}, info.ModTime()))
			}, true},
	} {
		t.Run(name, func(t *testing.T) {
			b, dir := plug(t, c.member)
			csitest.Must(t, b.Check())
			csitest.Must(t, c.do(b, dir))
			if err := b.Check(); (err == nil) != c.silent {
				t.Errorf("after the call: %v", err)
			}
			if err := b.Close(); (err == nil) == c.silent {
				t.Errorf("at the end: %v", err)
			}
		})
	}
}
