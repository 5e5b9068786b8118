package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Run is one run of the suite: a directory of its own, in which everything lives that the run
// makes, so that two runs on one machine do not meet.
type Run struct {
	// Dir holds binaries, racks, sockets, mount points and logs.
	Dir string
	// Progress is where long steps say that they are under way.
	Progress io.Writer
	// Programs are the commands of programs that need not be built, by name.
	Programs map[string][]string

	racks  atomic.Int64
	plugs  atomic.Int64
	failed atomic.Bool
	bins   binaries
}

// maxSocketPath is what fits into the kernel's sockaddr_un with its closing NUL.
const maxSocketPath = 107

// NewRun makes the directory of a run, in OXIDE_SANITY_DIR or where temporary files go.
func NewRun(progress io.Writer) (*Run, error) {
	return newRun(progress, func(parent string) (string, error) {
		return os.MkdirTemp(parent, "oxide-sanity-")
	})
}

// NewNamedRun is NewRun with a name for the directory, which must not exist.
func NewNamedRun(progress io.Writer, name string) (*Run, error) {
	return newRun(progress, func(parent string) (string, error) {
		dir := filepath.Join(parent, name)
		return dir, os.Mkdir(dir, 0o700)
	})
}

func newRun(progress io.Writer, makeDir func(parent string) (string, error)) (*Run, error) {
	if err := checkSystem(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("the suite makes loop devices and mounts them, which takes root: " +
			"run it as root")
	}
	// What is still in use goes with its last user.
	if _, err := loopdev.DetachLeft(context.Background()); err != nil &&
		!errors.Is(err, loopdev.ErrBusy) {
		return nil, fmt.Errorf("release what a run that was killed has left: %w", err)
	}
	parent, err := runParent()
	if err != nil {
		return nil, err
	}
	dir, err := makeDir(parent)
	if err != nil {
		return nil, fmt.Errorf("make the run's directory: %w", err)
	}
	return &Run{Dir: dir, Progress: progress}, nil
}

// Tester is what a run needs of a test; a *testing.T is one.
type Tester interface {
	Helper()
	Cleanup(end func())
	Failed() bool
	Fatal(args ...any)
	Error(args ...any)
}

// RunFor makes the run of a test, which ends with the test.
func RunFor(t Tester) *Run {
	t.Helper()
	run, err := NewRun(os.Stderr)
	if err != nil {
		t.Fatal(err)
	}
	run.EndWith(t)
	return run
}

// EndWith closes the run at the end of the test. The run of a failed test keeps its evidence.
func (r *Run) EndWith(t Tester) {
	t.Cleanup(func() {
		if t.Failed() {
			r.Failed()
		}
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
}

// runParent picks a directory for the runs: short enough for sockets below it, and not mounted
// nodev, because the guests' device nodes lie there. Many systems mount /tmp so.
func runParent() (string, error) {
	var refused []error
	for _, dir := range RunParents() {
		err := fitForRun(dir)
		if err == nil {
			return dir, nil
		}
		refused = append(refused, err)
	}
	return "", fmt.Errorf("no place for the run, set OXIDE_SANITY_DIR to a directory with a short "+
		"path on a filesystem that is not mounted nodev: %w", errors.Join(refused...))
}

// RunParents lists the directories in which runs may be.
func RunParents() []string {
	if dir := os.Getenv("OXIDE_SANITY_DIR"); dir != "" {
		return []string{dir}
	}
	return []string{os.TempDir(), "/var/tmp"}
}

func fitForRun(dir string) error {
	// The longest socket below: <dir>/oxide-sanity-<10 digits>/rack-<n>/plugin-<n>/metrics.sock
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

// Failed notes that something went wrong, so that the evidence is kept.
func (r *Run) Failed() { r.failed.Store(true) }

// Close removes the run's directory, or, after a failure, says where it lies.
func (r *Run) Close() error {
	if r.failed.Load() {
		r.Say("the state and the logs of this failed run are kept in %s", r.Dir)
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

// newDir makes a numbered directory in the run's.
func (r *Run) newDir(parent, prefix string, counter *atomic.Int64) (string, error) {
	dir := filepath.Join(parent, prefix+strconv.FormatInt(counter.Add(1), 10))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return "", fmt.Errorf("make a directory in the run's: %w", err)
	}
	return dir, nil
}
