package images

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// StandIns names the parts of an offline cluster that differ from what users run, for the suite's
// report.
const StandIns = "csi-node-driver-registrar, livenessprobe and pause are small programs of the " +
	"suite's own; busybox is Debian's; postgres:17.6 is Debian's PostgreSQL with an entrypoint of " +
	"the suite's own, which trusts everybody where no password is set; Kubernetes, etcd and the " +
	"other sidecars are compiled from their modules"

// registry is where Kubernetes publishes images, and storage those of CSI. The nodes look for the
// images under these names.
const (
	registry = "registry.k8s.io/"
	storage  = registry + "sig-storage/"
)

// single is an image of one static program.
type single struct {
	image string
	// module is the module that contains the program.
	module string
	// program is the file, and path its place in the image.
	program, path string
}

// singles returns the images that a node's containerd needs at its first start, and those of the
// sidecars.
func singles() []single {
	return []single{
		{registry + "etcd:" + etcd, "etcd", "etcd", "/usr/local/bin/etcd"},
		// kubeadm and kind's containerd name different images of pause.
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

// standIns is the module name of the stand-ins' programs.
const standIns = "standin"

// dockerfile returns the Dockerfile of an image with one static program.
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

// collected contains the images whose programs are copied from a root file system, by the name of
// their Dockerfile. An image with several names is built once.
var collected = map[string][]string{
	"kubernetes": {
		registry + "kube-apiserver:" + Kubernetes, registry + "kube-controller-manager:" + Kubernetes,
		registry + "kube-proxy:" + Kubernetes, registry + "kube-scheduler:" + Kubernetes,
	},
	"busybox":  {"busybox:1.37"},
	"postgres": {"postgres:17.6"},
}

// smallBase is the base of the simulator's image. It is collected, too.
const smallBase = "oxide-e2e/base:latest"

// buildCollected builds an image from programs of a root file system, under each of the names. more
// contains files that are added.
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

// directory returns one of our directories that contain the files of images.
func (b *Builder) directory(name string) string {
	return filepath.Join(b.Root, "e2e", "images", name)
}
