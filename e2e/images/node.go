package images

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// parts contains the inputs of the offline images.
type parts struct {
	// programs maps a module's name to the directory of its programs.
	programs map[string]string
	// node and workloads are images whose root filesystems consist of Debian packages.
	node, workloads string
}

// Node pulls the image of kind's nodes and returns its name. With Offline, Node builds this image,
// which contains every image that the suite's pods need.
//
// The built image has its own network configuration and no CoreDNS. So a cluster that uses it has
// to set disableDefaultCNI, and to skip the phases preflight and addon/coredns in kubeadm's
// InitConfiguration. On a machine with cgroup v1 every cluster has to set failCgroupV1 to false in
// the KubeletConfiguration.
func (b *Builder) Node(ctx context.Context, kubernetes string) (image string, err error) {
	defer harness.Catch(&err)
	if !b.Offline {
		image = "kindest/node:" + kubernetes
		if b.has(ctx, image) {
			return image, nil
		}
		if _, err := b.Engine.Output(ctx, "pull", "--quiet", image); err != nil {
			return "", fmt.Errorf("expected the image of the nodes in a registry: %w; without a registry, "+
				"build every image here with make e2e-offline", err)
		}
		return image, nil
	}
	p, restricted := harness.Got(b.makeParts(ctx)), harness.Got(engine.WithoutSysResource())
	const repository = "oxide-e2e/node"
	image = repository + ":" + Kubernetes + "-" + harness.Got(b.nodeKey(ctx, p, restricted))
	if b.has(ctx, image) {
		b.say("node image: built before")
		return image, nil
	}
	baked := ""
	harness.Must(b.step("building the images of Kubernetes, sidecars and workloads",
		func() (err error) {
			baked, err = b.bakedImages(ctx, p)
			return err
		}))
	harness.Must(b.step("building the node image", func() error {
		return b.buildNode(ctx, image, p, baked, restricted)
	}))
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

func (b *Builder) nodeKey(ctx context.Context, p parts, restricted bool) (key string, err error) {
	defer harness.Catch(&err)
	inputs := []string{p.node, p.workloads, fmt.Sprint(restricted), fmt.Sprint(singles(), collected)}
	for _, name := range slices.Sorted(maps.Keys(p.programs)) {
		inputs = append(inputs, p.programs[name])
	}
	for _, dir := range []string{p.programs[standIns], b.directory("node"),
		b.directory("workloads")} {
		inputs = append(inputs, harness.Got(hashTree(os.DirFS(dir))))
	}
	kind, err := command(ctx, b.Root, nil, "go", "list", "-m", "sigs.k8s.io/kind")
	return hash(append(inputs, kind)...), err
}

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

// buildNode builds the node image in two steps. First docker builds an image from a Dockerfile.
// Then fill() loads the images of the archive into this image.
func (b *Builder) buildNode(ctx context.Context, image string, p parts, baked string,
	restricted bool) (err error) {
	defer harness.Catch(&err)
	dir := harness.Got(b.scratch())
	defer os.RemoveAll(dir)
	harness.Must(b.placeNode(ctx, dir, p.programs["kubernetes"]))
	without := ""
	if restricted {
		without = "1"
	}
	base := image + "-empty"
	harness.Must(b.build(ctx, base, dir, noNetwork, "--build-arg=ROOTFS="+p.node,
		"--build-arg=KUBERNETES="+Kubernetes, "--build-arg=WITHOUT_SYS_RESOURCE="+without))
	harness.Must(b.fill(ctx, base, image, baked))
	_, err = b.Engine.Output(ctx, "rmi", "--no-prune", base)
	return err
}

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
	run := b.Engine.Command(ctx, "run", "--interactive", "--name", importer, noNetwork,
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

// target is a target of the project's Dockerfile, with the name of the image that it builds.
type target struct{ name, image string }

var product = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + Tag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + Tag},
	{"instance-metadata", "oxidecomputer/oxide-k8s-instance-metadata:" + Tag},
	{"node-keeper", "oxidecomputer/oxide-node-keeper:" + Tag},
	{"simulator", "oxidecomputer/oxide-simulator:" + Tag},
}

const previousTag = "previous"

// previous lists those images of the previous release that an upgrade replaces.
var previous = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + previousTag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + previousTag},
}

// Product builds the project's images from this tree, and the driver's images from the previous
// release's tree. It returns one archive of them for the nodes, and prints the size of each image.
func (b *Builder) Product(ctx context.Context, before Previous) (archive string, err error) {
	defer harness.Catch(&err)
	bases := harness.Got(b.productBases(ctx))
	// Without git the programs have no version, but the images can be built.
	revision, noGit := command(ctx, b.Root, nil, "git", "describe", "--tags", "--always", "--dirty")
	if noGit != nil {
		revision = ""
	}
	var images []string
	for _, from := range []struct {
		what, root, revision string
		targets              []target
	}{
		{"the driver", b.Root, revision, product},
		{"the driver of " + before.Name, before.Root, before.Name, previous},
	} {
		if from.root == "" {
			continue // there is no previous release
		}
		bin := filepath.Join(from.root, "bin", "linux-"+architecture)
		harness.Must(b.step("compiling "+from.what, func() error {
			release := "-X github.com/oxidecomputer/oxide-csi-plugin/driver.Release=" + from.revision
			return b.goBuild(ctx, from.root, bin, "-s -w "+release, "./cmd/...")
		}))
		harness.Must(b.step("building the images of "+from.what, func() error {
			return b.buildProduct(ctx, from.root, from.targets, bases)
		}))
		for _, built := range from.targets {
			images = append(images, built.image)
		}
	}
	return b.save(ctx, "product", images...)
}

// productBases maps targets of the Dockerfile to their build argument BASE. All other targets use
// the Dockerfile's default.
func (b *Builder) productBases(ctx context.Context) (bases map[string]string, err error) {
	defer harness.Catch(&err)
	if !b.Offline {
		return nil, nil
	}
	rootfs := harness.Got(b.makeRootfs(ctx, productRootfs))
	harness.Must(b.buildCollected(ctx, "base", []string{smallBase}, rootfs))
	return map[string]string{"node": rootfs, "simulator": smallBase}, nil
}

// Base returns a tar file of the offline base image for `make release`, or "" without Offline.
func (b *Builder) Base(ctx context.Context) (archive string, err error) {
	defer harness.Catch(&err)
	if !b.Offline {
		return "", nil
	}
	image := harness.Got(b.makeRootfs(ctx, productRootfs))
	_, inputs, _ := strings.Cut(image, ":")
	return b.keep("archives", "base", inputs, ".tar", func(partial string) error {
		container, err := b.Engine.Output(ctx, "create", image, "true")
		if err != nil {
			return err
		}
		_, err = b.Engine.Output(ctx, "export", "--output="+partial, container)
		_, removed := b.Engine.Output(ctx, "rm", container)
		return errors.Join(err, removed)
	})
}

func (b *Builder) buildProduct(ctx context.Context, root string, targets []target,
	bases map[string]string) (err error) {
	defer harness.Catch(&err)
	for _, p := range targets {
		name, tag, _ := strings.Cut(p.image, ":")
		args := []string{"--target", p.name, "--build-arg=TARGETARCH=" + architecture,
			"--build-arg=VERSION=" + tag}
		if b.Offline {
			args = append(args, noNetwork)
		}
		if base := bases[p.name]; base != "" {
			args = append(args, "--build-arg=BASE="+base)
		}
		harness.Must(b.build(ctx, p.image, root, args...))
		size := harness.Got(b.Engine.Output(ctx, "image", "inspect", "--format", "{{.Size}}", p.image))
		fmt.Fprintf(b.Log, "FIGURE image name=%s tag=%s bytes=%s\n", name, tag, size)
	}
	return nil
}

// StandIns is the text in the suite's report that describes how the images of an offline cluster
// differ from published images.
const StandIns = "csi-node-driver-registrar, livenessprobe and pause are small programs of the " +
	"suite's own; busybox is Debian's; postgres:17.6 is Debian's PostgreSQL with an entrypoint of " +
	"the suite's own, which trusts everybody where no password is set; Kubernetes, etcd and the " +
	"other sidecars are compiled from their modules"

// Kubernetes publishes its images, and those of CSI's sidecars, under these prefixes. The offline
// images get the same names, so nodes find them.
const (
	registry = "registry.k8s.io/"
	storage  = registry + "sig-storage/"
)

// single describes an image with one static program.
type single struct {
	image string
	// module is the name of the program's module (see compiled), or the constant standIns.
	module string
	// program is the name of the program's file, and path its path in the image.
	program, path string
}

func singles() []single {
	return []single{
		{registry + "etcd:" + etcd, "etcd", "etcd", "/usr/local/bin/etcd"},
		// kubeadm uses one of these versions of pause, and kind's containerd the other.
		{registry + "pause:3.10", standIns, "pause", "/pause"},
		{registry + "pause:3.10.1", standIns, "pause", "/pause"},
		{storage + "csi-node-driver-registrar:v2.17.0", standIns, "sidecar", "/node-driver-registrar"},
		{storage + "livenessprobe:v2.19.0", standIns, "sidecar", "/livenessprobe"},
		{storage + "csi-provisioner:v6.3.0", "sidecars", "csi-provisioner", "/csi-provisioner"},
		{storage + "csi-attacher:v4.13.0", "sidecars", "csi-attacher", "/csi-attacher"},
		{storage + "csi-snapshotter:v8.7.0", "sidecars", "csi-snapshotter", "/csi-snapshotter"},
		{storage + "snapshot-controller:v8.7.0", "sidecars", "snapshot-controller",
			"/snapshot-controller"},
	}
}

// standIns is the name under which makeParts keeps the programs of e2e/standin.
const standIns = "standin"

func (s single) dockerfile() string {
	return fmt.Sprintf("FROM scratch\nENV PATH=/usr/local/bin\nCOPY %s %s\nENTRYPOINT [%q]\n",
		s.program, s.path, s.path)
}

func (b *Builder) buildSingle(ctx context.Context, s single, programs string) (err error) {
	defer harness.Catch(&err)
	dir := harness.Got(b.scratch())
	defer os.RemoveAll(dir)
	harness.Must(place(filepath.Join(programs, s.program), filepath.Join(dir, s.program)))
	file := filepath.Join(dir, "Dockerfile")
	if err := os.WriteFile(file, []byte(s.dockerfile()), 0o644); err != nil {
		return fmt.Errorf("write a Dockerfile: %w", err)
	}
	return b.build(ctx, s.image, dir, noNetwork)
}

// collected maps the name of a Dockerfile to the names of the one image that is built from it. The
// image's programs come from a root filesystem.
var collected = map[string][]string{
	"kubernetes": {
		registry + "kube-apiserver:" + Kubernetes, registry + "kube-controller-manager:" + Kubernetes,
		registry + "kube-proxy:" + Kubernetes, registry + "kube-scheduler:" + Kubernetes,
	},
	"busybox":  {"busybox:1.37"},
	"postgres": {"postgres:17.6"},
}

const smallBase = "oxide-e2e/base:latest"

// buildCollected builds an image from name.Dockerfile, with programs of rootfs and the files in
// more, and gives it all names in images.
func (b *Builder) buildCollected(ctx context.Context, name string, images []string, rootfs string,
	more ...string) (err error) {
	defer harness.Catch(&err)
	dir := harness.Got(b.scratch())
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, os.DirFS(b.directory("workloads"))); err != nil {
		return fmt.Errorf("place the files for a build: %w", err)
	}
	for _, file := range more {
		harness.Must(place(file, filepath.Join(dir, filepath.Base(file))))
	}
	args := []string{"--file", filepath.Join(dir, name+".Dockerfile"), noNetwork,
		"--build-arg=ROOTFS=" + rootfs}
	for _, image := range images[1:] {
		args = append(args, "--tag", image)
	}
	return b.build(ctx, images[0], dir, args...)
}

func (b *Builder) directory(name string) string {
	return filepath.Join(b.Root, "e2e", "images", name)
}
