package images

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
)

// snapshotClient is the module in which the kinds of snapshots are published.
const snapshotClient = "github.com/kubernetes-csi/external-snapshotter/client/v8@v8.7.0"

// SnapshotCRDs returns the directory with the definitions of the kinds for snapshots.
func (b *Builder) SnapshotCRDs(ctx context.Context) (string, error) {
	// Use another directory, so that the product's module does not require this one.
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
