//go:build linux

package main

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spdx/tools-golang/json"
	"sigs.k8s.io/yaml"
)

const testVersion = "v9.8.7-rc.1"

var programs = []string{"oxide-conformance", "oxide-csi-plugin", "oxide-instance-metadata",
	"oxide-node-keeper", "oxide-simulator"}

func TestAReleaseIsCompleteAndReproducible(t *testing.T) {
	whole(t, 5+3*len(programs))
	root := projectDir(t)
	elsewhere := copyOf(t, root)
	first, second := filepath.Join(t.TempDir(), "dist"), filepath.Join(t.TempDir(), "dist")
	must(t, releaseOf(root, first).run(t.Context()))
	// The folder already contains an older release, with one file that the new release lacks.
	must(t, os.Mkdir(second, 0o755))
	for _, name := range append(listing(t, first), "of-the-old-one") {
		must(t, os.WriteFile(filepath.Join(second, name), []byte("old"), 0o644))
	}
	must(t, releaseOf(elsewhere, second).run(t.Context()))

	t.Run("two builds in different directories have the same bytes, and replace another release",
		func(t *testing.T) { sameFiles(t, first, second) })
	t.Run("every file has its checksum", func(t *testing.T) { checksumsAreRight(t, first) })
	for _, program := range programs {
		name := program + "-linux-" + runtime.GOARCH
		t.Run(program+" reports its version", func(t *testing.T) {
			said := output(t, ".", filepath.Join(first, name), "--version")
			if said != testVersion+"\n" {
				t.Errorf("it reports %q, want %s", said, testVersion)
			}
		})
		t.Run(program+" has no path of the machine", func(t *testing.T) {
			content := read(t, first, name)
			for _, v := range []string{"GOROOT", "GOMODCACHE", "GOCACHE"} {
				hasNot(t, content, strings.TrimSpace(output(t, root, "go", "env", v)))
			}
			hasNot(t, content, root)
			hasNot(t, content, elsewhere)
		})
		t.Run("the bill of "+program+" lists the linked modules", func(t *testing.T) {
			billMatches(t, root, first, program)
		})
	}
	t.Run("the chart has the release's version", func(t *testing.T) { chartIsOf(t, root, first) })
	t.Run("helm pulls the same chart from a registry", func(t *testing.T) {
		helmPulls(t, root, first)
	})
	t.Run("manifests and jobs name this version's images", func(t *testing.T) {
		for _, names := range []map[string]string{kustomizations, jobs} {
			for _, name := range names {
				imagesAre(t, name, read(t, first, name), name != "snapshot-controller.yaml")
			}
		}
	})
}

// whole skips a test that makes a release if `go test` has the flag -short. It logs the number of
// skipped cases in the format of internal/short, which this module cannot import.
func whole(t *testing.T, cases int) {
	t.Helper()
	if testing.Short() {
		t.Logf("%d cases are left to make proofs", cases)
		t.SkipNow()
	}
}

func TestAReleaseWithAnUncommittedFileIsRefused(t *testing.T) {
	root := filepath.Join(t.TempDir(), "clone")
	output(t, projectDir(t), "git", "clone", "--quiet", "--shared", ".", root)
	const token = "deploy/chart/values-with-a-token.yaml"
	must(t, os.WriteFile(filepath.Join(root, token), []byte("token: oxide-token-x\n"), 0o600))
	r := releaseOf(root, filepath.Join(t.TempDir(), "dist"))
	r.Dirty = false
	if err := r.run(t.Context()); err == nil || !strings.Contains(err.Error(), token) {
		t.Errorf("got %v, want an error that names the file", err)
	}
}

func projectDir(t *testing.T) string {
	t.Helper()
	return given(filepath.Abs("../.."))(t)
}

// copyOf clones the repository into another directory, and copies the uncommitted changes there.
func copyOf(t *testing.T, root string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "a-copy-of-the-tree")
	output(t, root, "git", "clone", "--quiet", "--shared", "--no-checkout", ".", dir)
	output(t, dir, "git", "reset", "--quiet")
	list := output(t, root, "git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
	for name := range strings.SplitSeq(strings.TrimRight(list, "\x00"), "\x00") {
		info, err := os.Stat(filepath.Join(root, name))
		if err != nil { // the file was removed without a commit
			continue
		}
		must(t, os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755))
		must(t, os.WriteFile(filepath.Join(dir, name), read(t, root, name), info.Mode()))
	}
	return dir
}

func releaseOf(root, out string) *release {
	return &release{Version: testVersion, Root: root, Out: out, Arch: []string{runtime.GOARCH},
		Dirty: true, Log: io.Discard}
}

func sameFiles(t *testing.T, first, second string) {
	t.Helper()
	checksumsAreRight(t, second)
	if one, other := read(t, first, sums), read(t, second, sums); !bytes.Equal(one, other) {
		t.Errorf("one has the files\n%s\nthe other\n%s", one, other)
	}
}

func checksumsAreRight(t *testing.T, dir string) {
	t.Helper()
	var want strings.Builder
	for _, name := range listing(t, dir) {
		if name != sums {
			fmt.Fprintf(&want, "%x  %s\n", sha256.Sum256(read(t, dir, name)), name)
		}
	}
	if got := string(read(t, dir, sums)); got != want.String() {
		t.Errorf("%s is\n%s\nwant\n%s", sums, got, want.String())
	}
}

func hasNot(t *testing.T, content []byte, path string) {
	t.Helper()
	if len(path) < 2 {
		t.Fatalf("%q is not an absolute path", path)
	}
	if i := bytes.Index(content, []byte(path)); i >= 0 {
		t.Errorf("it has %q", content[i:min(len(content), i+len(path)+80)])
	}
}

// billMatches compares a program's bill of materials with the modules that `go list` prints.
func billMatches(t *testing.T, root, dir, program string) {
	t.Helper()
	name := program + "-linux-" + runtime.GOARCH
	listed := output(t, root, "env", "CGO_ENABLED=0", "go", "list", "-deps", "-f",
		"{{with .Module}}{{if not .Main}}{{with .Replace}}{{.Path}}@{{.Version}}{{else}}"+
			"{{.Path}}@{{.Version}}{{end}}{{end}}{{end}}", "./cmd/"+program)
	want := strings.Fields(listed)
	slices.Sort(want)
	want = slices.Compact(want)
	var got []string
	doc := given(json.Read(bytes.NewReader(read(t, dir, name+".spdx.json"))))(t)
	ids := map[string]bool{}
	for _, p := range doc.Packages {
		if ids[string(p.PackageSPDXIdentifier)] {
			t.Errorf("two packages have the identifier %s", p.PackageSPDXIdentifier)
		}
		ids[string(p.PackageSPDXIdentifier)] = true
		for _, ref := range p.PackageExternalReferences {
			if p.PackageName != "stdlib" {
				got = append(got, strings.TrimPrefix(ref.Locator, "pkg:golang/"))
			}
		}
	}
	if len(want) == 0 || !slices.Equal(got, want) {
		t.Errorf("it lists %q, want %q", got, want)
	}
	sum := fmt.Sprintf("%x", sha256.Sum256(read(t, dir, name)))
	if p := doc.Packages[0]; p.PackageChecksums[0].Value != sum || p.PackageVersion != testVersion ||
		p.PackageLicenseDeclared != license {
		t.Errorf("it is of %+v, want version %s, SHA-256 %s", p, testVersion, sum)
	}
}

func chartIsOf(t *testing.T, root, dir string) {
	t.Helper()
	name := filepath.Join(dir, chartName+"-"+testVersion[1:]+".tgz")
	var chart struct {
		Version, AppVersion string
		Annotations         map[string]string
	}
	text := output(t, root, "go", "tool", "-modfile=tools/go.mod", "helm", "show", "chart", name)
	must(t, yaml.Unmarshal([]byte(text), &chart))
	if "v"+chart.Version != testVersion || chart.AppVersion != testVersion ||
		chart.Annotations["artifacthub.io/license"] != license {
		t.Errorf("Chart.yaml contains %+v, want %s and %s", chart, testVersion, license)
	}
	rendered := output(t, root, "go", "tool", "-modfile=tools/go.mod", "helm", "template", "x", name,
		"--kube-version", "1.35.0", "--set", "instanceMetadata.enabled=true,nodeKeeper.enabled=true,snapshots.enabled=true")
	if n := imagesAre(t, "the chart", []byte(rendered), true); n != 4 {
		t.Errorf("the chart names %d images of ours, want controller, node, instance-metadata and "+
			"node-keeper", n)
	}
}

func unpack(t *testing.T, dir, name string) v1.ImageIndex {
	t.Helper()
	to := t.TempDir()
	archive := bytes.NewReader(read(t, dir, name+".oci.tar"))
	eachFile(archive, func(header *tar.Header, content []byte) {
		file := filepath.Join(to, header.Name)
		must(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, content, 0o644)))
	})
	return given(layout.ImageIndexFromPath(to))(t)
}

// rootOf checks that the layout has one entry, with this tag, and returns the entry.
func rootOf(t *testing.T, layout v1.ImageIndex, tag string) v1.Descriptor {
	t.Helper()
	entries := given(layout.IndexManifest())(t).Manifests
	if len(entries) != 1 || entries[0].Annotations[ocispec.AnnotationRefName] != tag {
		t.Fatalf("the layout lists %+v, want one entry with the tag %s", entries, tag)
	}
	full := entries[0].Annotations[containerdName]
	if !strings.Contains(full, "/oxidecomputer/oxide-") || !strings.HasSuffix(full, ":"+tag) {
		t.Errorf("containerd would call it %q", full)
	}
	return entries[0]
}

// helmPulls pushes the chart's layout to a registry, and compares the .tgz with the chart that Helm
// pulls from there. The registry checks the digests.
func helmPulls(t *testing.T, root, dir string) {
	t.Helper()
	version := testVersion[1:]
	layout := unpack(t, dir, chartName)
	entry := rootOf(t, layout, version)
	server := httptest.NewServer(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	defer server.Close()
	repository := strings.TrimPrefix(server.URL, "http://") + "/oxidecomputer/" + chartName
	tag := given(name.NewTag(repository + ":" + version))(t)
	must(t, remote.Write(tag, given(layout.Image(entry.Digest))(t)))
	pulled := t.TempDir()
	output(t, root, "go", "tool", "-modfile=tools/go.mod", "helm", "pull", "--plain-http",
		"--version", version, "--destination", pulled, "oci://"+repository)
	file := chartName + "-" + version + ".tgz"
	if !bytes.Equal(read(t, pulled, file), read(t, dir, file)) {
		t.Error("the chart in the layout is another one than the file")
	}
	line := fmt.Sprintf("oxidecomputer/%s %s all %s\n", chartName, version, entry.Digest)
	if !strings.Contains(string(read(t, dir, digests)), line) {
		t.Errorf("%s has no line %q", digests, line)
	}
}

// imagesAre checks that all images of the project in a text have the release's version, and returns
// their number. If the last argument is true, there must be an image.
func imagesAre(t *testing.T, name string, text []byte, some bool) int {
	t.Helper()
	found := map[string]bool{}
	for _, m := range ours.FindAllSubmatch(text, -1) {
		found[string(m[1])] = true
		if string(m[2]) != testVersion {
			t.Errorf("%s names %s, which this release has not", name, m[0])
		}
	}
	if some && len(found) == 0 {
		t.Errorf("%s names no image of ours", name)
	}
	return len(found)
}

// named matches the name of an image of the project, except in the path of a repository.
var named = regexp.MustCompile(`(?:^|[^/.\w])oxidecomputer/(oxide-[a-z0-9-]+)`)

func TestEveryImageThatTheProjectNamesIsInTheRelease(t *testing.T) {
	root := projectDir(t)
	targets := given(targetsOf(filepath.Join(root, "Dockerfile")))(t)
	r := release{targets: targets}
	found := map[string]bool{}
	for name := range strings.SplitSeq(strings.TrimSpace(output(t, root, "git", "ls-files", "--",
		"*.md", "*.yaml", "*.hcl", "*.tpl", "*.txt", "e2e/*.go", "deploy/*.go")), "\n") {
		for _, m := range named.FindAllStringSubmatch(string(read(t, root, name)), -1) {
			found[m[1]] = true
			if !r.builds(m[1]) && m[1] != chartName {
				t.Errorf("%s names the image oxidecomputer/%s, which no target of the Dockerfile has "+
					"as its title", name, m[1])
			}
		}
	}
	documented := string(read(t, root, "docs/images.md"))
	for _, target := range targets {
		row := fmt.Sprintf("| `%s` | `oxidecomputer/%s` |", target.stage, target.image)
		if !strings.Contains(documented, row) {
			t.Errorf("docs/images.md has no row %q", row)
		}
		delete(found, target.image)
	}
	delete(found, chartName)
	if len(found) > 0 {
		t.Errorf("the release makes no images for the names %v", found)
	}
}

func listing(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	for _, entry := range given(os.ReadDir(dir))(t) {
		names = append(names, entry.Name())
	}
	return names
}

func read(t *testing.T, dir, name string) []byte {
	t.Helper()
	return given(os.ReadFile(filepath.Join(dir, name)))(t)
}

func output(t *testing.T, dir, name string, args ...string) string {
	t.Helper()
	cmd := exec.CommandContext(context.WithoutCancel(t.Context()), name, args...)
	cmd.Dir = dir
	var complaints bytes.Buffer
	cmd.Stderr = &complaints
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%s: %v\n%s", cmd, err, complaints.String())
	}
	return string(out)
}
