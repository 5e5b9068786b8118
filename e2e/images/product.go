package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

// target is a target of the project's Dockerfile, with the name of the image that it builds.
type target struct{ name, image string }

var product = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + Tag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + Tag},
	{"instance-metadata", "oxidecomputer/oxide-k8s-instance-metadata:" + Tag},
	{"node-keeper", "oxidecomputer/oxide-node-keeper:" + Tag},
	{"simulator", "oxidecomputer/oxide-simulator:" + Tag},
}

// previousTag is the tag of the previous release's images on the suite's nodes.
const previousTag = "previous"

// previous lists the images of the previous release: those that an upgrade replaces.
var previous = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + previousTag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + previousTag},
}

// Product builds the project's images from this tree, and the driver's images from the previous
// release's tree. It returns one archive of them for the nodes, and prints the size of each image.
func (b *Builder) Product(ctx context.Context, before Previous) (string, error) {
	bases, err := b.productBases(ctx)
	if err != nil {
		return "", err
	}
	// Without git the programs have no version, but the images can be built.
	revision, err := command(ctx, b.Root, nil, "git", "describe", "--tags", "--always", "--dirty")
	if err != nil {
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
		err = b.step("compiling "+from.what, func() error {
			release := "-X github.com/oxidecomputer/oxide-csi-plugin/driver.Release=" + from.revision
			return b.goBuild(ctx, from.root, bin, "-s -w "+release, "./cmd/...")
		})
		if err != nil {
			return "", err
		}
		err = b.step("building the images of "+from.what, func() error {
			return b.buildProduct(ctx, from.root, from.targets, bases)
		})
		if err != nil {
			return "", err
		}
		for _, built := range from.targets {
			images = append(images, built.image)
		}
	}
	return b.save(ctx, "product", images...)
}

// productBases returns the value of the build argument BASE for targets. All other targets use the
// Dockerfile's default.
func (b *Builder) productBases(ctx context.Context) (map[string]string, error) {
	if !b.Offline {
		return nil, nil
	}
	rootfs, err := b.makeRootfs(ctx, productRootfs)
	if err != nil {
		return nil, err
	}
	if err := b.buildCollected(ctx, "base", []string{smallBase}, rootfs); err != nil {
		return nil, err
	}
	return map[string]string{"node": rootfs, "simulator": smallBase}, nil
}

// Base returns a tar file of the offline base image for `make release`, or "" without Offline.
func (b *Builder) Base(ctx context.Context) (string, error) {
	if !b.Offline {
		return "", nil
	}
	image, err := b.makeRootfs(ctx, productRootfs)
	if err != nil {
		return "", err
	}
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
	bases map[string]string) error {
	network := ""
	if b.Offline {
		network = noNetwork
	}
	for _, p := range targets {
		name, tag, _ := strings.Cut(p.image, ":")
		args := []string{"TARGETARCH=" + architecture, "VERSION=" + tag}
		if base := bases[p.name]; base != "" {
			args = append(args, "BASE="+base)
		}
		err := b.build(ctx, p.image,
			recipe{dir: root, target: p.name, network: network, args: args})
		if err != nil {
			return err
		}
		size, err := b.Engine.Output(ctx, "image", "inspect", "--format", "{{.Size}}", p.image)
		if err != nil {
			return err
		}
		b.figure(fmt.Sprintf("image name=%s tag=%s bytes=%s", name, tag, size))
	}
	return nil
}

// figure logs a measured number as a FIGURE line.
func (b *Builder) figure(text string) {
	b.logging.Lock()
	defer b.logging.Unlock()
	fmt.Fprintln(b.Log, "FIGURE", text)
}

// StandIns describes, for the suite's report, what in an offline cluster differs from published
// images.
const StandIns = "csi-node-driver-registrar, livenessprobe and pause are small programs of the " +
	"suite's own; busybox is Debian's; postgres:17.6 is Debian's PostgreSQL with an entrypoint of " +
	"the suite's own, which trusts everybody where no password is set; Kubernetes, etcd and the " +
	"other sidecars are compiled from their modules"

// Kubernetes publishes its images under registry, and CSI's sidecars under storage. The offline
// images get the same names, so nodes find them.
const (
	registry = "registry.k8s.io/"
	storage  = registry + "sig-storage/"
)

// single describes an image with one static program.
type single struct {
	image string
	// module is the name of the module, in compiled or standIns, that contains the program.
	module string
	// program is the name of the program's file, and path its path in the image.
	program, path string
}

// singles returns the images of etcd, pause and the sidecars.
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

func (b *Builder) buildSingle(ctx context.Context, s single, programs string) error {
	dir, err := b.scratch()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := place(filepath.Join(programs, s.program), filepath.Join(dir, s.program)); err != nil {
		return err
	}
	file := filepath.Join(dir, "Dockerfile")
	if err := os.WriteFile(file, []byte(s.dockerfile()), 0o644); err != nil {
		return fmt.Errorf("write a Dockerfile: %w", err)
	}
	return b.build(ctx, s.image, recipe{dir: dir, network: noNetwork})
}

// collected lists images whose programs come from a root file system, by the name of their
// Dockerfile. An image with several names is built once.
var collected = map[string][]string{
	"kubernetes": {
		registry + "kube-apiserver:" + Kubernetes, registry + "kube-controller-manager:" + Kubernetes,
		registry + "kube-proxy:" + Kubernetes, registry + "kube-scheduler:" + Kubernetes,
	},
	"busybox":  {"busybox:1.37"},
	"postgres": {"postgres:17.6"},
}

// smallBase is the base image of the simulator's image. buildCollected builds it.
const smallBase = "oxide-e2e/base:latest"

// buildCollected builds an image from a root file system's programs and the files in more, and
// gives it all the names in images.
func (b *Builder) buildCollected(ctx context.Context, name string, images []string, rootfs string,
	more ...string) error {
	dir, err := b.scratch()
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.CopyFS(dir, os.DirFS(b.directory("workloads"))); err != nil {
		return fmt.Errorf("place the files for a build: %w", err)
	}
	for _, file := range more {
		if err := place(file, filepath.Join(dir, filepath.Base(file))); err != nil {
			return err
		}
	}
	return b.build(ctx, images[0], recipe{
		dir: dir, file: name + ".Dockerfile", network: noNetwork, args: []string{"ROOTFS=" + rootfs},
		names: images[1:],
	})
}

// directory returns the path of a directory beside this file.
func (b *Builder) directory(name string) string {
	return filepath.Join(b.Root, "e2e", "images", name)
}
