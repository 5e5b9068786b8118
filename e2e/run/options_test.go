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

func env(pairs ...string) func(string) string {
	return func(name string) string {
		for i := 0; i < len(pairs); i += 2 {
			if pairs[i] == name {
				return pairs[i+1]
			}
		}
		return ""
	}
}

func TestOptionsAreReadFromFlagsAndEnvironment(t *testing.T) {
	got, err := parse([]string{"-offline", "-focus", "CP-10", "-label", "!slow"},
		env("HOME", "/home/me", "KEEP", "1"), io.Discard)
	want := options{
		offline: true, focus: "CP-10", label: "!slow", kubernetes: images.Kubernetes, keep: true,
		timeout: time.Hour, cache: "/home/me/.cache/oxide-csi-e2e", previous: previousRelease,
	}
	if err != nil || got != want {
		t.Errorf("parse = %+v, %v, want %+v", got, err, want)
	}
	other, err := parse([]string{"-kubernetes=v1.36.1"}, env("XDG_CACHE_HOME", "/c"), io.Discard)
	if err != nil || other.kubernetes != "v1.36.1" || other.cache != "/c/oxide-csi-e2e" {
		t.Errorf("parse = %+v, %v, want v1.36.1 and the cache in /c", other, err)
	}
	plain, err := parse(nil, env("HOME", "/h"), io.Discard)
	if err != nil || plain.kubernetes != published || plain.label != "!long" {
		t.Errorf("parse = %+v, %v, want %s and no long specs", plain, err, published)
	}
	named, err := parse([]string{"-focus=long"}, env("HOME", "/h"), io.Discard)
	if err != nil || named.label != "" {
		t.Errorf("parse = %+v, %v, want the specs of the focus, long ones too", named, err)
	}
}

func TestOptionsThatCannotWorkAreRefused(t *testing.T) {
	home := env("HOME", "/home/me")
	for name, test := range map[string]struct {
		args []string
		env  func(string) string
		want string
	}{
		"a spec as an argument": {[]string{"CP-10"}, home, "-focus"},
		"another version offline": {
			[]string{"-offline", "-kubernetes=v1.36.1"}, home, "offline",
		},
		"a version without its v":          {[]string{"-kubernetes=1.36.1"}, home, "v1.35"},
		"less time than cleaning up takes": {[]string{"-timeout=1m"}, home, "cleans up"},
		"no place for a cache":             {nil, env(), "XDG_CACHE_HOME"},
		"a cache that moves about":         {nil, env("XDG_CACHE_HOME", "cache"), "absolute"},
		"a flag that is none":              {[]string{"-on"}, home, "not defined"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := parse(test.args, test.env, io.Discard)
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("parse(%q) = %v, want an error with %q", test.args, err, test.want)
			}
		})
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
