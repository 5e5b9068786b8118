package proof_test

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

const mib = 1 << 20

// mountNew mounts a new filesystem, and returns a forgery for it.
func mountNew(t *testing.T, fs string, size int64) (f proof.Forgery, dir string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "disk")
	f = proof.Forgery{Volume: "a volume", Disk: "csi-0123456789abcdef", Filesystem: fs,
		SizeBytes: size, NextBytes: 512 * mib}
	csitest.Must(t, os.WriteFile(path, nil, 0o600))
	csitest.Must(t, os.Truncate(path, f.SizeBytes))
	out, err := exec.CommandContext(t.Context(), "mkfs."+fs, "-q", path).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	loop, err := loopdev.Attach(t.Context(), loopdev.Config{Path: path,
		Serial: fmt.Sprint("forged-", os.Getpid(), fs), Owner: loopdev.Process()})
	csitest.Must(t, err)
	t.Cleanup(func() { csitest.Must(t, loop.Detach(context.Background())) })
	f.Device, dir = loop.Path, t.TempDir()
	csitest.Must(t, unix.Mount(loop.Path, dir, fs, 0, ""))
	t.Cleanup(func() { csitest.Must(t, unix.Unmount(dir, 0)) })
	return f, dir
}

// These two filesystems report the blocks of a file. There, the blocks at the offsets of the
// driver's records belong to a forged file.
func TestForgedRecordsAreAtTheOffsetsOfTheDriversRecords(t *testing.T) {
	for fs, atLeast := range map[string]int{"ext4": 5, "xfs": 4} {
		t.Run(fs, func(t *testing.T) {
			f, dir := mountNew(t, fs, 320*mib)
			files, err := f.Write(dir)
			csitest.Must(t, err)
			csitest.Must(t, files.Check(dir))
			unix.Sync()
			device, err := os.Open(f.Device)
			csitest.Must(t, err)
			defer device.Close()
			hits, b := 0, make([]byte, 512)
			for _, slot := range append(proof.FormatSlots(f.SizeBytes),
				proof.GrowthSlots(f.SizeBytes)...) {
				_, err := device.ReadAt(b, slot)
				csitest.Must(t, err)
				if bytes.HasPrefix(b, []byte("oxide-csi format")) && bytes.Contains(b, []byte(f.Volume)) {
					hits++
				}
			}
			if hits < atLeast {
				t.Errorf("%d of 6 offsets have a forged record, want %d", hits, atLeast)
			}
			var st unix.Statfs_t
			csitest.Must(t, unix.Statfs(dir, &st))
			if st.Bavail < st.Blocks/2 {
				t.Errorf("only %d of %d blocks are left for the workload", st.Bavail, st.Blocks)
			}
		})
	}
}

func TestAChangeOfAForgedFileIsNoticed(t *testing.T) {
	for _, fs := range []string{"ext3", "ext4", "xfs", "btrfs"} {
		t.Run(fs, func(t *testing.T) {
			f, dir := mountNew(t, fs, 320*mib)
			files, err := f.Write(dir)
			csitest.Must(t, err)
			if len(files) != 3 {
				t.Fatalf("there are %d files", len(files))
			}
			for name := range files {
				csitest.Must(t, files.Check(dir))
				w, err := os.OpenFile(filepath.Join(dir, name), os.O_RDWR, 0)
				csitest.Must(t, err)
				b := make([]byte, 1)
				_, err = w.ReadAt(b, 4096)
				csitest.Must(t, err)
				_, err = w.WriteAt([]byte{^b[0]}, 4096)
				csitest.Must(t, err)
				if files.Check(dir) == nil {
					t.Errorf("a changed byte of %s was not noticed", name)
				}
				_, err = w.WriteAt(b, 4096)
				csitest.Must(t, err)
				csitest.Must(t, w.Close())
			}
			csitest.Must(t, os.Remove(filepath.Join(dir, "forged-odd")))
			if files.Check(dir) == nil {
				t.Error("a missing file was not noticed")
			}
		})
	}
}

func TestAFilledFilesystemHasForgedRecordsAtItsEnd(t *testing.T) {
	f, dir := mountNew(t, "ext4", 64*mib)
	files, err := f.Fill(dir, true)
	csitest.Must(t, err)
	csitest.Must(t, files.Check(dir))
	unix.Sync()
	device, err := os.Open(f.Device)
	csitest.Must(t, err)
	defer device.Close()
	for _, slot := range proof.GrowthSlots(f.SizeBytes) {
		b := make([]byte, 512)
		_, err := device.ReadAt(b, slot)
		csitest.Must(t, err)
		if !bytes.Contains(b, []byte(`"growFrom":33554432,"mounted":`)) {
			t.Errorf("at offset %d is %q", slot, b[:200])
		}
	}
	var st unix.Statfs_t
	csitest.Must(t, unix.Statfs(dir, &st))
	if free := int64(st.Bavail) * st.Bsize; free < 4*mib {
		t.Errorf("%d bytes are left", free)
	}
}
