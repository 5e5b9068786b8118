package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// layout is a directory in the form of an OCI image layout.
type layout struct{ dir string }

// newLayout creates the directory, or opens it if it exists.
func newLayout(dir string) (layout, error) {
	l := layout{dir}
	if err := os.MkdirAll(filepath.Dir(l.blob(digest.FromString(""))), 0o755); err != nil {
		return l, err
	}
	_, err := l.file(ocispec.ImageLayoutFile, ocispec.ImageLayout{Version: ocispec.ImageLayoutVersion})
	return l, err
}

func (l layout) blob(d digest.Digest) string {
	return filepath.Join(l.dir, ocispec.ImageBlobsDir, d.Algorithm().String(), d.Encoded())
}

func (l layout) file(name string, content any) ([]byte, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return nil, err
	}
	return text, os.WriteFile(filepath.Join(l.dir, name), text, 0o644)
}

func (l layout) add(mediaType string, content []byte) (ocispec.Descriptor, error) {
	d := digest.FromBytes(content)
	return ocispec.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(content))},
		os.WriteFile(l.blob(d), content, 0o644)
}

func (l layout) addJSON(mediaType string, content any) (ocispec.Descriptor, error) {
	text, err := json.Marshal(content)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	return l.add(mediaType, text)
}

// read parses a blob.
func (l layout) read(d ocispec.Descriptor, into any) error {
	text, err := os.ReadFile(l.blob(d.Digest))
	if err != nil {
		return err
	}
	return json.Unmarshal(text, into)
}

// manifests returns the manifests in the layout's index.
func (l layout) manifests() ([]ocispec.Descriptor, error) {
	text, err := os.ReadFile(filepath.Join(l.dir, ocispec.ImageIndexFile))
	if err != nil {
		return nil, err
	}
	var index ocispec.Index
	if err := json.Unmarshal(text, &index); err != nil {
		return nil, fmt.Errorf("%s: %w", l.dir, err)
	}
	return index.Manifests, nil
}

// index returns an OCI index of manifests.
func index(manifests ...ocispec.Descriptor) ocispec.Index {
	return ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2},
		MediaType: ocispec.MediaTypeImageIndex, Manifests: manifests}
}

// digests is the file that lists the images and the chart: a line each with name, tag, platform and
// digest.
const digests = "DIGESTS"

// containerdName is the annotation from which containerd and Docker take the name of an imported
// image.
const containerdName = "io.containerd.image.name"

// writeLayout writes an archive of a layout with one entry, and records its digest.
func (r *release) writeLayout(l layout, name, tag string, root ocispec.Descriptor) error {
	// containerd names an image that is imported by hand as the manifests name it.
	root.Annotations = map[string]string{ocispec.AnnotationRefName: tag,
		containerdName: "docker.io/oxidecomputer/" + name + ":" + tag}
	if _, err := l.file(ocispec.ImageIndexFile, index(root)); err != nil {
		return err
	}
	files, err := filesIn(os.DirFS(l.dir))
	if err != nil {
		return err
	}
	out, err := os.Create(filepath.Join(r.made, name+".oci.tar"))
	if err != nil {
		return err
	}
	defer out.Close()
	if err := pack(out, files, r.date); err != nil {
		return err
	}
	r.noteDigest(name, tag, "all", root.Digest)
	return nil
}

func (r *release) noteDigest(name, tag, platform string, d digest.Digest) {
	fmt.Fprintf(&r.pushed, "oxidecomputer/%s %s %s %s\n", name, tag, platform, d)
}
