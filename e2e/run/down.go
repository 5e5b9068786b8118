package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

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
	s := session{options: options{cache: where.Cache}, engine: docker, stdout: stdout}
	err = s.removeKept(ctx)
	if docker == nil {
		return err
	}
	return errors.Join(err, docker.Stop(ctx))
}

// lock keeps two runs from sharing a cluster's name and an engine.
func lock(cache string) (unlock func(), err error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, fmt.Errorf("make the cache: %w", err)
	}
	file, err := os.OpenFile(filepath.Join(cache, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the cache: %w", err)
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		_ = file.Close()
		return nil, fmt.Errorf("expected to be the only run with the cache %s, and another one has "+
			"it: wait for it to end, or set XDG_CACHE_HOME to another directory", cache)
	}
	return func() { _ = file.Close() }, nil
}

// projectRoot is the directory of the module that we are of.
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
