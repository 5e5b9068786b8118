package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/spdx/tools-golang/json"
	"github.com/spdx/tools-golang/spdx/v2/common"
	"github.com/spdx/tools-golang/spdx/v2/v2_3"
)

// license is the project's license. The licenses of other parts are not determined here; an image
// contains their copyright files.
const license, unknown = "MPL-2.0", "NOASSERTION"

// part is a Go module or a Debian package.
type part struct{ name, version, url string } // url is a package URL

// bill is a bill of materials: it lists the contents of a binary or an image.
type bill struct {
	name, version, sha256, purpose, license string
	date                                    time.Time
	parts                                   []part
}

func (r *release) bill(name string, content []byte) *bill {
	sum := sha256.Sum256(content)
	return &bill{name: name, version: r.Version, sha256: hex.EncodeToString(sum[:]),
		purpose: "APPLICATION", license: license, date: r.date}
}

// modules returns the modules that are linked into a Go program, and the version of Go.
func (b *bill) modules(info *buildinfo.BuildInfo) []part {
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

// unfit matches characters that no SPDX identifier may contain.
var unfit = regexp.MustCompile(`[^a-zA-Z0-9.-]+`)

// writeBill writes a bill of materials as NAME.spdx.json.
func (r *release) writeBill(b *bill) error {
	const subject = "subject"
	doc := v2_3.Document{SPDXVersion: v2_3.Version, DataLicense: v2_3.DataLicense,
		SPDXIdentifier: "DOCUMENT", DocumentName: b.name,
		DocumentNamespace: project + "/releases/" + b.version + "/" + b.name + "-" + b.sha256,
		CreationInfo: &v2_3.CreationInfo{Created: b.date.Format(time.RFC3339),
			Creators: []common.Creator{{CreatorType: "Tool", Creator: "oxide-csi-plugin-tools-release"}}},
		Packages: []*v2_3.Package{{PackageName: b.name, PackageVersion: b.version,
			PackageSPDXIdentifier: subject, PackageDownloadLocation: project + "/releases/tag/" + b.version,
			PackageLicenseDeclared: b.license, PackageLicenseConcluded: unknown,
			PackageCopyrightText: unknown, PrimaryPackagePurpose: b.purpose,
			PackageChecksums: []common.Checksum{{Algorithm: common.SHA256, Value: b.sha256}}}},
		Relationships: []*v2_3.Relationship{{RefA: common.MakeDocElementID("", "DOCUMENT"),
			RefB: common.MakeDocElementID("", subject), Relationship: common.TypeRelationshipDescribe}},
	}
	slices.SortFunc(b.parts, func(a, b part) int { return strings.Compare(a.url, b.url) })
	for _, p := range slices.Compact(b.parts) {
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
	if err := json.Write(doc, &text, json.Indent(" "), json.EscapeHTML(false)); err != nil {
		return err
	}
	return r.write(b.name+".spdx.json", text.Bytes())
}

// imageBill writes the bill of an image: Debian's packages, and the modules of its Go programs.
func (r *release) imageBill(l layout, name, arch string, image ocispec.Descriptor) error {
	var manifest ocispec.Manifest
	if err := l.read(image, &manifest); err != nil {
		return err
	}
	b := &bill{name: name + "-image-linux-" + arch, version: r.Version, sha256: image.Digest.Encoded(),
		purpose: "CONTAINER", license: unknown, date: r.date}
	packages, programs := map[string][]part{}, map[string][]part{}
	for _, layer := range manifest.Layers {
		err := l.walk(layer, func(name string, content []byte) {
			delete(packages, name)
			delete(programs, name)
			switch dir, base := path.Split(name); {
			case strings.HasPrefix(base, ".wh."): // this layer removes the file
				delete(packages, dir+strings.TrimPrefix(base, ".wh."))
				delete(programs, dir+strings.TrimPrefix(base, ".wh."))
			case name == "var/lib/dpkg/status", dir == "var/lib/dpkg/status.d/":
				packages[name] = debian(string(content))
			case bytes.HasPrefix(content, []byte("\x7fELF")):
				if info, err := buildinfo.Read(bytes.NewReader(content)); err == nil {
					main := info.Main.Path
					programs[name] = append(b.modules(info), part{main, r.Version,
						"pkg:golang/" + main + "@" + r.Version})
				}
			}
		})
		if err != nil {
			return err
		}
	}
	for _, found := range []map[string][]part{packages, programs} {
		for _, parts := range found {
			b.parts = append(b.parts, parts...)
		}
	}
	if len(programs) == 0 {
		return errors.New("there is no Go program in it")
	}
	return r.writeBill(b)
}

// walk reads the files of a layer.
func (l layout) walk(layer ocispec.Descriptor, visit func(name string, content []byte)) error {
	f, err := os.Open(l.blob(layer.Digest))
	if err != nil {
		return err
	}
	defer f.Close()
	err = eachFile(f, func(header *tar.Header, content []byte) {
		if header.Typeflag == tar.TypeReg {
			visit(path.Clean(header.Name), content)
		}
	})
	if err != nil {
		return fmt.Errorf("layer %s (%s): %w", layer.Digest, layer.MediaType, err)
	}
	return nil
}

// debian parses dpkg's list of packages.
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
