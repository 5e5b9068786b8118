package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// target is a stage of the Dockerfile that becomes an image.
type target struct{ stage, image string }

var (
	stageLine = regexp.MustCompile(`^FROM \S+ AS (\S+)$`)
	titleLine = regexp.MustCompile(`org\.opencontainers\.image\.title="([^"]+)"`)
)

// targetsOf reads the Dockerfile: a stage with a title is an image of that name.
func targetsOf(dockerfile string) ([]target, error) {
	text, err := os.ReadFile(dockerfile)
	if err != nil {
		return nil, err
	}
	var targets []target
	stage := ""
	for line := range strings.SplitSeq(string(text), "\n") {
		if m := stageLine.FindStringSubmatch(line); m != nil {
			stage = m[1]
		}
		if m := titleLine.FindStringSubmatch(line); m != nil {
			targets = append(targets, target{stage, m[1]})
		}
	}
	if len(targets) == 0 {
		return nil, fmt.Errorf("%s has no stage with the label org.opencontainers.image.title",
			dockerfile)
	}
	return targets, nil
}

// builds reports whether the release has an image.
func (r *release) builds(image string) bool {
	return slices.ContainsFunc(r.targets, func(t target) bool { return t.image == image })
}

// images builds every target of the Dockerfile with buildah, which needs no daemon. It writes each
// image as an archive of an OCI layout with all architectures.
func (r *release) images(ctx context.Context) error {
	if _, err := exec.LookPath("buildah"); err != nil {
		return fmt.Errorf("images are built with buildah, which is not on this machine: install it "+
			"(apt-get install buildah), or leave the images out (make release IMAGES=): %w", err)
	}
	base, err := r.importBase(ctx)
	if err != nil {
		return err
	}
	if err := r.contextDir(); err != nil {
		return err
	}
	layouts := filepath.Join(r.stage, "layouts")
	if err := os.Mkdir(layouts, 0o755); err != nil {
		return err
	}
	for _, t := range r.targets {
		dir := filepath.Join(layouts, t.image)
		for _, arch := range r.Arch {
			args := []string{"build", "--isolation", "chroot", "--format", "oci", "--quiet",
				"--disable-compression=false",
				"--platform", "linux/" + arch, "--timestamp", r.seconds(),
				"--target", t.stage, "--tag", "oci:" + dir + ":" + arch,
				"--build-arg", "VERSION=" + r.Version, "--build-arg", "REVISION=" + r.revision}
			if base != "" {
				args = append(args, "--build-arg", "BASE="+base)
			}
			if _, err := r.buildah(ctx, append(args, filepath.Join(r.stage, "context"))...); err != nil {
				return err
			}
		}
		if err := r.joinArchitectures(t.image, dir); err != nil {
			return fmt.Errorf("image %s: %w", t.image, err)
		}
	}
	return nil
}

// seconds returns the date in the form that buildah needs.
func (r *release) seconds() string { return strconv.FormatInt(r.date.Unix(), 10) }

// buildah runs buildah with a temporary store.
func (r *release) buildah(ctx context.Context, args ...string) (string, error) {
	store := []string{"--root", filepath.Join(r.stage, "store"),
		"--runroot", filepath.Join(r.stage, "run"), "--storage-driver", "vfs"}
	return r.output(ctx, "buildah", append(store, args...)...)
}

// importBase makes an image of the root file system in Base, and returns its name.
func (r *release) importBase(ctx context.Context) (string, error) {
	if r.Base == "" {
		return "", nil
	}
	const name = "localhost/base"
	from, err := r.buildah(ctx, "from", "--arch", r.Arch[0], "scratch")
	if err != nil {
		return "", err
	}
	container := strings.TrimSpace(from)
	for _, args := range [][]string{
		{"add", "--quiet", container, r.Base, "/"},
		{"commit", "--quiet", "--rm", "--timestamp", r.seconds(), container, name},
	} {
		if _, err := r.buildah(ctx, args...); err != nil {
			return "", err
		}
	}
	return name, nil
}

// contextDir adds the other files that the Dockerfile copies to the folder with the binaries.
func (r *release) contextDir() error {
	for _, name := range []string{"Dockerfile", "tools/node-root"} {
		content, err := os.ReadFile(filepath.Join(r.Root, name))
		if err != nil {
			return err
		}
		to := filepath.Join(r.stage, "context", name)
		if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(to, content, 0o755); err != nil {
			return err
		}
	}
	return nil
}

// joinArchitectures joins the images in a layout, each tagged with its architecture, into one. It
// writes that image, and a bill of materials for each architecture.
func (r *release) joinArchitectures(name, dir string) error {
	l, err := newLayout(dir)
	if err != nil {
		return err
	}
	all, err := l.manifests()
	if err != nil {
		return err
	}
	for i, m := range all {
		arch := m.Annotations[ocispec.AnnotationRefName]
		all[i].Annotations = nil
		all[i].Platform = &ocispec.Platform{OS: "linux", Architecture: arch}
		if err := r.imageBill(l, name, arch, m); err != nil {
			return err
		}
		r.noteDigest(name, r.Version, "linux/"+arch, m.Digest)
	}
	root, err := l.addJSON(ocispec.MediaTypeImageIndex, index(all...))
	if err != nil {
		return err
	}
	return r.writeLayout(l, name, r.Version, root)
}
