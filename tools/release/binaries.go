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
func (r *release) binaries(ctx context.Context) error {
	bin := filepath.Join(r.stage, "context", "bin")
	_, err := r.output(ctx, "make", "binaries", "RELEASE="+r.Version, "BIN="+bin,
		"ARCH="+strings.Join(r.Arch, " "))
	if err != nil {
		return err
	}
	for _, arch := range r.Arch {
		dir := filepath.Join(bin, "linux-"+arch)
		programs, err := os.ReadDir(dir)
		if err != nil {
			return err
		}
		for _, program := range programs {
			content, err := os.ReadFile(filepath.Join(dir, program.Name()))
			if err != nil {
				return err
			}
			name := program.Name() + "-linux-" + arch
			if err := os.WriteFile(filepath.Join(r.made, name), content, 0o755); err != nil {
				return err
			}
			info, err := buildinfo.Read(bytes.NewReader(content))
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			b := r.bill(name, content)
			b.parts = b.modules(info)
			if err := r.writeBill(b); err != nil {
				return err
			}
		}
	}
	return nil
}

// sums is the file of the checksums. It marks a folder as a release.
const sums = "SHA256SUMS"

// checksums writes the list of the images and the chart, and the checksums of all files in the form
// of sha256sum.
func (r *release) checksums(context.Context) error {
	if err := r.write(digests, []byte(r.pushed.String())); err != nil {
		return err
	}
	files, err := os.ReadDir(r.made)
	if err != nil {
		return err
	}
	var list bytes.Buffer
	for _, file := range files {
		content, err := os.ReadFile(filepath.Join(r.made, file.Name()))
		if err != nil {
			return err
		}
		fmt.Fprintf(&list, "%x  %s\n", sha256.Sum256(content), file.Name())
	}
	return r.write(sums, list.Bytes())
}

// file is an entry of an archive.
type file struct {
	name    string
	content []byte
}

// pack writes a tar whose bytes depend only on names, contents and the date.
func pack(w io.Writer, files []file, date time.Time) error {
	slices.SortFunc(files, func(a, b file) int { return strings.Compare(a.name, b.name) })
	t := tar.NewWriter(w)
	for _, f := range files {
		err := t.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: f.name, Mode: 0o644,
			Size: int64(len(f.content)), ModTime: date, Format: tar.FormatPAX})
		if err != nil {
			return err
		}
		if _, err := t.Write(f.content); err != nil {
			return err
		}
	}
	return t.Close()
}

// repack packs the files of a .tgz again, without their times and owners.
func repack(packed io.Reader, date time.Time) ([]byte, error) {
	unzipped, err := gzip.NewReader(packed)
	if err != nil {
		return nil, err
	}
	var files []file
	err = eachFile(unzipped, func(header *tar.Header, content []byte) {
		files = append(files, file{header.Name, content})
	})
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	zipped := gzip.NewWriter(&out)
	if err := errors.Join(pack(zipped, files, date), zipped.Close()); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}

// eachFile visits the entries of a tar.
func eachFile(archive io.Reader, visit func(header *tar.Header, content []byte)) error {
	for t := tar.NewReader(archive); ; {
		header, err := t.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		content, err := io.ReadAll(t)
		if err != nil {
			return err
		}
		visit(header, content)
	}
}

// filesIn returns all files of a tree.
func filesIn(tree fs.FS) ([]file, error) {
	var files []file
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		files = append(files, file{path, content})
		return err
	})
	return files, err
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
func (r *release) chart(ctx context.Context) error {
	version := r.Version[1:] // SemVer has no v
	_, err := r.output(ctx, "go", "tool", "-modfile=tools/go.mod", "helm", "package", "deploy/chart",
		"--version", version, "--app-version", r.Version, "--destination", r.stage)
	if err != nil {
		return err
	}
	name := chartName + "-" + version
	packed, err := os.Open(filepath.Join(r.stage, name+".tgz"))
	if err != nil {
		return err
	}
	defer packed.Close()
	archive, err := repack(packed, r.date)
	if err != nil {
		return err
	}
	if err := r.write(name+".tgz", archive); err != nil {
		return err
	}
	text, err := os.ReadFile(filepath.Join(r.Root, "deploy", "chart", "Chart.yaml"))
	if err != nil {
		return err
	}
	return r.chartLayout(text, archive, version)
}

// chartLayout writes the chart as `helm push` sends it to a registry, but without the time of the
// push.
func (r *release) chartLayout(chartYAML, archive []byte, version string) error {
	var chart map[string]any
	if err := yaml.Unmarshal(chartYAML, &chart); err != nil {
		return err
	}
	chart["version"], chart["appVersion"] = version, r.Version
	config, err := json.Marshal(chart)
	if err != nil {
		return err
	}
	l, err := layout.Write(filepath.Join(r.stage, chartName), empty.Index)
	if err != nil {
		return err
	}
	add := func(mediaType types.MediaType, content []byte) v1.Descriptor {
		blob, addErr := partial.Descriptor(static.NewLayer(content, mediaType))
		if addErr == nil {
			addErr = l.WriteBlob(blob.Digest, io.NopCloser(bytes.NewReader(content)))
		}
		err = errors.Join(err, addErr)
		return *blob
	}
	manifest, jsonErr := json.Marshal(v1.Manifest{
		SchemaVersion: 2,
		MediaType:     types.OCIManifestSchema1,
		Config:        add("application/vnd.cncf.helm.config.v1+json", config),
		Layers: []v1.Descriptor{
			add("application/vnd.cncf.helm.chart.content.v1.tar+gzip", archive)},
		Annotations: map[string]string{
			ocispec.AnnotationTitle:    chartName,
			ocispec.AnnotationVersion:  version,
			ocispec.AnnotationLicenses: license,
			ocispec.AnnotationSource:   project,
			ocispec.AnnotationRevision: r.revision,
		},
	})
	root := add(types.OCIManifestSchema1, manifest)
	if err := errors.Join(err, jsonErr); err != nil {
		return err
	}
	return r.writeLayout(l, chartName, version, root)
}

// manifests renders the kustomizations and copies Nomad's jobs, with the version's images.
func (r *release) manifests(context.Context) error {
	deploy := filepath.Join(r.Root, "deploy")
	for dir, name := range kustomizations {
		built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).
			Run(filesys.MakeFsOnDisk(), filepath.Join(deploy, "kustomize", dir))
		if err != nil {
			return fmt.Errorf("kustomize build deploy/kustomize/%s: %w", dir, err)
		}
		text, err := built.AsYaml()
		if err != nil {
			return err
		}
		head := fmt.Sprintf("# %s, built from deploy/kustomize/%s\n", r.Version, dir)
		if err := r.writePinned(name, append([]byte(head), text...)); err != nil {
			return err
		}
	}
	for from, name := range jobs {
		text, err := os.ReadFile(filepath.Join(deploy, "nomad", from))
		if err != nil {
			return err
		}
		if err := r.writePinned(name, text); err != nil {
			return err
		}
	}
	return nil
}

// ours matches the name of an image of the project, and its tag.
var ours = regexp.MustCompile(`\boxidecomputer/([a-z0-9-]+):([\w.-]+)`)

// writePinned writes a text in which our images have the version as their tag.
func (r *release) writePinned(name string, text []byte) error {
	for _, m := range ours.FindAllSubmatch(text, -1) {
		if !r.builds(string(m[1])) {
			return fmt.Errorf("%s names the image %s, which no target of the Dockerfile has as its "+
				"title", name, m[0])
		}
	}
	return r.write(name, bytes.TrimLeft(ours.ReplaceAll(text,
		[]byte("oxidecomputer/${1}:"+r.Version)), "\n"))
}
