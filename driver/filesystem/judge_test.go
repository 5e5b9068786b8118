//go:build linux

package filesystem

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/guesttest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

func TestParseBlkid(t *testing.T) {
	for _, c := range []struct {
		output string
		want   string
		fails  bool
	}{
		{output: "DEVNAME=/proc/self/fd/3\nTYPE=ext4\nUSAGE=filesystem\n", want: "ext4"},
		{output: "DEVNAME=x\nPTTYPE=gpt\n", want: "a partition table (gpt)"},
		{output: "LABEL=TYPE=xfs\nTYPE=swap\nPTTYPE=dos\n",
			want: "swap and a partition table (dos)"},
		{output: "TYPE=\n", fails: true},
		{output: "", fails: true},
		{output: "DEVNAME=x\n", fails: true},
	} {
		got, err := parseBlkid(c.output)
		if (err != nil) != c.fails || (err == nil && got != c.want) {
			t.Errorf("parseBlkid(%q) = %+v, %v, want %+v", c.output, got, err, c.want)
		}
	}
}

func TestBlkidDistinguishesNothingFoundFromAnError(t *testing.T) {
	blank := filepath.Join(t.TempDir(), "blank")
	csitest.Must(t, os.WriteFile(blank, make([]byte, guesttest.MiB), 0o600))
	f, err := os.Open(blank)
	csitest.Must(t, err)
	defer func() { _ = f.Close() }()
	if got, err := blkid(f); err != nil || got != "" {
		t.Errorf("a blank file: %+v, %v", got, err)
	}
	tools := t.TempDir()
	for _, script := range []string{"", "exit 4", "exit 1", "kill -9 $$", "exit 0"} {
		if script != "" {
			csitest.Must(t, os.WriteFile(filepath.Join(tools, "blkid"), []byte("#!/bin/sh\n"+script+"\n"),
				0o755))
		}
		t.Setenv("PATH", tools)
		if got, err := blkid(f); err == nil {
			t.Errorf("blkid that does %q returns %+v, want an error", script, got)
		}
	}
}

// FuzzJudge checks that no disk with a byte that is not zero, or on which blkid finds something, is
// called blank.
func FuzzJudge(f *testing.F) {
	f.Add([]byte{}, []byte{}, "")
	f.Add([]byte{0, 1}, []byte{0}, "ext4")
	f.Add(make([]byte, 512), []byte("EFI PART"), "a partition table (gpt)")
	f.Fuzz(func(t *testing.T, head, sector []byte, found string) {
		s := scan{Path: "/dev/x", SizeBytes: 16 * guesttest.MiB,
			Found: findSuperblocks(head),
			Blkid: found, Regions: []regionData{
				{region{0, int64(len(head)), "the head"}, head},
				{region{RecordOffsets(16 * guesttest.MiB)[0], int64(len(sector)), "a sector"}, sector},
			}}
		clean := len(bytes.Trim(head, "\x00")) == 0 && len(bytes.Trim(sector, "\x00")) == 0
		s.takeRecords(Volume{})
		got, err := s.judge(Volume{ID: "v", DiskName: "d", SizeBytes: s.SizeBytes})
		if err == nil && got.Blank && (!clean || found != "") {
			t.Fatalf("called blank: head %q, sector %q, %q", head, sector, found)
		}
	})
}

// After a write that failed, the kernel shows what was to be written, as long as any program has
// the device open. A check would find the filesystem whole that is not.
func TestWhatIsCheckedAndMountedIsWhatTheDiskHas(t *testing.T) {
	g := guesttest.New(t)
	d := g.Attach(guesttest.Serial, 64*guesttest.MiB)
	program, err := os.Open(d.Loop)
	csitest.Must(t, err)
	defer func() { csitest.Must(t, program.Close()) }()
	const at = 63 * guesttest.MiB
	sees := func() []byte {
		b := make([]byte, 4096)
		_, err := program.ReadAt(b, at)
		csitest.Must(t, err)
		return b
	}
	kept, has := sees(), bytes.Repeat([]byte{7}, 4096)
	file, err := os.OpenFile(d.File, os.O_WRONLY, 0)
	csitest.Must(t, err)
	_, err = file.WriteAt(has, at)
	csitest.Must(t, err)
	csitest.Must(t, file.Close())
	if !bytes.Equal(sees(), kept) {
		t.Fatal("the kernel has not kept what it read")
	}
	device := openLocked(t.Context(), t, g)
	defer func() { csitest.Must(t, device.Close()) }()
	csitest.Must(t, (&Preparation{Device: device}).finish(state{}))
	if !bytes.Equal(sees(), has) {
		t.Error("the kernel shows what it has kept, and not what is on the disk")
	}
}
