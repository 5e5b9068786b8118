//go:build linux

package machine

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestStartReturnsTheOutputOfAQEMUThatEndsAtOnce(t *testing.T) {
	image, programs, dir := t.TempDir(), t.TempDir(), t.TempDir()
	for path, text := range map[string]string{
		filepath.Join(image, "current"):      "new",
		filepath.Join(image, "new/key.pub"):  "ssh-ed25519 key\n",
		filepath.Join(image, "new/root.img"): "",
		filepath.Join(programs, qemu):        "#!/bin/sh\necho no such device >&2; exit 1\n",
		filepath.Join(programs, disks):       "#!/bin/sh\nfor last; do :; done; : >\"$last\"\n",
	} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(text), 0o755)); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("PATH", programs+":"+os.Getenv("PATH"))
	h, err := Open(t.Context(), image)
	if err != nil {
		t.Fatal(err)
	}
	for range 2 { // the first start must not leave the directory locked
		m, err := h.Start(t.Context(), dir, Guest{ID: "id", Name: "a", CPUs: 1}, nil)
		if m != nil || err == nil || !strings.Contains(err.Error(), "QEMU has ended") ||
			!strings.Contains(err.Error(), "no such device") {
			t.Fatalf("the start returns %v, %v", m, err)
		}
	}
}

func TestDroppingOldConsoleTextFreesDiskSpaceAndKeepsOffsets(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "console.log")
	line := []byte("the guest prints and prints and prints until its disk would be full\n")
	text := bytes.Repeat(line, 4*keptText/len(line))
	if err := errors.Join(os.WriteFile(path, text, 0o600), forgetText(dir)); err != nil {
		t.Fatal(err)
	}
	var is unix.Stat_t
	if err := unix.Stat(path, &is); err != nil || is.Blocks*512 > keptText+1<<16 {
		t.Errorf("the text takes %d bytes of the disk, want about %d: %v", is.Blocks*512, keptText, err)
	}
	first, end, err := Console(dir, 0, 100)
	if at := int(end) - 100; err != nil || at < 2*keptText || at > len(text)-keptText ||
		!bytes.Equal(first, text[at:end]) {
		t.Errorf("the first text is %q up to %d, %v", first, end, err)
	}
	if last, end, err := Console(dir, -1-keptText, keptText); err != nil || int(end) != len(text) ||
		!bytes.Equal(last, text[len(text)-keptText:]) {
		t.Errorf("the last text is %d bytes up to %d, %v", len(last), end, err)
	}
}
