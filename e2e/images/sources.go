package images

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// system describes this machine's Debian or Ubuntu, from whose packages the root file systems are
// made.
type system struct {
	// codename is the name of the release, such as bookworm.
	codename string
	// sources lists files with the release's apt sources. They name the hosts, so that the user's
	// mirrors are used.
	sources []string
}

// readSystem reads the machine's codename, and asks apt for the sources.
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

// ofRelease returns the files that contain only apt sources of the release, and no source of
// another vendor. Each line of targets is FILE:ENTRY SUITE COMPONENT.
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

// snapshotClient is the module that contains the CRDs of snapshots.
const snapshotClient = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"

// SnapshotCRDs returns the directory that contains the CRDs of snapshots.
func (b *Builder) SnapshotCRDs(ctx context.Context) (string, error) {
	// In another module's directory, so that the driver's go.mod does not have to list this module.
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

// FindPrevious finds the commit of a tag or commit in the clone at root. Unpack sets Root.
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

// Unpack extracts p's tree into the cache, sets p.Root, and removes another release's tree.
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

// nodeRootfs is the root file system of the node image. Its first lines are the packages of kind's
// base image.
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

// workloadRootfs contains the programs of the images busybox and postgres.
var workloadRootfs = rootfs{name: "workloads", packages: []string{"busybox-static", "postgresql"}}

// dpkgOptions are options of dpkg. They omit manuals, but keep copyright files, and flush nothing
// to the disk: after a crash the image is built again.
var dpkgOptions = []string{
	"--dpkgopt=force-unsafe-io",
	"--dpkgopt=path-exclude=/usr/share/doc/*",
	"--dpkgopt=path-include=/usr/share/doc/*/copyright",
	"--dpkgopt=path-exclude=/usr/share/man/*",
	"--dpkgopt=path-exclude=/usr/share/info/*",
}

// makeRootfs builds an image of Debian packages, unless it exists, and returns the image's name.
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

// installPacker installs mmdebstrap, if it is missing.
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
	// An interrupted mmdebstrap has to unmount the file systems in its directory.
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
