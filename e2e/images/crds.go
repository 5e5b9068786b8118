package images

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
)

// snapshotClient is the module that the kinds of snapshots are published in.
const snapshotClient = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"

// SnapshotCRDs returns the directory of the kinds that snapshots need in a cluster.
func (b *Builder) SnapshotCRDs(ctx context.Context) (string, error) {
	// From a directory of its own: the product's module is not to learn of it.
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
