package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
)

// setenv sets the variables of the options: home, and names and values alternately.
func setenv(t *testing.T, pairs ...string) {
	for _, name := range []string{"XDG_CACHE_HOME", "KEEP", "E2E_REUSE"} {
		t.Setenv(name, "")
	}
	t.Setenv("HOME", "/home/me")
	for i := 0; i < len(pairs); i += 2 {
		t.Setenv(pairs[i], pairs[i+1])
	}
}

func TestOptionsAreReadFromFlagsAndEnvironment(t *testing.T) {
	setenv(t, "KEEP", "1")
	got, err := parse([]string{"-offline", "-focus", "CP-10", "-label", "!slow"}, io.Discard)
	want := options{
		offline: true, focus: "CP-10", label: "!slow", kubernetes: images.Kubernetes, keep: true,
		timeout: time.Hour, cache: "/home/me/.cache/oxide-csi-e2e", previous: previousRelease,
	}
	if err != nil || got != want {
		t.Errorf("parse = %+v, %v, want %+v", got, err, want)
	}
	setenv(t, "XDG_CACHE_HOME", "/c")
	other, err := parse([]string{"-kubernetes=v1.36.1"}, io.Discard)
	if err != nil || other.kubernetes != "v1.36.1" || other.cache != "/c/oxide-csi-e2e" {
		t.Errorf("parse = %+v, %v, want v1.36.1 and the cache in /c", other, err)
	}
	plain, err := parse(nil, io.Discard)
	if err != nil || plain.kubernetes != published || plain.label != "!long" {
		t.Errorf("parse = %+v, %v, want %s and no long specs", plain, err, published)
	}
	named, err := parse([]string{"-focus=long"}, io.Discard)
	if err != nil || named.label != "" {
		t.Errorf("parse = %+v, %v, want the specs of the focus, long ones too", named, err)
	}
}

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	setenv(t)
	for want, args := range map[string][]string{
		"a spec is chosen with -focus": {"CP-10"},
		"offline, the nodes run":       {"-offline", "-kubernetes=v1.36.1"},
		"a version such as v1.35":      {"-kubernetes=1.36.1"},
		"the suite cleans up":          {"-timeout=1m"},
		"not defined":                  {"-on"},
	} {
		if _, err := parse(args, io.Discard); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("parse(%q) = %v, want an error with %q", args, err, want)
		}
	}
	setenv(t, "XDG_CACHE_HOME", "cache")
	if _, err := parse(nil, io.Discard); err == nil || !strings.Contains(err.Error(), "relative") {
		t.Errorf("parse with a relative cache = %v, want an error", err)
	}
}

func TestTheRacksDirectoryAllowsDeviceNodes(t *testing.T) {
	first, second := filepath.Join(t.TempDir(), "first"), filepath.Join(t.TempDir(), "second")
	flags := map[string]int64{first: mountedNoDev | 1, second: 1}
	flagsOf := func(dir string) (int64, error) { return flags[dir], nil }
	dir, err := workDir([]string{first, second}, flagsOf)
	if err != nil || filepath.Dir(dir) != second {
		t.Fatalf("workDir = %s, %v, want one in %s", dir, err, second)
	}
	if info, err := os.Stat(dir); err != nil || !info.IsDir() {
		t.Errorf("workDir's %s: %v", dir, err)
	}
	flags[second] = mountedNoDev
	if _, err := workDir([]string{first, second}, flagsOf); err == nil ||
		!strings.Contains(err.Error(), "nodev") {
		t.Errorf("workDir = %v where no device node works, want that said", err)
	}
	if _, err := mountFlags(t.TempDir()); err != nil {
		t.Errorf("mountFlags: %v", err)
	}
}
