package main

import (
	"archive/tar"
	"bytes"
	"context"
	"debug/buildinfo"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// target is a stage of the Dockerfile, and the name of the image that it builds.
type target struct{ stage, image string }

var (
	stageLine = regexp.MustCompile(`^FROM \S+ AS (\S+)$`)
	titleLine = regexp.MustCompile(`org\.opencontainers\.image\.title="([^"]+)"`)
)

// targetsOf returns the stages of a Dockerfile that have a title. The title is the image's name.
func targetsOf(dockerfile string) ([]target, error) {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return nil, err
	}
	var targets []target
	stage := ""
	for line := range strings.SplitSeq(string(text), "\n") {
		if m := stageLine.FindStringSubmatch(line); m != nil {
			stage = m[1]
		}
		if m := titleLine.FindStringSubmatch(line); m != nil {
			targets = append(targets, target{stage, m[1]})
		}
	}
	if len(targets) == 0 {
		return nil, fmt.Errorf("%s has no stage with the label org.opencontainers.image.title",
			dockerfile)
	}
	return targets, nil
}

func (r *release) builds(image string) bool {
	return slices.ContainsFunc(r.targets, func(t target) bool { return t.image == image })
}

// images builds each image for all architectures, and writes it as a tar of an OCI layout. It uses
// buildah, which needs no daemon.
func (r *release) images(ctx context.Context) {
	if _, err := exec.LookPath("buildah"); err != nil {
		need(fmt.Errorf("images are built with buildah, which is not on this machine: install it "+
			"(apt-get install buildah), or leave the images out (make release IMAGES=): %w", err))
	}
	base := r.importBase(ctx)
	r.contextDir()
	layouts := filepath.Join(r.stage, "layouts")
	need(os.Mkdir(layouts, 0o755))
	for _, t := range r.targets {
		dir := filepath.Join(layouts, t.image)
		for _, arch := range r.Arch {
			args := []string{"build", "--isolation", "chroot", "--format", "oci", "--quiet",
				"--disable-compression=false", "--platform", "linux/" + arch, "--timestamp", r.seconds(),
				"--target", t.stage, "--tag", "oci:" + dir + ":" + arch,
				"--build-arg", "VERSION=" + r.Version, "--build-arg", "REVISION=" + r.revision}
			if base != "" {
				args = append(args, "--build-arg", "BASE="+base)
			}
			r.buildah(ctx, append(args, filepath.Join(r.stage, "context"))...)
		}
		if err := r.joinArchitectures(t.image, dir); err != nil {
			need(fmt.Errorf("image %s: %w", t.image, err))
		}
	}
}

func (r *release) seconds() string { return strconv.FormatInt(r.date.Unix(), 10) }

func (r *release) buildah(ctx context.Context, args ...string) (output string) {
	store := []string{"--root", filepath.Join(r.stage, "store"),
		"--runroot", filepath.Join(r.stage, "run"), "--storage-driver", "vfs"}
	return got(r.output(ctx, "buildah", append(store, args...)...))
}

// importBase makes an image of the root file system r.Base. If r.Base is "", it returns "".
func (r *release) importBase(ctx context.Context) (name string) {
	if r.Base == "" {
		return ""
	}
	name = "localhost/base"
	container := strings.TrimSpace(r.buildah(ctx, "from", "--arch", r.Arch[0], "scratch"))
	r.buildah(ctx, "add", "--quiet", container, r.Base, "/")
	r.buildah(ctx, "commit", "--quiet", "--rm", "--timestamp", r.seconds(), container, name)
	return name
}

// contextDir adds the Dockerfile and tools/node-root to the context directory with the binaries.
func (r *release) contextDir() {
	for _, name := range []string{"Dockerfile", "tools/node-root"} {
		content := got(os.ReadFile(filepath.Join(r.Root, name)))
		to := filepath.Join(r.stage, "context", name)
		need(os.MkdirAll(filepath.Dir(to), 0o755))
		need(os.WriteFile(to, content, 0o755))
	}
}

// joinArchitectures joins the images in an OCI layout, each tagged with its architecture, into one
// image, and writes it. It also writes a bill of materials for each architecture.
func (r *release) joinArchitectures(name, dir string) (err error) {
	defer catch(&err)
	built := got(layout.ImageIndexFromPath(dir))
	joined := v1.ImageIndex(empty.Index)
	for _, m := range got(built.IndexManifest()).Manifests {
		arch := m.Annotations[ocispec.AnnotationRefName]
		image := got(built.Image(m.Digest))
		need(r.imageBill(image, name, arch, m.Digest))
		joined = mutate.AppendManifests(joined, mutate.IndexAddendum{Add: image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
		r.noteDigest(name, r.Version, "linux/"+arch, m.Digest)
	}
	l := got(layout.Write(dir+"-joined", empty.Index))
	need(l.WriteIndex(joined))
	r.writeLayout(l, name, r.Version, *got(partial.Descriptor(joined)))
	return nil
}

// digests is a file with a line for each image and for the chart: name, tag, platform and digest.
const digests = "DIGESTS"

// containerdName is the annotation from which containerd and Docker take the name of an image that
// they import from a file. The manifests in deploy use the same name.
const containerdName = "io.containerd.image.name"

// writeLayout adds an entry to an OCI layout, writes a tar of it, and records the entry's digest.
func (r *release) writeLayout(l layout.Path, name, tag string, root v1.Descriptor) {
	root.Annotations = map[string]string{ocispec.AnnotationRefName: tag,
		containerdName: "docker.io/oxidecomputer/" + name + ":" + tag}
	need(l.AppendDescriptor(root))
	files := filesIn(os.DirFS(string(l)))
	out := got(os.Create(filepath.Join(r.made, name+".oci.tar")))
	defer out.Close()
	pack(out, files, r.date)
	r.noteDigest(name, tag, "all", root.Digest)
}

func (r *release) noteDigest(name, tag, platform string, digest v1.Hash) {
	fmt.Fprintf(&r.pushed, "oxidecomputer/%s %s %s %s\n", name, tag, platform, digest)
}

// license is the license of the project. Bills of materials do not state the licenses of other
// software; images contain the copyright files.
const license, unknown = "MPL-2.0", "NOASSERTION"

// part is a Go module or a Debian package in a binary or image.
type part struct{ name, version, url string } // url is a package URL

func modules(info *buildinfo.BuildInfo) []part {
	golang := strings.TrimPrefix(info.GoVersion, "go")
	parts := []part{{"stdlib", info.GoVersion, "pkg:golang/stdlib@" + golang}}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		parts = append(parts, part{m.Path, m.Version, "pkg:golang/" + m.Path + "@" + m.Version})
	}
	return parts
}

// unfit matches characters that are not allowed in an SPDX identifier.
var unfit = regexp.MustCompile(`[^a-zA-Z0-9.-]+`)

// writeBill writes a bill of materials in the format SPDX. The declared license may be unknown.
func (r *release) writeBill(name, sha256, purpose, declared string, parts []part) {
	const subject = "subject"
	doc := v2_3.Document{SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense,
		SPDXIdentifier: "DOCUMENT", DocumentName: name,
		DocumentNamespace: project + "/releases/" + r.Version + "/" + name + "-" + sha256,
		CreationInfo: &v2_3.CreationInfo{Created: r.date.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "oxide-csi-plugin-tools-release"}}},
		Packages: []*v2_3.Package{{PackageName: name, PackageVersion: r.Version,
			PackageSPDXIdentifier: subject, PackageDownloadLocation: project + "/releases/tag/" + r.Version,
			PackageLicenseDeclared: declared, PackageLicenseConcluded: unknown,
			PackageCopyrightText: unknown, PrimaryPackagePurpose: purpose,
			PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: sha256}}}},
		Relationships: []*v2_3.Relationship{{RefA: common.MakeDocElementID("", "DOCUMENT"),
			RefB: common.MakeDocElementID("", subject), Relationship: common.TypeRelationshipDescribe}},
	}
	slices.SortFunc(parts, func(a, b part) int { return strings.Compare(a.url, b.url) })
	for _, p := range slices.Compact(parts) {
		id := unfit.ReplaceAllString(strings.TrimPrefix(p.url, "pkg:"), "-")
		doc.Packages = append(doc.Packages, &v2_3.Package{PackageName: p.name, PackageVersion: p.version,
			PackageSPDXIdentifier: common.ElementID(id), PackageDownloadLocation: unknown,
			PackageLicenseDeclared: unknown, PackageLicenseConcluded: unknown,
			PackageCopyrightText: unknown, PackageExternalReferences: []*v2_3.PackageExternalReference{
				{Category: common.CategoryPackageManager, RefType: common.TypePackageManagerPURL,
					Locator: p.url}}})
		doc.Relationships = append(doc.Relationships, &v2_3.Relationship{
			RefA: common.MakeDocElementID("", subject), RefB: common.MakeDocElementID("", id),
			Relationship: common.TypeRelationshipContains})
	}
	var text bytes.Buffer
	need(json.Write(doc, &text, json.Indent(" "), json.EscapeHTML(false)))
	r.write(name+".spdx.json", text.Bytes())
}

// imageBill writes an image's bill of materials: Debian packages, and modules of Go programs.
func (r *release) imageBill(image v1.Image, name, arch string, digest v1.Hash) error {
	var parts []part
	programs := 0
	root := mutate.Extract(image)
	defer root.Close()
	eachFile(root, func(header *tar.Header, content []byte) {
		switch name := path.Clean(header.Name); {
		case header.Typeflag != tar.TypeReg:
		case name == "var/lib/dpkg/status", path.Dir(name) == "var/lib/dpkg/status.d":
			parts = append(parts, debian(string(content))...)
		case bytes.HasPrefix(content, []byte("\x7fELF")):
			if info, err := buildinfo.Read(bytes.NewReader(content)); err == nil {
				main := info.Main.Path
				parts = append(append(parts, modules(info)...),
					part{main, r.Version, "pkg:golang/" + main + "@" + r.Version})
				programs++
			}
		}
	})
	if programs == 0 {
		return errors.New("there is no Go program in it")
	}
	r.writeBill(name+"-image-linux-"+arch, digest.Hex, "CONTAINER", unknown, parts)
	return nil
}

// debian returns the installed packages in a file in the format of /var/lib/dpkg/status.
func debian(status string) []part {
	var parts []part
	for paragraph := range strings.SplitSeq(status, "\n\n") {
		fields := map[string]string{}
		for line := range strings.SplitSeq(paragraph, "\n") {
			if key, value, ok := strings.Cut(line, ": "); ok && !strings.HasPrefix(key, " ") {
				fields[key] = value
			}
		}
		if name, version := fields["Package"], fields["Version"]; name != "" && version != "" &&
			strings.HasSuffix(fields["Status"], " installed") {
			url := strings.ReplaceAll(name+"@"+version, "+", "%2B")
			parts = append(parts, part{name, version,
				"pkg:deb/debian/" + url + "?arch=" + fields["Architecture"]})
		}
	}
	return parts
}
