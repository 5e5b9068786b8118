// Package images builds or pulls what the end-to-end suite's cluster runs. The product's own images
// are built from this tree in every run. The others are pulled from where they are published. With
// Offline they are built instead, on a machine that reaches no registry, from the Go module proxy
// and Debian's packages only:
//
//	Kubernetes, etcd      compiled from their modules (kubernetes/, etcd/)
//	CSI sidecars          compiled from their modules (sidecars/)
//	registrar, livenessprobe, pause   stand-ins of our own: their modules are not served
//	busybox, PostgreSQL   Debian's packages (workloads/)
//	kind's node image     Debian's packages, kind's own files, and all of the above (node/)
//
// The package uses no other hosts, so it also works behind an air gap if GOPROXY and the machine's
// apt sources point to mirrors. What is built stays in the cache and in the engine, under a name
// that contains the hash of its inputs. So a second run takes seconds, and a changed version
// rebuilds only what depends on it.
package images

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

// Kubernetes is the version that the offline cluster runs. The modules below this directory pin the
// same version, and the version of etcd that its kubeadm requires.
const Kubernetes = "v1.35.4"

const etcd = "3.6.6-0"

// Tag is the tag of a release's images in the manifests. The suite runs the tree's own images under
// it.
const Tag = "v0.1.0"

// Builder builds images with an engine.
type Builder struct {
	Engine *engine.Engine
	// Root is the project's directory.
	Root string
	// Cache is the suite's directory for what the next run can reuse.
	Cache string
	// Offline makes the Builder build everything on this machine.
	Offline bool
	// Log gets a line for every step, with its duration.
	Log io.Writer

	logging, installing sync.Mutex
}

func (b *Builder) say(format string, args ...any) {
	b.logging.Lock()
	defer b.logging.Unlock()
	fmt.Fprintf(b.Log, "images: "+format+"\n", args...)
}

// step does something that takes long, and logs its beginning and its end.
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

type recipe struct {
	// dir is the directory that the engine gets.
	dir string
	// file is the Dockerfile in dir; empty means Docker's default name. target is one of its stages;
	// empty means the last.
	file, target string
	// network is the network of the build. Empty means the engine's default.
	network string
	args    []string
	// names are further names of the image.
	names []string
}

const noNetwork = "none"

func (b *Builder) build(ctx context.Context, image string, r recipe) error {
	args := []string{"build", "--quiet", "--tag", image}
	if r.file != "" {
		args = append(args, "--file", filepath.Join(r.dir, r.file))
	}
	if r.target != "" {
		args = append(args, "--target", r.target)
	}
	if r.network != "" {
		args = append(args, "--network", r.network)
	}
	for _, arg := range r.args {
		args = append(args, "--build-arg", arg)
	}
	for _, name := range r.names {
		args = append(args, "--tag", name)
	}
	if _, err := b.Engine.Output(ctx, append(args, r.dir)...); err != nil {
		return fmt.Errorf("build %s: %w", image, err)
	}
	return nil
}

// save writes images into one archive, unless an archive of exactly these images exists. Their hash
// is part of the archive's name; archives with another hash are removed.
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

// command runs a program in a directory. An error contains the end of its output.
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

// interruptible makes the end of the context interrupt the program, which then has a minute to
// clean up.
func interruptible(c *exec.Cmd) {
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.WaitDelay = time.Minute
}

// architecture is this machine's architecture, in the words of Go and Docker.
const architecture = runtime.GOARCH

// hash returns a short hash of strings, for a name.
func hash(inputs ...string) string {
	sum := sha256.New()
	for _, input := range inputs {
		// The length distinguishes "ab", "c" from "a", "bc".
		fmt.Fprintf(sum, "%d:%s", len(input), input)
	}
	return hex.EncodeToString(sum.Sum(nil))[:12]
}

// hashTree returns a short hash of a tree's paths and contents, without permissions.
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

// keep returns the path of a file or directory in the cache, whose name contains the hash of its
// inputs. If it does not exist, keep removes those with the same name and other inputs, calls build
// with a temporary path, and renames the result.
func (b *Builder) keep(dir, name, inputs, extension string, build func(partial string) error) (
	string, error) {
	dir = filepath.Join(b.Cache, dir)
	path := filepath.Join(dir, name+"-"+inputs+extension)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make the directory of %s: %w", dir, err)
	}
	old, err := filepath.Glob(filepath.Join(dir, name+"-????????????"+extension))
	if err != nil {
		return "", err
	}
	for _, file := range old {
		if err := os.RemoveAll(file); err != nil {
			return "", fmt.Errorf("remove what an older version has left: %w", err)
		}
	}
	if err := build(path + ".partial"); err != nil {
		return "", err
	}
	if err := os.Rename(path+".partial", path); err != nil {
		return "", fmt.Errorf("keep what was built: %w", err)
	}
	return path, nil
}

// scratch creates a directory for a build, on the file system of the files that go into it.
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

// Tidy removes incomplete builds of a run that was killed. No other run may build at the same time.
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

// place links a file of the cache into the directory of a build. Both are on one file system.
func place(from, to string) error {
	if err := os.Link(from, to); err != nil {
		return fmt.Errorf("place a file for a build: %w", err)
	}
	return nil
}

// programs are the commands that are built from one module.
type programs struct {
	// name is the module's directory below this package, and its name in the log.
	name string
	// packages contains the import paths of the commands.
	packages []string
	// ldflags are flags of the linker, besides those that omit symbols.
	ldflags string
}

// compiled contains the modules of the programs that the offline cluster runs.
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

// kubernetesVersion returns the linker flags that set the programs' version; kubeadm and kind ask
// for it.
func kubernetesVersion(version string) string {
	const set = "-X k8s.io/component-base/version."
	major, rest, _ := strings.Cut(strings.TrimPrefix(version, "v"), ".")
	minor, _, _ := strings.Cut(rest, ".")
	return set + "gitVersion=" + version + " " + set + "gitMajor=" + major + " " +
		set + "gitMinor=" + minor
}

// compile builds a module's programs and returns their directory, whose name contains the hash of
// the inputs. Programs that exist are not built again.
func (b *Builder) compile(ctx context.Context, p programs) (string, error) {
	module := filepath.Join(b.Root, "e2e", "images", p.name)
	ldflags := strings.TrimSpace("-s -w " + p.ldflags)
	version, err := command(ctx, module, nil, "go", "env", "GOVERSION", "GOARCH")
	if err != nil {
		return "", err
	}
	source, err := hashTree(os.DirFS(module))
	if err != nil {
		return "", err
	}
	compiled := false
	dir, err := b.keep("programs", p.name, hash(version, ldflags, strings.Join(p.packages, " "),
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

// goBuild builds static programs. The same inputs give the same bytes on every machine.
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
