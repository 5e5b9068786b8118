package images

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

// rootfs is a root file system of Debian packages.
type rootfs struct {
	name     string
	packages []string
}

// nodeRootfs is the root file system of the node image. The first lines are the packages of kind's
// own base image.
var nodeRootfs = rootfs{name: "node", packages: []string{
	"systemd", "systemd-sysv", "conntrack", "iptables", "nftables", "iproute2", "ethtool",
	"util-linux", "mount", "kmod", "libseccomp2", "pigz", "ca-certificates", "curl", "jq", "procps",
	"containerd", "runc", "containernetworking-plugins",
	"e2fsprogs", "xfsprogs", "btrfs-progs",
}}

// productRootfs contains the programs of the product's own images.
var productRootfs = rootfs{name: "product", packages: []string{
	"e2fsprogs", "xfsprogs", "btrfs-progs", "mount", "util-linux", "openssh-client", "procps",
}}

// workloadRootfs contains the programs of the workload images.
var workloadRootfs = rootfs{name: "workloads", packages: []string{"busybox-static", "postgresql"}}

// dpkgOptions contains options of dpkg: images contain the copyright files of their packages, and
// no manuals. A file system that a crash leaves incomplete is made again, so nothing is flushed.
var dpkgOptions = []string{
	"--dpkgopt=force-unsafe-io",
	"--dpkgopt=path-exclude=/usr/share/doc/*",
	"--dpkgopt=path-include=/usr/share/doc/*/copyright",
	"--dpkgopt=path-exclude=/usr/share/man/*",
	"--dpkgopt=path-exclude=/usr/share/info/*",
}

// makeRootfs makes an image of packages unless it exists, and returns its name.
func (b *Builder) makeRootfs(ctx context.Context, r rootfs) (string, error) {
	machine, err := readSystem(ctx)
	if err != nil {
		return "", err
	}
	packages := strings.Join(r.packages, ",")
	inputs := []string{machine.codename, packages, strings.Join(dpkgOptions, " ")}
	for _, file := range machine.sources {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", fmt.Errorf("hash what an image is made of: %w", err)
		}
		inputs = append(inputs, string(text))
	}
	image := "oxide-e2e/rootfs-" + r.name + ":" + hash(inputs...)
	if b.has(ctx, image) {
		b.say("root file system %s: made before", r.name)
		return image, nil
	}
	if err := b.installPacker(ctx); err != nil {
		return "", err
	}
	args := append([]string{"--quiet", "--variant=minbase", "--include=" + packages}, dpkgOptions...)
	args = append(args, machine.codename, "-")
	args = append(args, machine.sources...)
	return image, b.step("root file system "+r.name+" of Debian's packages", func() error {
		return b.pack(ctx, image, args)
	})
}

// installPacker installs mmdebstrap if it is missing.
func (b *Builder) installPacker(ctx context.Context) error {
	b.installing.Lock()
	defer b.installing.Unlock()
	if _, err := exec.LookPath("mmdebstrap"); err == nil {
		return nil
	}
	return engine.Install(ctx, b.Log, "mmdebstrap")
}

// pack pipes the output of mmdebstrap into the engine, as an image.
func (b *Builder) pack(ctx context.Context, image string, args []string) error {
	read, write, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	var said strings.Builder
	pack := exec.CommandContext(ctx, "mmdebstrap", args...)
	pack.Stdout, pack.Stderr = write, &said
	// mmdebstrap has to unmount the file systems below its directory.
	interruptible(pack)
	keep := b.Engine.Command(ctx, "import", "-", image+"-partial")
	keep.Stdin, keep.Stderr = read, &said
	for _, c := range []*exec.Cmd{pack, keep} {
		if err = c.Start(); err != nil {
			break
		}
	}
	// Each child has its own end of the pipe. If ours stayed open, the other child would wait for
	// ever.
	err = errors.Join(err, read.Close(), write.Close())
	for _, c := range []*exec.Cmd{pack, keep} {
		if c.Process != nil {
			err = errors.Join(err, c.Wait())
		}
	}
	if err != nil {
		return fmt.Errorf("mmdebstrap %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	// Half a tar is an image, too, so only a complete one gets the name.
	if _, err := b.Engine.Output(ctx, "tag", image+"-partial", image); err != nil {
		return err
	}
	_, err = b.Engine.Output(ctx, "rmi", image+"-partial")
	return err
}
