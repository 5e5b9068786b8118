package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/kind/pkg/cluster"
)

// holder describes the process that has a lock, or had it last, according to the lock's file.
type holder struct {
	Process int       `json:"process"`
	Since   time.Time `json:"since"`
	Cache   string    `json:"cache"`
}

func (h holder) String() string {
	return fmt.Sprintf("the process %d, since %s, with the cache %s", h.Process,
		h.Since.Format(time.RFC3339), h.Cache)
}

// hold locks a file until this process ends, and writes this process into it. what names what the
// lock protects. allowed decides by the previous holder whether this process may have the lock.
func hold(path, what, cache string, allowed func(before holder) error) (unlock func(), err error) {
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	defer func() {
		if err != nil {
			_ = file.Close()
		}
	}()
	lockErr := syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	text, err := io.ReadAll(file)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	var before holder
	_ = json.Unmarshal(text, &before) // if this fails, the holder is unknown
	if lockErr != nil {
		return nil, fmt.Errorf("expected to be the only run with %s, and another one has it (%s): wait "+
			"for it to end", what, before)
	}
	if err := allowed(before); err != nil {
		return nil, err
	}
	text, err = json.Marshal(holder{Process: os.Getpid(), Since: time.Now().UTC(), Cache: cache})
	if err != nil {
		return nil, err
	}
	if err = errors.Join(file.Truncate(0), writeAt(file, text)); err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	return func() { _ = file.Close() }, nil
}

func writeAt(file *os.File, text []byte) error {
	_, err := file.WriteAt(text, 0)
	return err
}

// lock prevents that two runs build in one cache, or share our own engine in it.
func lock(cache string) (unlock func(), err error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, fmt.Errorf("make the cache: %w", err)
	}
	return hold(filepath.Join(cache, "lock"), "the cache "+cache, cache,
		func(holder) error { return nil })
}

// lockDir contains the locks of clusters. It is the same for every run on the machine, whatever its
// cache and its TMPDIR are.
const lockDir = "/tmp"

// claim reserves the cluster's name on the engine for this run until release: no other run creates
// or removes the cluster. A cluster that already exists was left by a run with this cache.
func (s *suiteRun) claim(ctx context.Context) (release func(), err error) {
	if s.engine == nil {
		return func() {}, nil
	}
	id, err := s.engine.Output(ctx, "info", "--format", "{{.ID}}")
	if err != nil {
		return nil, fmt.Errorf("find out which engine it is: %w", err)
	}
	return claimCluster(lockDir, id, s.cache, s.clusterExists, s.note())
}

// claimCluster takes the lock of the cluster on the engine with this ID. If the lock has no record,
// for example after an update of this program, the note in the cache shows whether the cluster is
// ours.
func claimCluster(
	dir, engine, cache string, exists func() (bool, error), note string,
) (release func(), err error) {
	path := filepath.Join(dir, fmt.Sprintf("oxide-csi-e2e-%.8x.lock", sha256.Sum256([]byte(engine))))
	what := fmt.Sprintf("the cluster %s on the Docker engine %s", clusterName, engine)
	return hold(path, what, cache, func(before holder) error {
		found, err := exists()
		if err != nil || !found || before.Cache == cache {
			return err
		}
		if before.Cache != "" {
			return fmt.Errorf("%s was left by another run (%s): remove it with XDG_CACHE_HOME=%s make "+
				"e2e-down, or name another engine in DOCKER_HOST", what, before, filepath.Dir(before.Cache))
		}
		if _, err := os.Stat(note); err != nil {
			return fmt.Errorf("%s is there, and no run with the cache %s has made it: remove it with kind "+
				"delete cluster --name %s if nobody needs it, or name another engine in DOCKER_HOST", what,
				cache, clusterName)
		}
		return nil
	})
}

// clusterExists reports whether the engine has a cluster with the suite's name.
func (s *suiteRun) clusterExists() (bool, error) {
	provider, err := s.provider()
	if err != nil {
		return false, err
	}
	names, err := provider.List()
	if err != nil {
		return false, fmt.Errorf("look for the cluster %s: %w", clusterName, err)
	}
	return slices.Contains(names, clusterName), nil
}

// provider returns kind's provider, which reads the address of our engine from the environment.
func (s *suiteRun) provider() (*cluster.Provider, error) {
	if s.engine.Host != "" {
		if err := os.Setenv("DOCKER_HOST", s.engine.Host); err != nil {
			return nil, err
		}
	}
	return cluster.NewProvider(cluster.ProviderWithDocker()), nil
}
