package main

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"sigs.k8s.io/kind/pkg/cluster"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

type suiteRun struct {
	options
	root   string
	before images.Previous
	engine *engine.Engine
	stdout io.Writer
}

func (s *suiteRun) buildAndTest(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	builder := &images.Builder{
		Engine: s.engine, Root: s.root, Cache: s.cache, Offline: s.offline, Log: s.stdout,
	}
	harness.Must(builder.Tidy())
	began := time.Now()
	node := harness.Got(builder.Node(ctx, s.kubernetes))
	harness.Must(builder.Unpack(ctx, &s.before))
	product := harness.Got(builder.Product(ctx, s.before))
	base, crds := harness.Got(builder.Base(ctx)), harness.Got(builder.SnapshotCRDs(ctx))
	fmt.Fprintf(s.stdout, "FIGURE e2e images-seconds=%.0f\n", time.Since(began).Seconds())
	work := harness.Got(s.workDir(ctx))
	evidence := filepath.Join(s.cache, "evidence", time.Now().UTC().Format("20060102-150405"))
	standIns := ""
	if s.offline {
		standIns = images.StandIns
	}
	settings := harness.Got(json.Marshal(map[string]any{
		"NodeImage": node, "Kubernetes": s.kubernetes, "CRDs": crds, "Work": work,
		"Evidence": evidence, "StandIns": standIns, "Archive": product,
		"Previous": s.before.Root, "PreviousName": s.before.Name, "Base": base,
		"Offline": s.offline, "Keep": s.keep, "Reuse": s.reuse,
	}))
	err = s.test(ctx, "E2E_SETTINGS="+string(settings))
	return errors.Join(err, s.tidy(ctx, work, evidence, err == nil))
}

// workDir returns the work directory of the kept cluster if this run reuses it. If not, workDir
// removes the kept cluster and creates a new directory.
func (s *suiteRun) workDir(ctx context.Context) (dir string, err error) {
	defer harness.Catch(&err)
	if s.reuse {
		work, err := os.ReadFile(s.note())
		if err != nil {
			return "", fmt.Errorf("expected a cluster that a run with KEEP=1 has left, since "+
				"E2E_REUSE=1, and found none: %w", err)
		}
		return string(work), nil
	}
	harness.Must(s.removeKept(ctx))
	work := harness.Got(workDir([]string{os.TempDir(), filepath.Join(s.cache, "work")}, mountFlags))
	return work, os.WriteFile(s.note(), []byte(work), 0o600)
}

// note is the file that contains the path of the current or kept cluster's work directory.
func (s *suiteRun) note() string { return filepath.Join(s.cache, "kept-work") }

func (s *suiteRun) removeKept(ctx context.Context) error {
	clusterErr := s.removeCluster()
	work, err := os.ReadFile(s.note())
	switch {
	case errors.Is(err, os.ErrNotExist):
		return clusterErr
	case err != nil:
		return errors.Join(clusterErr, fmt.Errorf("find the rack that was kept: %w", err))
	}
	// The paths of the files show which loop devices belong to the rack, so detach the devices before
	// the files are removed.
	if err := errors.Join(clusterErr, s.detach(ctx, string(work))); err != nil {
		return err
	}
	return errors.Join(os.RemoveAll(string(work)), os.Remove(s.note()))
}

// suiteEnd is the time in which an interrupted suite has to clean up.
const suiteEnd = 3 * time.Minute

// test builds the suite's program and runs it. It does not use `go test`, which neither passes an
// interrupt on nor waits for the program.
func (s *suiteRun) test(ctx context.Context, environment string) error {
	program := filepath.Join(s.cache, "e2e.test")
	build := exec.CommandContext(ctx, "go", "test", "-c", "-tags=e2e", "-o", program, "./e2e")
	build.Dir, build.Stdout, build.Stderr = s.root, s.stdout, os.Stderr
	if err := build.Run(); err != nil {
		return fmt.Errorf("build the suite: %w", err)
	}
	began := time.Now()
	err := s.suite(ctx, environment, program, suiteArgs(s.options)...)
	fmt.Fprintf(s.stdout, "FIGURE e2e suite-seconds=%.0f\n", time.Since(began).Seconds())
	if err != nil {
		return fmt.Errorf("the suite: %w", err)
	}
	return nil
}

func (s *suiteRun) suite(ctx context.Context, environment, program string, args ...string) error {
	suite := exec.CommandContext(ctx, program, args...)
	suite.Dir, suite.Stdout, suite.Stderr = filepath.Join(s.root, "e2e"), s.stdout, os.Stderr
	suite.Env = append(s.engine.Environment(), environment)
	// The suite has its own process group, so Ctrl-C reaches it only through this process, and does
	// not reach its cleanup programs. If this process is killed, the kernel kills the suite, too:
	// otherwise the suite would use, and finally remove, a cluster that the next run has created.
	suite.SysProcAttr = suiteAttr()
	suite.Cancel = func() error { return suite.Process.Signal(os.Interrupt) }
	suite.WaitDelay = suiteEnd
	// The kernel sends Pdeathsig when the thread that started the process ends, so keep this thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return suite.Run()
}

// suiteArgs returns the suite's arguments. Specs time out before the suite, so cleanups have time.
func suiteArgs(o options) []string {
	args := []string{"-test.v", "-test.timeout=" + o.timeout.String(),
		"-ginkgo.timeout=" + (o.timeout - suiteEnd).String()}
	if o.focus != "" {
		args = append(args, "-ginkgo.focus="+o.focus)
	}
	if o.label != "" {
		args = append(args, "-ginkgo.label-filter="+o.label)
	}
	return args
}

// If s.keep is set, tidy keeps all. After a failure without interrupt it keeps the rack's files.
func (s *suiteRun) tidy(ctx context.Context, work, evidence string, green bool) error {
	if _, err := os.Stat(evidence); !green && err == nil {
		fmt.Fprintf(s.stdout, "e2e: the evidence of the failure is in %s\n", evidence)
	}
	if s.keep {
		fmt.Fprintf(s.stdout, "e2e: kept the cluster; look at it with KUBECONFIG=%s; run specs on it "+
			"with E2E_REUSE=1 KEEP=1\n", filepath.Join(work, "kubeconfig"))
		return nil
	}
	interrupted := ctx.Err() != nil // then nobody needs the disks
	ctx = context.WithoutCancel(ctx)
	if green || interrupted {
		return s.removeKept(ctx)
	}
	fmt.Fprintf(s.stdout, "e2e: the rack's disks are kept in %s; remove it when you have examined "+
		"them\n", work)
	if err := errors.Join(s.removeCluster(), s.detach(ctx, work)); err != nil {
		return err
	}
	return os.Remove(s.note())
}

const clusterName = "oxide-csi"

// removeCluster deletes the cluster if it exists: a suite that was killed has not deleted it.
// Without an engine there is no cluster.
func (s *suiteRun) removeCluster() (err error) {
	defer harness.Catch(&err)
	if s.engine == nil {
		return nil
	}
	if err := harness.Got(s.provider()).Delete(clusterName, ""); err != nil {
		return fmt.Errorf("remove the cluster %s: %w", clusterName, err)
	}
	return nil
}

// detach detaches the loop devices of the files in the work directory, because loop devices outlive
// the cluster. It has to run before the files are removed.
func (s *suiteRun) detach(ctx context.Context, work string) error {
	released, err := loopdev.DetachBelow(ctx, work)
	if err != nil {
		return fmt.Errorf("release the loop devices of the rack in %s, whose files stay: %w; end what "+
			"uses the devices, then run make e2e-down", work, err)
	}
	for _, d := range released {
		fmt.Fprintf(s.stdout, "e2e: released %s, which the suite has left\n", d.Path)
	}
	return nil
}

// down removes the cluster, the rack's disks and the engine that a run with KEEP=1 has left.
func down(ctx context.Context, where engine.Options, stdout io.Writer) (err error) {
	defer harness.Catch(&err)
	docker := harness.Got(engine.Kept(ctx, where))
	if docker == nil {
		docker = harness.Got(engine.Find(ctx))
	}
	s := suiteRun{options: options{cache: where.Cache}, engine: docker, stdout: stdout}
	release := harness.Got(s.claim(ctx))
	defer release()
	err = s.removeKept(ctx)
	if docker == nil {
		return err
	}
	return errors.Join(err, docker.Stop(ctx))
}

func projectRoot(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("expected to run in the project's tree, and go list fails: %w", err)
	}
	root := string(out[:len(out)-1])
	if _, err := os.Stat(filepath.Join(root, "e2e", "run")); err != nil {
		return "", fmt.Errorf("expected to run in the project's tree, and this is another: %w", err)
	}
	return root, nil
}

// holder is the content of a lock's file: the process that has the lock, or had it last.
type holder struct {
	Process int       `json:"process"`
	Since   time.Time `json:"since"`
	Cache   string    `json:"cache"`
}

func (h holder) String() string {
	return fmt.Sprintf("the process %d, since %s, with the cache %s", h.Process,
		h.Since.Format(time.RFC3339), h.Cache)
}

// hold locks a file until unlock is called or this process ends, and writes a holder into it. If
// allowed() returns an error for the previous holder, hold returns this error and takes no lock.
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
		return nil, fmt.Errorf("expected no other run with %s, and one is in progress (%s): wait for it "+
			"to end", what, before)
	}
	if err := allowed(before); err != nil {
		return nil, err
	}
	text, err = json.Marshal(holder{Process: os.Getpid(), Since: time.Now().UTC(), Cache: cache})
	if err != nil {
		return nil, err
	}
	if err = file.Truncate(0); err == nil {
		_, err = file.WriteAt(text, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", what, err)
	}
	return func() { _ = file.Close() }, nil
}

// lock reserves the cache, and the dockerd in it, for this run.
func lock(cache string) (unlock func(), err error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, fmt.Errorf("create the cache: %w", err)
	}
	return hold(filepath.Join(cache, "lock"), "the cache "+cache, cache,
		func(holder) error { return nil })
}

// lockDir contains the locks of clusters. It does not depend on a run's cache or TMPDIR, so all
// runs on the machine use the same locks.
const lockDir = "/tmp"

// claim reserves the cluster's name on the engine until release is called, so that no other run
// creates or removes the cluster. It fails if the cluster exists and belongs to another cache.
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

// claimCluster locks the cluster on the Docker engine whose ID is engine. It fails if a cluster
// exists, and the lock's file names another cache, or names none and this cache has no file note.
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
			return fmt.Errorf("%s exists, and no run with the cache %s has made it: remove it with kind "+
				"delete cluster --name %s if nobody needs it, or name another engine in DOCKER_HOST", what,
				cache, clusterName)
		}
		return nil
	})
}

func (s *suiteRun) clusterExists() (exists bool, err error) {
	defer harness.Catch(&err)
	names, err := harness.Got(s.provider()).List()
	if err != nil {
		return false, fmt.Errorf("look for the cluster %s: %w", clusterName, err)
	}
	return slices.Contains(names, clusterName), nil
}

// provider returns kind's provider, which reads the engine's address from the environment.
func (s *suiteRun) provider() (*cluster.Provider, error) {
	if s.engine.Host != "" {
		if err := os.Setenv("DOCKER_HOST", s.engine.Host); err != nil {
			return nil, err
		}
	}
	return cluster.NewProvider(cluster.ProviderWithDocker()), nil
}
