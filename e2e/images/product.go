package images

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
)

// target is a target of the project's Dockerfile, and the name of its image.
type target struct{ name, image string }

// product contains the project's own images.
var product = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + Tag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + Tag},
	{"instance-metadata", "oxidecomputer/oxide-k8s-instance-metadata:" + Tag},
	{"node-keeper", "oxidecomputer/oxide-node-keeper:" + Tag},
	{"simulator", "oxidecomputer/oxide-simulator:" + Tag},
}

// previousTag is the tag of the driver's images of the previous release in the suite's cluster.
const previousTag = "previous"

// previous contains the images that an upgrade changes, by target.
var previous = []target{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + previousTag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + previousTag},
}

// Product builds the project's own images from this tree, and those of the driver from the tree of
// the previous release. It returns one archive of them for the nodes, and prints the size of each.
func (b *Builder) Product(ctx context.Context, before Previous) (string, error) {
	bases, err := b.productBases(ctx)
	if err != nil {
		return "", err
	}
	// Without git the build has no version name, but the images are the same.
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

// productBases returns the values of BASE, by target. A target without a value uses the default in
// the Dockerfile.
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

// Base returns a tar of the base for make release, or "" if that base is pulled.
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

// figure prints a measured number in the project's format.
func (b *Builder) figure(text string) {
	b.logging.Lock()
	defer b.logging.Unlock()
	fmt.Fprintln(b.Log, "FIGURE", text)
}
