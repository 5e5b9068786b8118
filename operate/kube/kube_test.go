package kube

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestParseAcceptsOnlyValidObjectsAndCompleteLists(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":                 "",
		"truncated":               `{"kind":"List","items":[{"kind":"Pod"`,
		"two":                     `{"kind":"Pod"}{"kind":"Pod"}`,
		"a page":                  `{"kind":"List","metadata":{"continue":"x"},"items":[]}`,
		"a page with a remainder": `{"kind":"List","metadata":{"remainingItemCount":1},"items":[]}`,
		"no items":                `{"kind":"List"}`,
		"items of another type":   `{"kind":"List","items":"none"}`,
		"an item of another type": `{"kind":"List","items":[7]}`,
		"a field of another type": `{"kind":"List","items":[{"kind":"Pod","spec":7}]}`,
		"a name of another type":  `{"kind":"Pod","metadata":{"name":7}}`,
	} {
		if objects, err := Parse([]byte(text)); err == nil {
			t.Errorf("%s: got %+v", name, objects)
		}
	}
	for _, text := range []string{`{"kind":"PodList","items":[{"metadata":{"name":"p"}}]}`,
		`{"kind":"Pod","metadata":{"name":"p"}}`,
		`{"kind":"List","items":[{"kind":"Pod","metadata":{"name":"p"}}]}`} {
		objects, err := Parse([]byte(text))
		if err != nil || len(objects) != 1 || objects[0].Kind != "Pod" ||
			objects[0].Metadata.Name != "p" {
			t.Errorf("%s: got %+v, %v", text, objects, err)
		}
	}
}

func TestFirstAndLastReturnTheTimesOfAnEvent(t *testing.T) {
	for text, want := range map[string][2]string{
		`"firstTimestamp":"2026-06-12T12:00:00Z","lastTimestamp":"2026-06-12T12:05:00Z",` +
			`"eventTime":null`: {
			"12:00:00", "12:05:00"},
		`"firstTimestamp":null,"lastTimestamp":null,"eventTime":"2026-06-12T12:00:00.123456Z",` +
			`"series":{"count":2,"lastObservedTime":"2026-06-12T12:07:00.123456Z"}`: {"12:00:00",
			"12:07:00"},
		`"eventTime":"2026-06-12T12:00:00.123456Z"`: {"12:00:00", "12:00:00"},
		`"type":"Warning"`:                          {"00:00:00", "00:00:00"},
	} {
		objects, err := Parse([]byte(`{"kind":"Event","metadata":{"name":"e"},` + text + `}`))
		must(t, err)
		first, last := objects[0].First(), objects[0].Last()
		if first.Format(time.TimeOnly) != want[0] || last.Format(time.TimeOnly) != want[1] {
			t.Errorf("%s: got %s and %s", text, first, last)
		}
	}
}

func kubectlThat(t *testing.T, script string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	err := os.WriteFile(filepath.Join(dir, "kubectl"), []byte("#!/bin/sh\n"+script), 0o700)
	must(t, err)
	t.Setenv("PATH", dir+string(os.PathListSeparator)+os.Getenv("PATH"))
	return dir
}

func TestAPinnedKubectlIgnoresLaterChangesOfTheCurrentContext(t *testing.T) {
	kubectlThat(t, "if test \"$1\" = config; then echo $CURRENT; else echo \"$@\"; fi\n")
	t.Setenv("CURRENT", "one")
	pinned := Pinned(t.Context())
	t.Setenv("CURRENT", "two")
	if out, err := pinned(t.Context(), nil, "get", "pods"); err != nil ||
		string(out) != "get pods --context=one\n" {
		t.Errorf("got %q, %v", out, err)
	}
}

func TestKubectlDoesNotGetTheOxideToken(t *testing.T) {
	kubectlThat(t, "if test \"$1\" = fail; then\n"+
		"echo 'a log' >&2; echo 'no such context' >&2; exit 1\nfi\nenv\necho \"$@\"\n")
	t.Setenv("OXIDE_TOKEN", "canary")
	t.Setenv("KUBECONFIG", "/somewhere")
	out, err := Kubectl(t.Context(), "get", "pods")
	if err != nil || strings.Contains(string(out), "canary") ||
		!strings.Contains(string(out), "KUBECONFIG=/somewhere") ||
		!strings.HasSuffix(string(out), "get pods\n") {
		t.Errorf("%s, %v", out, err)
	}
	if _, err := Kubectl(t.Context(), "fail"); err == nil ||
		err.Error() != "kubectl fail: exit status 1: no such context" {
		t.Errorf("got %v", err)
	}
}
