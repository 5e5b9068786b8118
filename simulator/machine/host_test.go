//go:build linux

package machine

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestAQEMUThatEndsAtOnceIsAnErrorWithItsWords(t *testing.T) {
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
	for range 2 { // the directory is not locked any more
		m, err := h.Start(t.Context(), dir, Guest{ID: "id", Name: "a", CPUs: 1}, nil)
		if m != nil || err == nil || !strings.Contains(err.Error(), "QEMU has ended") ||
			!strings.Contains(err.Error(), "no such device") {
			t.Fatalf("the start returns %v, %v", m, err)
		}
	}
}
