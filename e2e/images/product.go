package images

import (
	"context"
	"fmt"
	"path/filepath"
	"strings"
)

// product are the project's own images, by the target of its Dockerfile.
var product = []struct{ target, image string }{
	{"controller", "oxidecomputer/oxide-csi-plugin:" + Tag},
	{"node", "oxidecomputer/oxide-csi-plugin-node:" + Tag},
	{"instance-metadata", "oxidecomputer/oxide-k8s-instance-metadata:" + Tag},
	{"simulator", "oxidecomputer/oxide-simulator:" + Tag},
}

// Product builds the project's own images from this tree and returns an archive of them, for the
// nodes. It says how large each is.
func (b *Builder) Product(ctx context.Context) (string, error) {
	bin := filepath.Join(b.Root, "bin", "linux-"+architecture)
	// Without git there is no name for what is built; the images are the tree's all the same.
	revision, err := command(ctx, b.Root, nil, "git", "describe", "--tags", "--always", "--dirty")
	if err != nil {
		revision = ""
	}
	err = b.step("compiling the driver", func() error {
		release := "-X github.com/oxidecomputer/oxide-csi-plugin/driver.Release=" + revision
		return b.goBuild(ctx, b.Root, bin, "-s -w "+release, "./cmd/...")
	})
	if err != nil {
		return "", err
	}
	bases, err := b.productBases(ctx)
	if err != nil {
		return "", err
	}
	archive := ""
	err = b.step("building the driver's images", func() (err error) {
		archive, err = b.buildProduct(ctx, bases)
		return err
	})
	return archive, err
}

// productBases are the values of BASE, by target; none is the Dockerfile's own.
func (b *Builder) productBases(ctx context.Context) (map[string]string, error) {
	if !b.Offline {
		return nil, nil
	}
	rootfs, err := b.makeRootfs(ctx, nodeRootfs)
	if err != nil {
		return nil, err
	}
	if err := b.buildCollected(ctx, "base", smallBase, rootfs); err != nil {
		return nil, err
	}
	return map[string]string{"node": rootfs, "simulator": smallBase}, nil
}

func (b *Builder) buildProduct(ctx context.Context, bases map[string]string) (string, error) {
	network := ""
	if b.Offline {
		network = noNetwork
	}
	var images []string
	for _, p := range product {
		args := []string{"TARGETARCH=" + architecture, "VERSION=" + Tag}
		if base := bases[p.target]; base != "" {
			args = append(args, "BASE="+base)
		}
		err := b.build(ctx, p.image,
			recipe{dir: b.Root, target: p.target, network: network, args: args})
		if err != nil {
			return "", err
		}
		size, err := b.Engine.Output(ctx, "image", "inspect", "--format", "{{.Size}}", p.image)
		if err != nil {
			return "", err
		}
		name, _, _ := strings.Cut(p.image, ":")
		b.figure(fmt.Sprintf("image name=%s bytes=%s", name, size))
		images = append(images, p.image)
	}
	return b.save(ctx, "product", images...)
}

// figure prints a measured number as the rest of the project does.
func (b *Builder) figure(text string) {
	b.logging.Lock()
	defer b.logging.Unlock()
	fmt.Fprintln(b.Log, "FIGURE", text)
}
