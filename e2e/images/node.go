package images

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

// parts contains the inputs of the offline images.
type parts struct {
	// programs contains the directory of each module's programs, by the module's name.
	programs map[string]string
	// node and workloads are images with the root file systems of Debian's packages.
	node, workloads string
}

// Node returns the name of the image of kind's nodes. With Offline, Node builds this image, with
// every image that the suite's pods need in it.
//
// The built image has its own network configuration and no CoreDNS. So its cluster has to set
// disableDefaultCNI, and to skip the phases preflight and addon/coredns in kubeadm's
// InitConfiguration. On a machine with cgroup v1 every cluster has to set failCgroupV1 to false in
// the KubeletConfiguration.
func (b *Builder) Node(ctx context.Context, kubernetes string) (string, error) {
	if !b.Offline {
		return "kindest/node:" + kubernetes, nil // kind pulls it
	}
	p, err := b.makeParts(ctx)
	if err != nil {
		return "", err
	}
	restricted, err := engine.WithoutSysResource()
	if err != nil {
		return "", err
	}
	key, err := b.nodeKey(ctx, p, restricted)
	if err != nil {
		return "", err
	}
	repository := "oxide-e2e/node"
	image := repository + ":" + Kubernetes + "-" + key
	if b.has(ctx, image) {
		b.say("node image: built before")
		return image, nil
	}
	baked := ""
	err = b.step("building the images of Kubernetes, sidecars and workloads", func() (err error) {
		baked, err = b.bakedImages(ctx, p)
		return err
	})
	if err != nil {
		return "", err
	}
	err = b.step("building the node image", func() error {
		return b.buildNode(ctx, image, p, baked, restricted)
	})
	if err != nil {
		return "", err
	}
	// The node image now contains the images of this archive.
	if err := os.Remove(baked); err != nil {
		return "", fmt.Errorf("remove an archive that is not needed any more: %w", err)
	}
	return image, b.dropOlder(ctx, repository, image)
}

// makeParts compiles programs and downloads packages at the same time: compiling needs the
// processors, and downloading needs the network.
func (b *Builder) makeParts(ctx context.Context) (parts, error) {
	p := parts{programs: map[string]string{}}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error {
		for _, c := range compiled {
			dir, err := b.compile(ctx, c)
			if err != nil {
				return err
			}
			p.programs[c.name] = dir
		}
		dir := filepath.Join(b.Cache, "programs", standIns)
		p.programs[standIns] = dir
		return b.goBuild(ctx, b.Root, dir, "-s -w", "./e2e/standin/...")
	})
	group.Go(func() (err error) {
		p.node, err = b.makeRootfs(ctx, nodeRootfs)
		return err
	})
	group.Go(func() (err error) {
		p.workloads, err = b.makeRootfs(ctx, workloadRootfs)
		return err
	})
	return p, group.Wait()
}

// nodeKey returns a hash of all inputs of the node image.
func (b *Builder) nodeKey(ctx context.Context, p parts, restricted bool) (string, error) {
	inputs := []string{p.node, p.workloads, fmt.Sprint(restricted), fmt.Sprint(singles(), collected)}
	for _, name := range slices.Sorted(maps.Keys(p.programs)) {
		inputs = append(inputs, p.programs[name])
	}
	for _, dir := range []string{p.programs[standIns], b.directory("node"),
		b.directory("workloads")} {
		tree, err := hashTree(os.DirFS(dir))
		if err != nil {
			return "", err
		}
		inputs = append(inputs, tree)
	}
	kind, err := command(ctx, b.Root, nil, "go", "list", "-m", "sigs.k8s.io/kind")
	return hash(append(inputs, kind)...), err
}

// bakedImages builds the images that the node image will contain, four at a time, and saves them in
// one archive.
func (b *Builder) bakedImages(ctx context.Context, p parts) (string, error) {
	var images []string
	group, building := errgroup.WithContext(ctx)
	group.SetLimit(4)
	for _, s := range singles() {
		images = append(images, s.image)
		group.Go(func() error { return b.buildSingle(building, s, p.programs[s.module]) })
	}
	for _, name := range slices.Sorted(maps.Keys(collected)) {
		images = append(images, collected[name]...)
		rootfs, more := p.workloads, []string(nil)
		if name == "kubernetes" {
			rootfs = p.node
			more = []string{filepath.Join(p.programs["kubernetes"], name)}
		}
		group.Go(func() error {
			return b.buildCollected(building, name, collected[name], rootfs, more...)
		})
	}
	if err := group.Wait(); err != nil {
		return "", err
	}
	return b.save(ctx, "baked", images...)
}

// buildNode builds the node image: first from a Dockerfile. Then fill starts a container of it and
// loads the archive's images.
func (b *Builder) buildNode(ctx context.Context, image string, p parts, baked string,
	restricted bool) error {
	dir, err := b.scratch()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := b.placeNode(ctx, dir, p.programs["kubernetes"]); err != nil {
		return err
	}
	without := ""
	if restricted {
		without = "1"
	}
	base := image + "-empty"
	err = b.build(ctx, base, recipe{dir: dir, network: noNetwork, args: []string{
		"ROOTFS=" + p.node, "KUBERNETES=" + Kubernetes, "WITHOUT_SYS_RESOURCE=" + without,
	}})
	if err != nil {
		return err
	}
	if err := b.fill(ctx, base, image, baked); err != nil {
		return err
	}
	_, err = b.Engine.Output(ctx, "rmi", "--no-prune", base)
	return err
}

// placeNode copies the suite's files, kind's files and the programs into the build's directory.
func (b *Builder) placeNode(ctx context.Context, dir, programs string) error {
	kind, err := command(ctx, b.Root, nil, "go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/kind")
	if err != nil {
		return fmt.Errorf("find kind's files: %w", err)
	}
	if err := os.CopyFS(dir, os.DirFS(b.directory("node"))); err != nil {
		return fmt.Errorf("place the node image's files: %w", err)
	}
	files := os.DirFS(filepath.Join(kind, "images", "base", "files"))
	if err := os.CopyFS(filepath.Join(dir, "kind"), files); err != nil {
		return fmt.Errorf("place kind's files: %w", err)
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o755); err != nil {
		return fmt.Errorf("place the programs of a node: %w", err)
	}
	for _, name := range []string{"kubelet", "kubeadm", "kubectl"} {
		if err := os.Symlink("kubernetes", filepath.Join(dir, "bin", name)); err != nil {
			return fmt.Errorf("place the programs of a node: %w", err)
		}
	}
	return place(filepath.Join(programs, "kubernetes"), filepath.Join(dir, "bin", "kubernetes"))
}

// importer is the name of the container in which fill loads images.
const importer = "oxide-e2e-import"

// fill starts a container from the empty node image, loads the archive into the container's
// containerd, and commits the container as the full image.
func (b *Builder) fill(ctx context.Context, empty, full, archive string) error {
	input, err := os.Open(archive)
	if err != nil {
		return fmt.Errorf("read the images to put into the node image: %w", err)
	}
	defer input.Close()
	remove := func() error {
		_, err := b.Engine.Output(context.WithoutCancel(ctx), "rm", "--force", importer)
		return err
	}
	// A run that was killed may have left the container.
	_ = remove()
	run := b.Engine.Command(ctx, "run", "--interactive", "--name", importer, "--network", noNetwork,
		"--entrypoint", "sh", empty, "/kind/import")
	run.Stdin = input
	if out, err := run.CombinedOutput(); err != nil {
		_ = remove()
		return fmt.Errorf("put the images into the node image: %w: %s", err, out)
	}
	_, err = b.Engine.Output(ctx, "commit",
		"--change", `ENTRYPOINT ["/usr/local/bin/entrypoint", "/sbin/init"]`, "--change", "CMD []",
		importer, full)
	if removeErr := remove(); err == nil {
		err = removeErr
	}
	return err
}

// dropOlder removes the repository's other images, because a node image is large. An image that a
// container uses stays.
func (b *Builder) dropOlder(ctx context.Context, repository, image string) error {
	list, err := b.Engine.Output(ctx, "image", "ls", "--format", "{{.Repository}}:{{.Tag}}",
		repository)
	if err != nil {
		return err
	}
	for old := range strings.FieldsSeq(list) {
		if old == image {
			continue
		}
		if _, err := b.Engine.Output(ctx, "rmi", old); err != nil {
			b.say("an older node image stays, since it is in use: %s", old)
		}
	}
	return nil
}
