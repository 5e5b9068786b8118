// Package images provides the images of the end-to-end suite's cluster. It builds the project's own
// images from this tree. All other images are pulled by kind and the nodes, except with Offline:
// then the package builds them without a registry, from the Go module proxy and Debian's packages:
//
//	Kubernetes, etcd      compiled from their modules (kubernetes/, etcd/)
//	CSI sidecars          compiled from their modules (sidecars/)
//	registrar, livenessprobe, pause   programs in e2e/standin: the proxy lacks their modules
//	busybox, PostgreSQL   Debian's packages (workloads/)
//	kind's node image     Debian's packages, kind's own files, and all of the above (node/)
//
// Offline builds use no other hosts, so they work behind an air gap if GOPROXY and the machine's
// apt sources name mirrors. The cache and the engine keep what was built, under names that contain
// the hash of the inputs. So a second run takes seconds, and a change of an input rebuilds only
// what depends on it.
package images

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// Kubernetes is the version of the offline cluster. The go.mod files below this directory pin it,
// and the version of etcd that its kubeadm requires.
const Kubernetes = "v1.35.4"

const etcd = "3.6.6-0"

// Tag is the tag of the driver's images, in the manifests and in the suite.
const Tag = "v0.1.0"

// Builder builds images with a Docker engine.
type Builder struct {
	Engine *engine.Engine
	// Root is the project's directory.
	Root string
	// Cache is the directory in which the suite keeps images and programs for its next run.
	Cache string
	// Offline makes the Builder build all images on this machine.
	Offline bool
	// Log gets a line for each step and its duration.
	Log io.Writer

	logging, installing sync.Mutex
}

func (b *Builder) say(format string, args ...any) {
	b.logging.Lock()
	defer b.logging.Unlock()
	fmt.Fprintf(b.Log, "images: "+format+"\n", args...)
}

func (b *Builder) step(what string, do func() error) error {
	began := time.Now()
	b.say("%s …", what)
	if err := do(); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	b.say("%s: %s", what, time.Since(began).Round(time.Second))
	return nil
}

func (b *Builder) has(ctx context.Context, image string) bool {
	_, err := b.Engine.Output(ctx, "image", "inspect", "--format", "{{.Id}}", image)
	return err == nil
}

const noNetwork = "--network=none"

func (b *Builder) build(ctx context.Context, image, dir string, args ...string) error {
	args = slices.Concat([]string{"build", "--quiet", "--tag", image}, args, []string{dir})
	if _, err := b.Engine.Output(ctx, args...); err != nil {
		return fmt.Errorf("build %s: %w", image, err)
	}
	return nil
}

// save returns the path of an archive with the images. The path contains the name and a hash of the
// images' IDs, so save writes an archive only if none exists. It removes older archives.
func (b *Builder) save(ctx context.Context, name string, images ...string) (string, error) {
	ids, err := b.Engine.Output(ctx, append([]string{"image", "inspect", "--format", "{{.Id}}"},
		images...)...)
	if err != nil {
		return "", err
	}
	return b.keep("archives", name, hash(ids, strings.Join(images, " ")), ".tar",
		func(partial string) error {
			_, err := b.Engine.Output(ctx, append([]string{"save", "--output", partial}, images...)...)
			return err
		})
}

func command(ctx context.Context, dir string, environment []string, program string,
	args ...string) (string, error) {
	c := exec.CommandContext(ctx, program, args...)
	interruptible(c)
	c.Dir = dir
	c.Env = append(os.Environ(), environment...)
	var complaints bytes.Buffer
	c.Stderr = &complaints
	out, err := c.Output()
	if err != nil {
		said := bytes.TrimSpace(append(complaints.Bytes(), out...))
		const enough = 3000
		said = said[max(0, len(said)-enough):]
		return "", fmt.Errorf("%s %s: %w: %s", program, strings.Join(args, " "), err, said)
	}
	return strings.TrimSpace(string(out)), nil
}

// interruptible makes the command interrupt its program when the command's context ends, and kill
// it only a minute later.
func interruptible(c *exec.Cmd) {
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = time.Minute
}

const architecture = runtime.GOARCH // Docker has the same names

func hash(inputs ...string) string {
	sum := sha256.New()
	for _, input := range inputs {
		// Hash the lengths, too: the inputs "ab", "c" must not have the hash of "a", "bc".
		fmt.Fprintf(sum, "%d:%s", len(input), input)
	}
	return hex.EncodeToString(sum.Sum(nil))[:12]
}

// hashTree returns a hash of all paths and file contents in a tree. It ignores permissions.
func hashTree(tree fs.FS) (string, error) {
	var inputs []string
	err := fs.WalkDir(tree, ".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		content, err := fs.ReadFile(tree, path)
		inputs = append(inputs, path, string(content))
		return err
	})
	if err != nil {
		return "", fmt.Errorf("hash what an image is made of: %w", err)
	}
	return hash(inputs...), nil
}

// keep returns the path of a cached file or directory. The path contains the name and the hash of
// the inputs. If the path does not exist, keep removes older files of this name, calls build() with
// a temporary path, and renames the result.
func (b *Builder) keep(dir, name, inputs, extension string, build func(partial string) error) (
	path string, err error) {
	defer harness.Catch(&err)
	dir = filepath.Join(b.Cache, dir)
	path = filepath.Join(dir, name+"-"+inputs+extension)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the directory of %s: %w", dir, err)
	}
	for _, file := range harness.Got(filepath.Glob(
		filepath.Join(dir, name+"-????????????"+extension))) {
		if err := os.RemoveAll(file); err != nil {
			return "", fmt.Errorf("remove what an older version has left: %w", err)
		}
	}
	harness.Must(build(path + ".partial"))
	if err := os.Rename(path+".partial", path); err != nil {
		return "", fmt.Errorf("keep what was built: %w", err)
	}
	return path, nil
}

// scratch creates a build's directory. It is in the cache, so that place() can link cached files.
func (b *Builder) scratch() (string, error) {
	parent := filepath.Join(b.Cache, "build")
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return "", fmt.Errorf("make a directory to build in: %w", err)
	}
	dir, err := os.MkdirTemp(parent, "")
	if err != nil {
		return "", fmt.Errorf("make a directory to build in: %w", err)
	}
	return dir, nil
}

// Tidy removes the incomplete builds of a killed run. The caller has to hold the lock of the cache.
func (b *Builder) Tidy() error {
	left, err := filepath.Glob(filepath.Join(b.Cache, "*", "*.partial"))
	if err != nil {
		return err
	}
	for _, path := range append(left, filepath.Join(b.Cache, "build")) {
		if err := os.RemoveAll(path); err != nil {
			return fmt.Errorf("remove what a run that was killed left: %w", err)
		}
	}
	return nil
}

func place(from, to string) error {
	if err := os.Link(from, to); err != nil {
		return fmt.Errorf("place a file for a build: %w", err)
	}
	return nil
}

// programs describes commands that are compiled from one module.
type programs struct {
	// name is the directory of the module in this package, and its name in the log.
	name     string
	packages []string
	// ldflags are linker flags in addition to -s and -w.
	ldflags string
}

var compiled = []programs{
	{name: "kubernetes", packages: []string{"."}, ldflags: kubernetesVersion(Kubernetes)},
	{name: "etcd", packages: []string{"."}},
	{
		name: "sidecars",
		packages: []string{
			"github.com/kubernetes-csi/external-attacher/v4/cmd/csi-attacher",
			"github.com/kubernetes-csi/external-provisioner/v6/cmd/csi-provisioner",
			"github.com/kubernetes-csi/external-snapshotter/v8/cmd/csi-snapshotter",
			"github.com/kubernetes-csi/external-snapshotter/v8/cmd/snapshot-controller",
		},
	},
}

// kubernetesVersion returns linker flags that write the version into Kubernetes' programs. kubeadm
// and kind read it there.
func kubernetesVersion(version string) string {
	const set = "-X k8s.io/component-base/version."
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	return set + "gitVersion=" + version + " " + set + "gitMajor=" + major + " " +
		set + "gitMinor=" + minor
}

// compile builds the module's programs, unless it has built them from the same inputs before.
func (b *Builder) compile(ctx context.Context, p programs) (dir string, err error) {
	defer harness.Catch(&err)
	module := filepath.Join(b.Root, "e2e", "images", p.name)
	ldflags := strings.TrimSpace("-s -w " + p.ldflags)
	version := harness.Got(command(ctx, module, nil, "go", "env", "GOVERSION", "GOARCH"))
	source := harness.Got(hashTree(os.DirFS(module)))
	compiled := false
	dir, err = b.keep("programs", p.name, hash(version, ldflags, strings.Join(p.packages, " "),
		source), "", func(partial string) error {
		compiled = true
		return b.step("compiling "+p.name+" from its modules", func() error {
			return b.goBuild(ctx, module, partial, ldflags, p.packages...)
		})
	})
	if err == nil && !compiled {
		b.say("%s: compiled before", p.name)
	}
	return dir, err
}

// goBuild builds static programs. From the same inputs it makes the same bytes on every machine.
func (b *Builder) goBuild(ctx context.Context, module, dir, ldflags string,
	packages ...string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make a directory for programs: %w", err)
	}
	args := append([]string{"build", "-trimpath", "-buildvcs=false", "-ldflags=" + ldflags,
		"-o", dir + string(filepath.Separator)}, packages...)
	_, err := command(ctx, module, []string{"CGO_ENABLED=0", "GOWORK=off"},
		"go", args...)
	return err
}

// system describes this machine's Debian or Ubuntu, from whose packages the root filesystems are
// made.
type system struct {
	codename string
	// sources lists the machine's files with apt sources of the release. They may name mirrors.
	sources []string
}

func readSystem(ctx context.Context) (system, error) {
	codename, err := command(ctx, "/", nil, "sh", "-c",
		`. /etc/os-release && echo "$VERSION_CODENAME"`)
	if err != nil {
		return system{}, fmt.Errorf("find out which Debian this is: %w", err)
	}
	if codename == "" {
		return system{}, errors.New("expected a Debian or an Ubuntu, and /etc/os-release names no " +
			"VERSION_CODENAME: run the suite with images from registries, or on a Debian")
	}
	targets, err := command(ctx, "/", nil, "apt-get", "indextargets", "--no-release-info", "--format",
		"$(SOURCESENTRY) $(RELEASE) $(COMPONENT)", "Created-By: Packages")
	if err != nil {
		return system{}, fmt.Errorf("look for apt sources: %w", err)
	}
	s := system{codename, ofRelease(targets, codename)}
	if len(s.sources) == 0 {
		return s, fmt.Errorf("expected an apt source with the main packages of %s in "+
			"/etc/apt/sources.list or /etc/apt/sources.list.d, and found none: add one", codename)
	}
	return s, nil
}

// ofRelease returns the files whose apt sources all have a suite of the release and the component
// "main". It omits other vendors' files. Each line of targets is FILE:ENTRY SUITE COMPONENT.
func ofRelease(targets, codename string) []string {
	hasMain, foreign := map[string]bool{}, map[string]bool{}
	fileOf := func(entry string) string { return entry[:strings.LastIndexByte(entry, ':')] }
	for line := range strings.Lines(targets) {
		words := strings.Fields(line)
		suite, _, _ := strings.Cut(words[1], "/")
		base, kind, _ := strings.Cut(suite, "-")
		ours := []string{"", "updates", "security", "backports", "proposed"}
		if base != codename || !slices.Contains(ours, kind) {
			foreign[fileOf(words[0])] = true
		}
		hasMain[words[0]] = hasMain[words[0]] || words[2] == "main"
	}
	files := map[string]bool{}
	for entry, has := range hasMain {
		file := fileOf(entry)
		foreign[file] = foreign[file] || !has
		files[file] = true
	}
	maps.DeleteFunc(files, func(file string, _ bool) bool { return foreign[file] })
	return slices.Sorted(maps.Keys(files))
}

const snapshotClient = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"

// SnapshotCRDs returns the directory that contains the CRDs of snapshots.
func (b *Builder) SnapshotCRDs(ctx context.Context) (string, error) {
	// Run go in the module of the sidecars, because the driver's go.mod does not list snapshotClient.
	out, err := command(ctx, b.directory("sidecars"), nil, "go", "mod", "download", "-json",
		snapshotClient)
	if err != nil {
		return "", fmt.Errorf("get the kinds of snapshots: %w", err)
	}
	var module struct{ Dir string }
	if err := json.Unmarshal([]byte(out), &module); err != nil {
		return "", fmt.Errorf("get the kinds of snapshots: %w", err)
	}
	return filepath.Join(module.Dir, "config", "crd"), nil
}

// Previous is the release from which the suite upgrades. The zero value means that this tree has no
// previous release.
type Previous struct {
	// Name is the release's name according to git describe. Root is the directory of its source tree.
	Name, Root string
	commit     string
}

// FindPrevious resolves a tag or commit in the clone at root. It does not set Root: Unpack does.
func FindPrevious(ctx context.Context, root, release string) (Previous, error) {
	commit, err := command(ctx, root, nil, "git", "rev-parse", "--verify", release+"^{commit}")
	if err != nil {
		return Previous{}, fmt.Errorf("expected the previous release %s among the commits of %s, "+
			"because the suite upgrades from it, and found: %w; fetch the whole history with git fetch "+
			"--unshallow --tags (in a workflow, fetch-depth: 0 of actions/checkout), or name another "+
			"commit with -previous", release, root, err)
	}
	name, err := command(ctx, root, nil, "git", "describe", "--tags", "--always", commit)
	return Previous{Name: name, commit: commit}, err
}

// Unpack extracts p's tree into the cache, sets p.Root, and removes the trees of other releases.
func (b *Builder) Unpack(ctx context.Context, p *Previous) (err error) {
	if *p == (Previous{}) {
		return nil
	}
	p.Root, err = b.keep("previous", "release", p.commit[:12], "", func(partial string) error {
		if err := os.MkdirAll(partial, 0o755); err != nil {
			return fmt.Errorf("make a directory for the tree of a release: %w", err)
		}
		archive := partial + ".tar"
		_, err := command(ctx, b.Root, nil, "git", "archive", "--output", archive, p.commit)
		if err == nil {
			_, err = command(ctx, partial, nil, "tar", "--extract", "--file", archive)
		}
		return errors.Join(err, os.Remove(archive))
	})
	return err
}

type rootfs struct {
	name     string
	packages []string
}

// nodeRootfs is the root filesystem of the node image. The packages in the first two lines are
// those of kind's base image.
var nodeRootfs = rootfs{name: "node", packages: []string{
	"systemd", "systemd-sysv", "conntrack", "iptables", "nftables", "iproute2", "ethtool",
	"util-linux", "mount", "kmod", "libseccomp2", "pigz", "ca-certificates", "curl", "jq", "procps",
	"containerd", "runc", "containernetworking-plugins",
	"e2fsprogs", "xfsprogs", "btrfs-progs",
}}

// productRootfs is the base of the node driver's image.
var productRootfs = rootfs{name: "product", packages: []string{
	"e2fsprogs", "xfsprogs", "btrfs-progs", "mount", "util-linux", "openssh-client", "procps",
}}

var workloadRootfs = rootfs{name: "workloads", packages: []string{"busybox-static", "postgresql"}}

// dpkgOptions make dpkg omit manuals but keep copyright files. They also disable flushes to the
// disk, because after a crash the image is built again.
var dpkgOptions = []string{
	"--dpkgopt=force-unsafe-io",
	"--dpkgopt=path-exclude=/usr/share/doc/*",
	"--dpkgopt=path-include=/usr/share/doc/*/copyright",
	"--dpkgopt=path-exclude=/usr/share/man/*",
	"--dpkgopt=path-exclude=/usr/share/info/*",
}

func (b *Builder) makeRootfs(ctx context.Context, r rootfs) (image string, err error) {
	defer harness.Catch(&err)
	machine := harness.Got(readSystem(ctx))
	packages := strings.Join(r.packages, ",")
	inputs := []string{machine.codename, packages, strings.Join(dpkgOptions, " ")}
	for _, file := range machine.sources {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("hash what an image is made of: %w", err)
		}
		inputs = append(inputs, string(text))
	}
	image = "oxide-e2e/rootfs-" + r.name + ":" + hash(inputs...)
	if b.has(ctx, image) {
		b.say("root file system %s: made before", r.name)
		return image, nil
	}
	harness.Must(b.installPacker(ctx))
	args := append([]string{"--quiet", "--variant=minbase", "--include=" + packages}, dpkgOptions...)
	args = append(args, machine.codename, "-")
	args = append(args, machine.sources...)
	return image, b.step("root file system "+r.name+" of Debian's packages", func() error {
		return b.pack(ctx, image, args)
	})
}

func (b *Builder) installPacker(ctx context.Context) error {
	b.installing.Lock()
	defer b.installing.Unlock()
	if _, err := exec.LookPath("mmdebstrap"); err == nil {
		return nil
	}
	return engine.Install(ctx, b.Log, "mmdebstrap")
}

// pack pipes mmdebstrap's output into `docker import`.
func (b *Builder) pack(ctx context.Context, image string, args []string) error {
	read, write, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	var said strings.Builder
	pack := exec.CommandContext(ctx, "mmdebstrap", args...)
	pack.Stdout, pack.Stderr = write, &said
	// Do not kill mmdebstrap at once: it has to unmount the filesystems in its directory.
	interruptible(pack)
	keep := b.Engine.Command(ctx, "import", "-", image+"-partial")
	keep.Stdin, keep.Stderr = read, &said
	for _, c := range []*exec.Cmd{pack, keep} {
		if err = c.Start(); err != nil {
			break
		}
	}
	// Close our ends of the pipe: while they are open, neither child notices that the other has ended.
	err = errors.Join(err, read.Close(), write.Close())
	for _, c := range []*exec.Cmd{pack, keep} {
		if c.Process != nil {
			err = errors.Join(err, c.Wait())
		}
	}
	if err != nil {
		return fmt.Errorf("mmdebstrap %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	// The engine also imports an incomplete tar, so the image gets its name only now.
	if _, err := b.Engine.Output(ctx, "tag", image+"-partial", image); err != nil {
		return err
	}
	_, err = b.Engine.Output(ctx, "rmi", image+"-partial")
	return err
}
