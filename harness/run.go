package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Run is one run of a suite or a proof. It has a directory of its own that contains everything
// that the run makes, so two runs on one machine do not disturb each other.
type Run struct {
	// Dir contains binaries, racks, sockets, mount points and logs.
	Dir string
	// Progress receives messages about steps that take long.
	Progress io.Writer
	// Programs contains the commands of programs that need not be built, by name.
	Programs map[string][]string
	// Plain selects programs without the race detector, which computes several times as much. It is
	// for a run that repeats what another run does with the detector.
	Plain bool

	lock   *os.File // of the directory, while this process lives
	racks  atomic.Int64
	plugs  atomic.Int64
	failed atomic.Bool
	bins   binaries
}

// maxSocketPath is the length of the longest path that fits into the kernel's sockaddr_un with
// its final NUL.
const maxSocketPath = 107

// NewRun makes the directory of a run, below OXIDE_SANITY_DIR or the directory for temporary
// files.
func NewRun(progress io.Writer) (*Run, error) { return newRun(progress, RunParents(), "") }

// NewNamedRun is NewRun with a name for the directory, which must not exist.
func NewNamedRun(progress io.Writer, name string) (*Run, error) {
	return newRun(progress, RunParents(), name)
}

func newRun(progress io.Writer, parents []string, name string) (*Run, error) {
	if err := checkSystem(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("the suite makes and mounts loop devices, which requires root: " +
			"run it as root")
	}
	// If a device is still in use, the kernel releases it with its last user.
	if _, err := loopdev.DetachLeft(context.Background()); err != nil &&
		!errors.Is(err, loopdev.ErrBusy) {
		return nil, fmt.Errorf("release the loop devices of a killed run: %w", err)
	}
	parent, err := runParent(parents)
	if err != nil {
		return nil, err
	}
	dir := filepath.Join(parent, name)
	if name == "" {
		dir, err = os.MkdirTemp(parent, "oxide-sanity-")
	} else {
		err = os.Mkdir(dir, 0o700)
	}
	if err != nil {
		return nil, fmt.Errorf("make the run's directory: %w", err)
	}
	r := &Run{Dir: dir, Progress: progress}
	r.lock, err = lockDir(dir)
	return r, err
}

// Tester contains the methods of *testing.T that a run needs.
type Tester interface {
	Helper()
	Cleanup(end func())
	Failed() bool
	Fatal(args ...any)
	Error(args ...any)
}

// RunFor makes a run for a test. The run ends with the test, and keeps its files if the test
// failed. Its directory is in memory if there is enough memory: a flush of a disk is then fast, and
// the holes of a disk take no memory when the disk is read.
func RunFor(t Tester) *Run {
	t.Helper()
	removeKilled()
	run, err := newRun(os.Stderr, append(inMemory(), RunParents()...), "")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			run.Failed()
		}
		if err := run.Close(); err != nil {
			t.Error(err)
		}
	})
	return run
}

// runParent returns a directory for the runs. Its path must be short enough for the sockets
// below it, and it must not be on a filesystem that is mounted nodev, as /tmp is on many
// systems, because it will contain the guests' device nodes.
func runParent(parents []string) (string, error) {
	var refused []error
	for _, dir := range parents {
		err := fitForRun(dir)
		if err == nil {
			return dir, nil
		}
		refused = append(refused, err)
	}
	return "", fmt.Errorf("no place for the run, set OXIDE_SANITY_DIR to a directory with a short "+
		"path on a filesystem that is not mounted nodev: %w", errors.Join(refused...))
}

// RunParents lists the directories that may contain runs.
func RunParents() []string {
	if dir := os.Getenv("OXIDE_SANITY_DIR"); dir != "" {
		return []string{dir}
	}
	return []string{os.TempDir(), "/var/tmp"}
}

func fitForRun(dir string) error {
	// The longest path of a socket is DIR/oxide-sanity-NNNNNNNNNN/rack-N/plugin-N/metrics.sock.
	if len(dir) > maxSocketPath-60 {
		return fmt.Errorf("%s: the path is too long for sockets below it", dir)
	}
	nodev, err := mountedNodev(dir)
	if err != nil {
		return fmt.Errorf("%s: %w", dir, err)
	}
	if nodev {
		return fmt.Errorf("%s: mounted nodev", dir)
	}
	return nil
}

// failedMark is a file in the directory of a run that failed.
const failedMark = "failed"

// Failed records a failure, so that Close keeps the run's files.
func (r *Run) Failed() { r.failed.Store(true) }

// Close removes the run's directory. After a failure it keeps the directory and prints its
// path.
func (r *Run) Close() error {
	defer r.lock.Close()
	if r.failed.Load() {
		if err := os.WriteFile(filepath.Join(r.Dir, failedMark), nil, 0o600); err != nil {
			return err
		}
		r.Say("this run failed; its state and its logs are in %s", r.Dir)
		return nil
	}
	if err := os.RemoveAll(r.Dir); err != nil {
		return fmt.Errorf("remove the run's directory: %w", err)
	}
	return nil
}

// Say prints progress.
func (r *Run) Say(format string, args ...any) {
	fmt.Fprintf(r.Progress, "sanity: "+format+"\n", args...)
}

// newDir makes a numbered directory below the parent.
func (r *Run) newDir(parent, prefix string, counter *atomic.Int64) (string, error) {
	dir := filepath.Join(parent, prefix+strconv.FormatInt(counter.Add(1), 10))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a directory of the run: %w", err)
	}
	return dir, nil
}

// Await calls ask until it returns nil. When the time is over, Await returns the last error.
func Await(ctx context.Context, timeout time.Duration, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for backoff := (Backoff{Max: 100 * time.Millisecond}); ; {
		err := ask()
		if err == nil {
			return nil
		}
		if backoff.Wait(ctx) != nil {
			return fmt.Errorf("after %s: %w", timeout, err)
		}
	}
}

// AtOnce makes n calls at the same moment and waits for all of them.
func AtOnce(n int, call func(caller int)) {
	start := make(chan struct{})
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	callers.Wait()
}

// Share starts workers, which take the jobs in turn until none is left. It waits for all of them.
func Share[J any](workers int, jobs []J, work func(worker int, jobs <-chan J) error) error {
	queue := make(chan J, len(jobs))
	for _, job := range jobs {
		queue <- job
	}
	close(queue)
	errs := make([]error, workers)
	AtOnce(workers, func(worker int) { errs[worker] = work(worker, queue) })
	return errors.Join(errs...)
}

// Must panics if err is not nil. A function above has deferred [Catch] and returns the error, so a
// trial ends at the step that fails.
func Must(err error) {
	if err != nil {
		panic(failedStep{err})
	}
}

// Got returns the result of a step. If the step has failed, Got panics as Must does.
func Got[T any](result T, err error) T {
	Must(err)
	return result
}

type failedStep struct{ error }

// Catch recovers the panic of Must or Got. It joins the error of the step to err, the error that
// the function returns.
func Catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case failedStep:
		if !errors.Is(*err, r.error) {
			*err = errors.Join(*err, r.error)
		}
	default:
		panic(r)
	}
}

// Backoff is a pause between two attempts. It doubles with each attempt.
type Backoff struct {
	// Next is the next pause; 0 means a millisecond. No pause is longer than Max.
	Next, Max time.Duration
}

// Wait waits for the pause. It returns the context's error if the context ends first.
func (b *Backoff) Wait(ctx context.Context) error {
	if b.Next == 0 {
		b.Next = time.Millisecond
	}
	timer := time.NewTimer(b.Next)
	defer timer.Stop()
	b.Next = min(2*b.Next, b.Max)
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
