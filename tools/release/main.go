// Release writes all files of a release into one folder:
//
//	go run -C tools ./release -version v1.2.3 -out ../dist
//	go run -C tools ./release -version v1.2.3 -out ../dist -arch amd64 -images=false
//
// The files depend only on the commit and the version of Go, not on the time or the machine.
// docs/releasing.md lists them.
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
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/mod/semver"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	r := release{Log: os.Stderr}
	flag.StringVar(&r.Version, "version", "", "the version, such as v1.2.3")
	flag.StringVar(&r.Root, "root", "..", "the project's `directory`")
	flag.StringVar(&r.Out, "out", "../dist", "the `folder` to make; a release in it is replaced")
	flag.StringVar(&r.Base, "base", "", "a `tar` of Debian's root file system, as the base of images "+
		"where no registry is reached; for one architecture")
	flag.BoolVar(&r.Images, "images", true, "build the images, too")
	flag.BoolVar(&r.Dirty, "dirty", false, "build the tree with uncommitted changes, for a trial")
	arch := flag.String("arch", "amd64 arm64", "the architectures")
	flag.Parse()
	r.Arch = strings.Fields(*arch)
	err := r.run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "release:", err)
		os.Exit(1)
	}
}

type release struct {
	Version   string // such as "v1.2.3"
	Root, Out string
	Arch      []string
	Base      string
	Images    bool
	Dirty     bool // allow a tree that differs from its commit
	Log       io.Writer

	revision string    // the commit's hash
	date     time.Time // the commit's date
	stage    string    // a directory for temporary files
	made     string    // the directory that becomes Out
	targets  []target
	pushed   strings.Builder // the lines of DIGESTS
}

// run writes the release into a temporary folder, and then replaces the folder r.Out by it.
func (r *release) run(ctx context.Context) (err error) {
	defer catch(&err)
	need(r.prepare(ctx))
	r.stage = got(os.MkdirTemp("", "oxide-release-"))
	defer func() { err = errors.Join(err, os.RemoveAll(r.stage)) }()
	r.made = filepath.Join(r.stage, "made")
	need(os.Mkdir(r.made, 0o755))
	r.notes()
	r.binaries(ctx)
	r.chart(ctx)
	r.manifests()
	if r.Images {
		r.images(ctx)
	}
	r.checksums()
	need(os.RemoveAll(r.Out))
	// A rename would fail if r.Out is on another file system.
	need(os.CopyFS(r.Out, os.DirFS(r.made)))
	got(fmt.Fprintf(r.Log, "release: %s is in %s\n", r.Version, r.Out))
	return nil
}

// failed is the value of a panic that catch() turns into an error.
type failed struct{ error }

// need() and got() panic if err is not nil. Otherwise got() returns the result.
func need(err error) {
	if err != nil {
		panic(failed{err})
	}
}

func got[T any](result T, err error) T {
	need(err)
	return result
}

// A deferred catch() joins the error of a panic of need() or got() to err.
func catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case failed:
		*err = errors.Join(*err, r.error)
	default:
		panic(r)
	}
}

func (r *release) prepare(ctx context.Context) (err error) {
	defer catch(&err)
	r.Root, r.Out = got(filepath.Abs(r.Root)), got(filepath.Abs(r.Out))
	switch {
	case !semver.IsValid(r.Version) || semver.Canonical(r.Version) != r.Version:
		return fmt.Errorf("-version is %q: expected three numbers, such as v1.2.3 or v1.2.3-rc.1",
			r.Version)
	case len(r.Arch) == 0:
		return errors.New("-arch is empty: expected amd64, arm64 or both")
	case r.Base != "" && len(r.Arch) != 1:
		return fmt.Errorf("-base is of one architecture, and -arch has %d: name one", len(r.Arch))
	}
	for _, arch := range r.Arch {
		if arch != "amd64" && arch != "arm64" {
			return fmt.Errorf("-arch has %q: expected amd64, arm64 or both", arch)
		}
	}
	old, unread := os.ReadDir(r.Out)
	if !errors.Is(unread, os.ErrNotExist) {
		need(unread)
	}
	if len(old) > 0 && !slices.ContainsFunc(old,
		func(e os.DirEntry) bool { return e.Name() == sums }) {
		return fmt.Errorf("%s has files, but no %s, so it is not a release to replace: "+
			"name another folder, or empty it", r.Out, sums)
	}
	need(r.commit(ctx))
	r.targets = got(targetsOf(filepath.Join(r.Root, "Dockerfile")))
	return nil
}

// commit reads the commit's hash, and the files' date: SOURCE_DATE_EPOCH or the commit's date.
func (r *release) commit(ctx context.Context) error {
	revision, err := r.output(ctx, "git", "describe", "--always", "--dirty", "--abbrev=40", "--match=")
	if err != nil {
		return fmt.Errorf("a release needs a commit: %w", err)
	}
	r.revision = strings.TrimSpace(revision)
	changes := got(r.output(ctx, "git", "status", "--porcelain"))
	if list := strings.Split(strings.TrimSpace(changes), "\n"); changes != "" && !r.Dirty {
		return fmt.Errorf("a release needs a commit, and the tree differs from it in %d files, "+
			"such as %q: commit or remove them, or make a clone", len(list), list[0])
	}
	seconds := os.Getenv("SOURCE_DATE_EPOCH")
	if seconds == "" {
		seconds = got(r.output(ctx, "git", "log", "-1", "--format=%ct"))
	}
	date, err := strconv.ParseInt(strings.TrimSpace(seconds), 10, 64)
	if err != nil {
		return fmt.Errorf("SOURCE_DATE_EPOCH is %q: expected seconds since 1970", seconds)
	}
	r.date = time.Unix(date, 0).UTC()
	return nil
}

func (r *release) output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = r.Root
	var out, complaints bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaints
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, complaints.String())
	}
	return out.String(), nil
}

func (r *release) write(name string, content []byte) {
	need(os.WriteFile(filepath.Join(r.made, name), content, 0o644))
}

const project = "https://github.com/oxidecomputer/oxide-csi-plugin"

func (r *release) notes() {
	changelog := got(os.ReadFile(filepath.Join(r.Root, "CHANGELOG.md")))
	r.write("RELEASE_NOTES.md", []byte(got(section(string(changelog), r.Version))))
}

// link matches a relative link in the changelog. In release notes, which are shown on another page,
// it has to be absolute.
var link = regexp.MustCompile(`\]\(([^):#]+[^):]*)\)`)

// section returns the text of a version's section in the changelog. For a prerelease such as
// v1.2.3-rc.1 that has no section, it returns the section of unreleased changes.
func section(changelog, version string) (string, error) {
	wanted := []string{version}
	if semver.Prerelease(version) != "" {
		wanted = append(wanted, "Unreleased")
	}
	for _, heading := range wanted {
		for part := range strings.SplitSeq("\n"+changelog, "\n## ") {
			title, text, _ := strings.Cut(part, "\n")
			name, _, _ := strings.Cut(title, " ") // a date may follow
			text = strings.TrimSpace(text)
			if name != heading || text == "" {
				continue
			}
			return link.ReplaceAllString(text, "]("+project+"/blob/"+version+"/$1)") + "\n", nil
		}
	}
	return "", fmt.Errorf("CHANGELOG.md has nothing for %s: expected a section headed \"## %s\" "+
		"with text; rename the section Unreleased", version, version)
}

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
			r.writeBill(name, fmt.Sprintf("%x", sha256.Sum256(content)), "APPLICATION", license,
				modules(info))
		}
	}
}

// sums is the file of checksums. prepare refuses to replace a folder without this file.
const sums = "SHA256SUMS"

// checksums writes the digests of images and chart, and the SHA-256 of all files for sha256sum.
func (r *release) checksums() {
	r.write(digests, []byte(r.pushed.String()))
	var list bytes.Buffer
	for _, file := range got(os.ReadDir(r.made)) {
		content := got(os.ReadFile(filepath.Join(r.made, file.Name())))
		fmt.Fprintf(&list, "%x  %s\n", sha256.Sum256(content), file.Name())
	}
	r.write(sums, list.Bytes())
}

type file struct {
	name    string
	content []byte
}

// pack writes a tar of the files, sorted, each with the given date, mode 0644 and no owner.
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

// repack returns a .tgz with the files of another .tgz, but with the given date and no owners.
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

func filesIn(tree fs.FS) (files []file) {
	need(fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			files = append(files, file{path, got(fs.ReadFile(tree, path))})
		}
		return err
	}))
	return files
}

const chartName = "oxide-csi-driver"

// kustomizations maps a directory of deploy/kustomize to the release's file with its manifests.
var kustomizations = map[string]string{
	"base":                chartName + ".yaml",
	"snapshots":           chartName + "-snapshots.yaml",
	"snapshot-controller": "snapshot-controller.yaml",
	"simulator":           "oxide-simulator.yaml",
}

// jobs maps a file of deploy/nomad to its name in the release.
var jobs = map[string]string{
	"controller.nomad.hcl": chartName + "-controller.nomad.hcl",
	"node.nomad.hcl":       chartName + "-node.nomad.hcl",
}

func (r *release) chart(ctx context.Context) {
	version := r.Version[1:] // Helm needs SemVer, which has no v
	got(r.output(ctx, "go", "tool", "-modfile=tools/go.mod", "helm", "package", "deploy/chart",
		"--version", version, "--app-version", r.Version, "--destination", r.stage))
	name := chartName + "-" + version + ".tgz"
	packed := got(os.Open(filepath.Join(r.stage, name)))
	defer packed.Close()
	archive := repack(packed, r.date)
	r.write(name, archive)
	r.chartLayout(archive, version)
}

// chartLayout writes the OCI layout that `helm push` would make, but without the time of the push.
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

// ours matches the name and the tag of one of the project's images.
var ours = regexp.MustCompile(`\boxidecomputer/([a-z0-9-]+):([\w.-]+)`)

// writePinned writes a text, with the release's version as the tag of the project's images.
func (r *release) writePinned(name string, text []byte) {
	for _, m := range ours.FindAllSubmatch(text, -1) {
		if !r.builds(string(m[1])) {
			need(fmt.Errorf("%s names the image %s, which no target of the Dockerfile has as its "+
				"title", name, m[0]))
		}
	}
	r.write(name, bytes.TrimLeft(ours.ReplaceAll(text, []byte("oxidecomputer/${1}:"+r.Version)), "\n"))
}
