package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
)

// down removes what a run with KEEP=1 has left: the cluster, the rack's disks, and our engine.
func down(ctx context.Context, where engine.Options, stdout io.Writer) error {
	docker, err := engine.Kept(ctx, where)
	if docker == nil && err == nil {
		docker, err = engine.Find(ctx)
	}
	if err != nil {
		return err
	}
	s := suiteRun{options: options{cache: where.Cache}, engine: docker, stdout: stdout}
	release, err := s.claim(ctx)
	if err != nil {
		return err
	}
	defer release()
	err = s.removeKept(ctx)
	if docker == nil {
		return err
	}
	return errors.Join(err, docker.Stop(ctx))
}

// projectRoot returns the directory of this program's module.
func projectRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("expected to run in the project's tree, and go list says: %w", err)
	}
	root := string(out[:len(out)-1])
	if _, err := os.Stat(filepath.Join(root, "e2e", "run")); err != nil {
		return "", fmt.Errorf("expected to run in the project's tree, and this is another: %w", err)
	}
	return root, nil
}
