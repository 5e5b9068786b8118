//go:build linux && images

package main

import (
	"archive/tar"
	"bytes"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spdx/tools-golang/json"
)

const imageArch = "amd64"

// TestImagesAreCompleteAndReproducible builds every image twice, on a base of Debian packages and
// without a registry. It needs root, buildah and mmdebstrap.
func TestImagesAreCompleteAndReproducible(t *testing.T) {
	whole(t, 6)
	root := projectDir(t)
	base := filepath.Join(t.TempDir(), "base.tar")
	output(t, root, "mmdebstrap", "--quiet", "--variant=minbase", "--architectures="+imageArch,
		"--include=e2fsprogs,xfsprogs,btrfs-progs,mount,util-linux,openssh-client",
		"--dpkgopt=path-exclude=/usr/share/man/*", "bookworm", base)
	var dirs []string
	for range 2 {
		out := filepath.Join(t.TempDir(), "dist")
		r := release{Version: testVersion, Root: root, Out: out, Arch: []string{imageArch},
			Base: base, Images: true, Dirty: true, Log: io.Discard}
		must(t, r.run(t.Context()))
		dirs = append(dirs, out)
	}
	sameFiles(t, dirs[0], dirs[1])
	checksumsAreRight(t, dirs[0])
	for _, want := range []struct{ image, program, user, packages string }{
		{"oxide-csi-plugin", "oxide-csi-plugin", "65532:65532", ""},
		{"oxide-k8s-instance-metadata", "oxide-instance-metadata", "65532:65532", ""},
		{"oxide-node-keeper", "oxide-node-keeper", "65532:65532", ""},
		{"oxide-csi-plugin-node", "oxide-csi-plugin", "", "btrfs-progs e2fsprogs util-linux xfsprogs"},
		{"oxide-simulator", "oxide-simulator", "", "mount util-linux"},
		{"oxide-conformance", "oxide-conformance", "", "btrfs-progs e2fsprogs openssh-client xfsprogs"},
	} {
		t.Run(want.image, func(t *testing.T) {
			imageIs(t, dirs[0], want.image, want.program, want.user, strings.Fields(want.packages))
		})
	}
}

func imageIs(t *testing.T, dir, image, program, user string, packages []string) {
	t.Helper()
	layout := unpack(t, dir, image)
	must(t, validate.Index(layout))
	entry := rootOf(t, layout, testVersion)
	index := given(layout.ImageIndex(entry.Digest))(t)
	manifests := given(index.IndexManifest())(t).Manifests
	if len(manifests) != 1 || manifests[0].Platform.Architecture != imageArch {
		t.Fatalf("it is for %+v, want %s", manifests, imageArch)
	}
	for _, line := range []string{
		"oxidecomputer/" + image + " " + testVersion + " all " + entry.Digest.String(),
		"oxidecomputer/" + image + " " + testVersion + " linux/" + imageArch + " " +
			manifests[0].Digest.String(),
	} {
		if !strings.Contains(string(read(t, dir, digests)), line+"\n") {
			t.Errorf("%s has no line %q", digests, line)
		}
	}
	built := given(index.Image(manifests[0].Digest))(t)
	config := given(built.ConfigFile())(t)
	labels := config.Config.Labels
	if labels[ocispec.AnnotationVersion] != testVersion ||
		len(labels[ocispec.AnnotationRevision]) < 40 ||
		labels[ocispec.AnnotationLicenses] != license || labels[ocispec.AnnotationSource] != project ||
		labels[ocispec.AnnotationTitle] != image || config.Config.User != user ||
		config.Architecture != imageArch || filepath.Base(config.Config.Entrypoint[0]) != program {
		t.Errorf("its configuration is %+v", config)
	}
	found, files := false, 0
	eachFile(mutate.Extract(built), func(header *tar.Header, content []byte) {
		files++
		if "/"+header.Name == config.Config.Entrypoint[0] {
			found = bytes.Equal(content, read(t, dir, program+"-linux-"+imageArch))
		}
	})
	if !found {
		t.Errorf("%s in it is not the binary of the release", config.Config.Entrypoint[0])
	}
	doc := given(json.Read(bytes.NewReader(
		read(t, dir, image+"-image-linux-"+imageArch+".spdx.json"))))(t)
	var listed []string
	for _, p := range doc.Packages {
		listed = append(listed, p.PackageName)
	}
	for _, name := range append(packages, "stdlib", "github.com/oxidecomputer/oxide-csi-plugin") {
		if !slices.Contains(listed, name) {
			t.Errorf("its bill has no %s: %q", name, listed)
		}
	}
	if len(packages) == 0 && (files != 1 || slices.Contains(listed, "libc6")) {
		t.Errorf("it has %d files, and the packages %q, want its binary only", files, listed)
	}
}
