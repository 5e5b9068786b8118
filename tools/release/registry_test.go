//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"testing"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// unpack reads an archive of an OCI layout.
func unpack(t *testing.T, archive []byte) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for r := tar.NewReader(bytes.NewReader(archive)); ; {
		header, err := r.Next()
		if errors.Is(err, io.EOF) {
			return files
		}
		must(t, err)
		if files[header.Name], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
		want := path.Base(header.Name)
		if strings.HasPrefix(header.Name, "blobs/") &&
			fmt.Sprintf("%x", sha256.Sum256(files[header.Name])) != want {
			t.Errorf("the blob %s has another digest", want)
		}
	}
}

// parse parses JSON, and fails the test if it is not valid.
func parse[T any](t *testing.T, text []byte) T {
	t.Helper()
	var value T
	if err := json.Unmarshal(text, &value); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return value
}

// rootOf returns the only entry of a layout.
func rootOf(t *testing.T, files map[string][]byte, tag string) ocispec.Descriptor {
	t.Helper()
	entries := parse[ocispec.Index](t, files[ocispec.ImageIndexFile]).Manifests
	if len(entries) != 1 || entries[0].Annotations[ocispec.AnnotationRefName] != tag {
		t.Fatalf("the layout lists %+v, want one entry with the tag %s", entries, tag)
	}
	full := entries[0].Annotations[containerdName]
	if !strings.Contains(full, "/oxidecomputer/oxide-") || !strings.HasSuffix(full, ":"+tag) {
		t.Errorf("containerd would call it %q", full)
	}
	return entries[0]
}

func blobOf(files map[string][]byte, d ocispec.Descriptor) []byte {
	return files["blobs/sha256/"+d.Digest.Encoded()]
}

// helmPulls serves the chart's layout as a registry does, and lets helm pull the chart from it.
func helmPulls(t *testing.T, root, dir string) {
	t.Helper()
	version := testVersion[1:]
	files := unpack(t, read(t, dir, chartName+".oci.tar"))
	entry := rootOf(t, files, version)
	registry := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := path.Base(r.URL.Path)
		if name == version {
			name = entry.Digest.String()
		}
		content, ok := files["blobs/sha256/"+strings.TrimPrefix(name, "sha256:")]
		switch {
		case r.URL.Path == "/v2/":
		case strings.HasSuffix(r.URL.Path, "/tags/list"):
			fmt.Fprintf(w, `{"name":%q,"tags":[%q]}`, "oxidecomputer/"+chartName, version)
		case !ok:
			http.NotFound(w, r)
		default:
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.Header().Set("Content-Type", entry.MediaType)
			}
			w.Header().Set("Docker-Content-Digest", name)
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(content))
		}
	}))
	defer registry.Close()
	pulled := t.TempDir()
	output(t, root, "go", "tool", "-modfile=tools/go.mod", "helm", "pull", "--plain-http",
		"--version", version, "--destination", pulled,
		"oci://"+strings.TrimPrefix(registry.URL, "http://")+"/oxidecomputer/"+chartName)
	name := chartName + "-" + version + ".tgz"
	if !bytes.Equal(read(t, pulled, name), read(t, dir, name)) {
		t.Error("the chart in the layout is another one than the file")
	}
	line := fmt.Sprintf("oxidecomputer/%s %s all %s\n", chartName, version, entry.Digest)
	if !strings.Contains(string(read(t, dir, digests)), line) {
		t.Errorf("%s has no line %q", digests, line)
	}
}
