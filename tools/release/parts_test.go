package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// given returns a function that returns the result, or ends the test if err is not nil.
func given[T any](result T, err error) func(testing.TB) T {
	return func(t testing.TB) T {
		t.Helper()
		must(t, err)
		return result
	}
}

func TestSectionReturnsTheChangelogOfAVersion(t *testing.T) {
	const changelog = "# Changelog\n\n## Unreleased\n\n- new, see [the page](docs/new.md)\n\n" +
		"## v1.2.3 – 2026-05-01\n\n- one\n- [two](https://example.com/a.md)\n\n## v1.2.2\n\n"
	for _, c := range []struct{ name, version, want, complaint string }{
		{"a release, whose heading has a date", "v1.2.3",
			"- one\n- [two](https://example.com/a.md)\n", ""},
		{"a candidate has the unreleased changes, with absolute links", "v1.3.0-rc.1",
			"- new, see [the page](" + project + "/blob/v1.3.0-rc.1/docs/new.md)\n", ""},
		{"a release without a section", "v1.3.0", "", `## v1.3.0`},
		{"a section without text", "v1.2.2", "", `## v1.2.2`},
		{"the beginning of another version", "v1.2", "", `## v1.2`},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := section(changelog, c.version)
			switch {
			case c.complaint == "" && (err != nil || got != c.want):
				t.Errorf("got %q, %v; want %q", got, err, c.want)
			case c.complaint != "" && (err == nil || !strings.Contains(err.Error(), c.complaint)):
				t.Errorf("got %q, %v; want an error with %q", got, err, c.complaint)
			}
		})
	}
}

func TestInvalidReleaseOptionsAreRefused(t *testing.T) {
	full := t.TempDir()
	must(t, os.WriteFile(filepath.Join(full, "letters"), nil, 0o644))
	good := release{Version: "v1.2.3", Root: "../..", Out: filepath.Join(t.TempDir(), "dist"),
		Arch: []string{"amd64"}, Dirty: true, Log: io.Discard}
	for _, c := range []struct {
		name   string
		change func(*release)
		want   string
	}{
		{"no version", func(r *release) { r.Version = "" }, "expected three numbers"},
		{"a version without v", func(r *release) { r.Version = "1.2.3" }, "expected three numbers"},
		{"half a version", func(r *release) { r.Version = "v1.2" }, "expected three numbers"},
		{"an unknown architecture", func(r *release) { r.Arch = []string{"mips"} }, `"mips"`},
		{"no architecture", func(r *release) { r.Arch = nil }, "-arch is empty"},
		{"one base for two architectures", func(r *release) {
			r.Base, r.Arch = "x", []string{"amd64", "arm64"}
		}, "name one"},
		{"a folder with other files", func(r *release) { r.Out = full }, "not a release to replace"},
		{"a version without notes", func(*release) {}, "## v1.2.3"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := good
			c.change(&r)
			err := r.run(t.Context())
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want an error with %q", err, c.want)
			}
			if _, err := os.Stat(good.Out); err == nil {
				t.Error("a folder was made")
			}
		})
	}
}

func TestTheBillOfMaterialsListsOnlyInstalledPackages(t *testing.T) {
	got := debian("Package: libstdc++6\nStatus: install ok installed\nArchitecture: amd64\n" +
		"Version: 12.2.0-14+deb12u1\nDescription: a library\n Version: of nothing\n\n" +
		"Package: gone\nStatus: deinstall ok config-files\nArchitecture: amd64\nVersion: 1\n\n")
	want := []part{{"libstdc++6", "12.2.0-14+deb12u1",
		"pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64"}}
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

var pinned = regexp.MustCompile(`^[\w./-]+@[0-9a-f]{40} # v[0-9.]+$`)

func TestWorkflowActionsAndTheBaseImageArePinned(t *testing.T) {
	actions := 0
	for _, workflow := range given(filepath.Glob("../../.github/workflows/*.yaml"))(t) {
		for line := range strings.SplitSeq(string(given(os.ReadFile(workflow))(t)), "\n") {
			_, action, ok := strings.Cut(line, "uses: ")
			if !ok {
				continue
			}
			actions++
			if !pinned.MatchString(action) {
				t.Errorf("%s uses %s: want the commit, and its version in a comment", workflow, action)
			}
		}
	}
	dockerfile := given(os.ReadFile("../../Dockerfile"))(t)
	base := regexp.MustCompile(`(?m)^ARG BASE=[a-z]+:[a-z-]+@sha256:[0-9a-f]{64}$`)
	if actions == 0 || !base.Match(dockerfile) {
		t.Errorf("there are %d actions, and BASE of the Dockerfile has to have a digest", actions)
	}
}
