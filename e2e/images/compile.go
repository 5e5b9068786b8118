package images

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
)

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
