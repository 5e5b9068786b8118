package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// binaries compiles the programs as `make binaries` does, and writes a bill of materials for each.
func (r *release) binaries(ctx context.Context) {
	bin := filepath.Join(r.stage, "context", "bin")
	got(r.output(ctx, "make", "binaries", "RELEASE="+r.Version, "BIN="+bin,
		"ARCH="+strings.Join(r.Arch, " ")))
	for _, arch := range r.Arch {
		dir := filepath.Join(bin, "linux-"+arch)
		for _, program := range got(os.ReadDir(dir)) {
			content := got(os.ReadFile(filepath.Join(dir, program.Name())))
			name := program.Name() + "-linux-" + arch
			need(os.WriteFile(filepath.Join(r.made, name), content, 0o755))
			info, err := buildinfo.Read(bytes.NewReader(content))
			if err != nil {
				need(fmt.Errorf("%s: %w", name, err))
			}
			b := r.bill(name, content)
			b.parts = b.modules(info)
			r.writeBill(b)
		}
	}
}

// sums is the file of the checksums. It marks a folder as a release.
const sums = "SHA256SUMS"

// checksums writes the list of the images and the chart, and the checksums of all files in the form
// of sha256sum.
func (r *release) checksums() {
	r.write(digests, []byte(r.pushed.String()))
	var list bytes.Buffer
	for _, file := range got(os.ReadDir(r.made)) {
		content := got(os.ReadFile(filepath.Join(r.made, file.Name())))
		fmt.Fprintf(&list, "%x  %s\n", sha256.Sum256(content), file.Name())
	}
	r.write(sums, list.Bytes())
}

// file is an entry of an archive.
type file struct {
	name    string
	content []byte
}

// pack writes a tar whose bytes depend only on names, contents and the date.
func pack(w io.Writer, files []file, date time.Time) {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	t := tar.NewWriter(w)
	for _, f := range files {
		need(t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o644,
			Size: int64(len(f.content)), ModTime: date, Format: tar.FormatPAX}))
		got(t.Write(f.content))
	}
	need(t.Close())
}

// repack packs the files of a .tgz again, without their times and owners.
func repack(packed io.Reader, date time.Time) []byte {
	var files []file
	eachFile(got(gzip.NewReader(packed)), func(header *tar.Header, content []byte) {
		files = append(files, file{header.Name, content})
	})
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	pack(zipped, files, date)
	need(zipped.Close())
	return out.Bytes()
}

// eachFile visits the entries of a tar.
func eachFile(archive io.Reader, visit func(header *tar.Header, content []byte)) {
	for t := tar.NewReader(archive); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return
		}
		need(err)
		visit(header, got(io.ReadAll(t)))
	}
}

// filesIn returns all files of a tree.
func filesIn(tree fs.FS) (files []file) {
	need(fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, file{path, got(fs.ReadFile(tree, path))})
		}
		return err
	}))
	return files
}

// chartName is the name in Chart.yaml.
const chartName = "oxide-csi-driver"

// kustomizations has the directories that are rendered, and the file that each becomes.
var kustomizations = map[string]string{
	"base":                chartName + ".yaml",
	"snapshots":           chartName + "-snapshots.yaml",
	"snapshot-controller": "snapshot-controller.yaml",
	"simulator":           "oxide-simulator.yaml",
}

// jobs contains Nomad's jobs, by the names of their files in the release.
var jobs = map[string]string{
	"controller.nomad.hcl": chartName + "-controller.nomad.hcl",
	"node.nomad.hcl":       chartName + "-node.nomad.hcl",
}

// chart packages the chart as a file, and in the form in which registries store it.
func (r *release) chart(ctx context.Context) {
	version := r.Version[1:] // SemVer has no v
	got(r.output(ctx, "go", "tool", "-modfile=tools/go.mod", "helm", "package", "deploy/chart",
		"--version", version, "--app-version", r.Version, "--destination", r.stage))
	name := chartName + "-" + version + ".tgz"
	packed := got(os.Open(filepath.Join(r.stage, name)))
	defer packed.Close()
	archive := repack(packed, r.date)
	r.write(name, archive)
	r.chartLayout(archive, version)
}

// chartLayout writes the chart as `helm push` sends it to a registry, but without the time of the
// push.
func (r *release) chartLayout(archive []byte, version string) {
	var chart map[string]any
	need(yaml.Unmarshal(got(os.ReadFile(filepath.Join(r.Root, "deploy", "chart", "Chart.yaml"))),
		&chart))
	chart["version"], chart["appVersion"] = version, r.Version
	l := got(layout.Write(filepath.Join(r.stage, chartName), empty.Index))
	add := func(mediaType types.MediaType, content []byte) v1.Descriptor {
		blob := got(partial.Descriptor(static.NewLayer(content, mediaType)))
		need(l.WriteBlob(blob.Digest, io.NopCloser(bytes.NewReader(content))))
		return *blob
	}
	manifest := v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		Config:        add("application/vnd.cncf.helm.config.v1+json", got(json.Marshal(chart))),
		Layers: []v1.Descriptor{
			add("application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)},
		Annotations: map[string]string{
			ocispec.AnnotationTitle:    chartName,
			ocispec.AnnotationVersion:  version,
			ocispec.AnnotationLicenses: license,
			ocispec.AnnotationSource:   project,
			ocispec.AnnotationRevision: r.revision,
		},
	}
	r.writeLayout(l, chartName, version, add(manifest.MediaType, got(json.Marshal(manifest))))
}

// manifests renders the kustomizations and copies Nomad's jobs, with the version's images.
func (r *release) manifests() {
	deploy := filepath.Join(r.Root, "deploy")
	for dir, name := range kustomizations {
		built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).
			Run(filesys.MakeFsOnDisk(), filepath.Join(deploy, "kustomize", dir))
		if err != nil {
			need(fmt.Errorf("kustomize build deploy/kustomize/%s: %w", dir, err))
		}
		head := fmt.Sprintf("# %s, built from deploy/kustomize/%s\n", r.Version, dir)
		r.writePinned(name, append([]byte(head), got(built.AsYaml())...))
	}
	for from, name := range jobs {
		r.writePinned(name, got(os.ReadFile(filepath.Join(deploy, "nomad", from))))
	}
}

// ours matches the name of an image of the project, and its tag.
var ours = regexp.MustCompile(`\boxidecomputer/([a-z0-9-]+):([\w.-]+)`)

// writePinned writes a text in which our images have the version as their tag.
func (r *release) writePinned(name string, text []byte) {
	for _, m := range ours.FindAllSubmatch(text, -1) {
		if !r.builds(string(m[1])) {
			need(fmt.Errorf("%s names the image %s, which no target of the Dockerfile has as its "+
				"title", name, m[0]))
		}
	}
	r.write(name, bytes.TrimLeft(ours.ReplaceAll(text,
		[]byte("oxidecomputer/${1}:"+r.Version)), "\n"))
}
