// Package harness runs the driver and a simulated rack as processes, and observes them from
// outside. The specs, the proofs, the benchmarks, the demo and the end-to-end suite use it.
//
// A [Run] is a directory for everything that a test creates. [Run.StartRack] starts an
// oxide-simulator. [Rack.StartPlugin] starts an oxide-csi-plugin in one of the rack's instances.
// The first use of a program builds it, with the race detector if this binary has it. An
// [Environment] is a rack with its drivers and a ledger from the start.
//
//	run := harness.RunFor(t)
//	rack, err := run.StartRack(ctx, harness.RackOptions{})       // instances a and b
//	all, err := rack.StartPlugin(ctx, harness.PluginOptions{})   // mode all, in a
//	start, err := rack.Ledger(ctx, all)
//	…  all.Controller().CreateVolume(ctx, harness.CreateRequest("name"))
//	err = rack.Balance(ctx, start, all)                          // nothing may leak
//	err = errors.Join(all.Stop(), rack.Stop())
//
// [CreateRequest] and the functions beside it build requests to the controller. A [Placement] makes
// the node calls for a volume. [Data] writes and verifies the data of a workload in a volume.
// [Rack.Admin] injects faults and reads the request log. [Rack.Client] is Oxide's own client.
//
// A [Ledger] counts the rack's objects, loop devices, mounts, and the processes' open files and
// goroutines. Stop returns an error if a process fails or leaves something behind. [ErrorRules]
// checks each error that a driver returns.
//
// The package uses only the flags, the environment, the sockets and the HTTP of driver and rack. It
// does not use Ginkgo, and only [RunFor] and [Need] end a test. It needs Linux and root; on other
// systems its functions return an error.
package harness

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Run is the directory for all files of one suite or proof, so that two runs on one machine do not
// disturb each other.
type Run struct {
	Dir string
	// Progress gets messages about steps that take long.
	Progress io.Writer
	// Programs contains a command for each program that the run need not build. Keys are names.
	Programs map[string][]string
	// Plain selects programs without the race detector. They need much less time. Set Plain only if
	// another run repeats the same work with the race detector.
	Plain bool

	lock     *os.File // Dir, opened and locked
	racks    atomic.Int64
	plugs    atomic.Int64
	failed   atomic.Bool
	building sync.Mutex
}

// NewRun creates the directory of a run in the first directory of RunParents that can contain it.
func NewRun(progress io.Writer) (*Run, error) { return newRun(progress, RunParents(), "") }

// NewNamedRun is like NewRun, but uses this name for the directory, which must not exist.
func NewNamedRun(progress io.Writer, name string) (*Run, error) {
	return newRun(progress, RunParents(), name)
}

func newRun(progress io.Writer, parents []string, name string) (r *Run, err error) {
	defer Catch(&err)
	Must(checkSystem())
	if os.Geteuid() != 0 {
		return nil, errors.New("the suite makes and mounts loop devices, which requires root: " +
			"run it as root")
	}
	// A busy device is no failure: the kernel detaches it when its last user has closed it.
	if _, err := loopdev.DetachLeft(context.Background()); !errors.Is(err, loopdev.ErrBusy) {
		Must(Wrap(err, "release the loop devices of a killed run"))
	}
	parent := Got(runParent(parents))
	dir := filepath.Join(parent, name)
	if name == "" {
		dir, err = os.MkdirTemp(parent, "oxide-sanity-")
	} else {
		err = os.Mkdir(dir, 0o700)
	}
	Must(Wrap(err, "make the run's directory"))
	r = &Run{Dir: dir, Progress: progress}
	r.lock, err = LockDir(dir)
	return r, err
}

// Tester contains the methods of *testing.T that this package uses.
type Tester interface {
	Helper()
	Cleanup(end func())
	Failed() bool
	Fatal(args ...any)
	Error(args ...any)
}

// RunFor creates a run that ends with the test, and keeps its directory if the test fails. With
// enough free memory it uses a tmpfs: flushes are fast there, and reading a hole takes no memory.
func RunFor(t Tester) *Run {
	t.Helper()
	removeKilled()
	run := Need(newRun(os.Stderr, append(inMemory(), RunParents()...), ""))(t)
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

// runParent returns the first of the directories that can contain a run: its path must be short
// enough for the paths of sockets, and its filesystem must allow device nodes, which guest views
// have. /tmp is often mounted with nodev.
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

// RunParents returns the directories for runs, in order of preference.
func RunParents() []string {
	if dir := os.Getenv("OXIDE_SANITY_DIR"); dir != "" {
		return []string{dir}
	}
	return []string{os.TempDir(), "/var/tmp"}
}

// failedMark is the name of a file that makes removeKilled keep a failed run's directory.
const failedMark = "failed"

// Failed marks the run as failed, so that Close keeps the directory.
func (r *Run) Failed() { r.failed.Store(true) }

// Close removes the run's directory. If the run has failed, Close keeps it and prints its path.
func (r *Run) Close() error {
	defer r.lock.Close()
	if r.failed.Load() {
		if err := os.WriteFile(filepath.Join(r.Dir, failedMark), nil, 0o600); err != nil {
			return err
		}
		r.Say("this run failed; its state and its logs are in %s", r.Dir)
		return nil
	}
	return Wrap(os.RemoveAll(r.Dir), "remove the run's directory")
}

// Say writes a line to Progress.
func (r *Run) Say(format string, args ...any) {
	fmt.Fprintf(r.Progress, "sanity: "+format+"\n", args...)
}

func (r *Run) newDir(parent, prefix string, counter *atomic.Int64) (string, error) {
	dir := filepath.Join(parent, prefix+strconv.FormatInt(counter.Add(1), 10))
	return dir, Wrap(os.MkdirAll(dir, 0o755), "make a directory of the run")
}

// Await calls ask() until the result is nil. After the timeout, Await returns the last error.
func Await(ctx context.Context, timeout time.Duration, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for backoff := (Backoff{Max: 100 * time.Millisecond}); ; {
		if err := ask(); err == nil || backoff.Wait(ctx) != nil {
			return Wrap(err, "after %s", timeout)
		}
	}
}

// AtOnce runs n calls concurrently, and waits until all have returned.
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

// Unforked calls f, which opens and closes files of a volume, while this process cannot start a
// child. Otherwise a child has these files open between fork and exec, and keeps the volume in use.
func Unforked(f func()) {
	syscall.ForkLock.RLock()
	defer syscall.ForkLock.RUnlock()
	f()
}

// Share starts workers that take jobs from one queue, and waits until all workers have returned.
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

// Wrap puts a text and a colon before an error. If err is nil, it returns nil.
func Wrap(err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf(format+": %w", append(args, err)...)
}

// Must panics if err is not nil. With a deferred [Catch], the calling function returns err.
func Must(err error) {
	if err != nil {
		panic(failedStep{err})
	}
}

// Got panics like Must if err is not nil, and otherwise returns result.
func Got[T any](result T, err error) T {
	Must(err)
	return result
}

// Need returns a function that fails the test if err is not nil, and otherwise returns result.
func Need[T any](result T, err error) func(t Tester) T {
	return func(t Tester) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return result
	}
}

// Opened returns an open file. If err is not nil, it closes the file and returns err.
func Opened(file *os.File, err error) (*os.File, error) {
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	return file, nil
}

type failedStep struct{ error }

// Catch recovers a panic of Must or Got, and joins its error to *err. If one of the two errors
// wraps the other, *err becomes the wrapping error.
func Catch(err *error) {
	switch r := recover().(type) {
	case nil:
	case failedStep:
		if *err == nil || errors.Is(r.error, *err) {
			*err = r.error
		} else if !errors.Is(*err, r.error) {
			*err = errors.Join(*err, r.error)
		}
	default:
		panic(r)
	}
}

// Backoff waits between attempts. Each pause is twice as long as the one before.
type Backoff struct {
	// Next is the next pause; 0 means a millisecond. Max limits every pause.
	Next, Max time.Duration
}

// Wait makes the next pause. If ctx ends during the pause, Wait returns the error of ctx.
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

// A process has to end within StopTimeout after SIGTERM, or stopGrace after SIGQUIT or SIGKILL.
const (
	StopTimeout = 30 * time.Second
	stopGrace   = 10 * time.Second
)

type process struct {
	name string
	// log is the path of the file with the program's output.
	log string
	cmd *exec.Cmd
	// lines gets the first line of the standard output, and is closed when the program has ended.
	lines chan string
	// done is closed when the program has ended. After that, err is the result.
	done chan struct{}
	err  error
}

func startProcess(name, log string, command, env []string, files ...*os.File) (*process, error) {
	file, err := os.OpenFile(log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return nil, fmt.Errorf("open the log of %s: %w", name, err)
	}
	cmd := exec.Command(command[0], command[1:]...)
	cmd.Env = append(Environ(), env...)
	cmd.Stderr, cmd.ExtraFiles = file, files
	cmd.SysProcAttr = programAttr()
	stdout, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start %s: %w", name, err), file.Close())
	}
	p := &process{name: name, log: log, cmd: cmd,
		lines: make(chan string, 1), done: make(chan struct{})}
	go p.watch(stdout, file)
	return p, nil
}

// Environ returns this process's environment without the variables that configure this project's
// programs. It sets GORACE, so that a program with the race detector ends without a second's delay.
func Environ() []string {
	return append([]string{"GORACE=atexit_sleep_ms=0"},
		slices.DeleteFunc(os.Environ(), func(entry string) bool {
			return strings.HasPrefix(entry, "OXIDE_") || strings.HasPrefix(entry, "CSI_")
		})...)
}

func (p *process) watch(stdout io.Reader, log *os.File) {
	defer close(p.lines)
	defer close(p.done)
	defer log.Close()
	reader := bufio.NewReader(stdout)
	if line, err := reader.ReadString('\n'); err == nil {
		p.lines <- line
	}
	_, err := io.Copy(log, reader)
	p.err = errors.Join(p.cmd.Wait(), err)
}

func (p *process) firstLine(ctx context.Context) (string, error) {
	select {
	case line, printed := <-p.lines:
		if !printed {
			return "", p.ended()
		}
		return line, nil
	case <-ctx.Done():
		return "", fmt.Errorf("%s printed nothing on its standard output: %w\n%s",
			p.name, ctx.Err(), p.tail())
	}
}

// ended returns an error with the end of the log, for a program that should still run.
func (p *process) ended() error {
	return fmt.Errorf("%s ended unexpectedly (%s); the end of %s:\n%s",
		p.name, p.cmd.ProcessState, p.log, p.tail())
}

func (p *process) PID() int { return p.cmd.Process.Pid }

func (p *process) Running() bool {
	if p == nil {
		return false
	}
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// stop sends SIGTERM. It returns an error if the program does not end in time or its exit code is
// not 0. The exit code after a data race is 66.
func (p *process) stop() error {
	if !p.Running() {
		return p.ended()
	}
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	if !p.wait(StopTimeout) {
		p.quit()
		return fmt.Errorf("%s did not end within %s of SIGTERM; its stacks are at the end of %s",
			p.name, StopTimeout, p.log)
	}
	if p.err != nil {
		return fmt.Errorf("%s failed after SIGTERM: %w; the end of %s:\n%s",
			p.name, p.err, p.log, p.tail())
	}
	return nil
}

// quit ends the program with SIGQUIT, so that it writes the stacks of all goroutines to its log.
func (p *process) quit() {
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	if !p.wait(stopGrace) {
		p.kill()
	}
}

func (p *process) kill() {
	_ = p.cmd.Process.Kill()
	p.wait(stopGrace)
}

func (p *process) wait(timeout time.Duration) bool {
	select {
	case <-p.done:
		return true
	case <-time.After(timeout):
		return false
	}
}

func (p *process) tail() string { return TailOf(p.log, 4<<10) }

// TailOf returns whole lines from the end of a file, together at most size bytes.
func TailOf(path string, size int64) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	if offset := int64(len(data)) - size; offset > 0 {
		data = data[offset:]
		if _, rest, found := bytes.Cut(data, []byte("\n")); found {
			data = rest
		}
	}
	if len(data) == 0 {
		return "(" + filepath.Base(path) + " is empty)"
	}
	return string(data)
}

// Module is the path of this project's Go module.
const Module = "github.com/oxidecomputer/oxide-csi-plugin"

// Binary returns the path of a program of this module. The first call builds the program, with the
// race detector if this binary has it and the run is not Plain. On machines without Go, the
// variables OXIDE_CSI_PLUGIN and OXIDE_SIMULATOR name programs that are built already.
func (r *Run) Binary(ctx context.Context, program string) (string, error) {
	if plain := os.Getenv(PlainVariable); r.Plain && plain != "" {
		return filepath.Abs(filepath.Join(plain, program))
	}
	if ready := os.Getenv(BinaryVariable(program)); ready != "" {
		return filepath.Abs(ready)
	}
	r.building.Lock()
	defer r.building.Unlock()
	path := filepath.Join(r.Dir, "bin", program)
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	return path, r.build(ctx, program, path)
}

// PlainVariable names the environment variable with the directory of programs for Run.Plain.
const PlainVariable = "OXIDE_PLAIN_PROGRAMS"

// BinaryVariable returns the name of the environment variable with the path of a built program.
func BinaryVariable(program string) string {
	return strings.ToUpper(strings.ReplaceAll(program, "-", "_"))
}

func (r *Run) command(ctx context.Context, program string) ([]string, error) {
	if command := r.Programs[program]; command != nil {
		return command, nil
	}
	path, err := r.Binary(ctx, program)
	return []string{path}, err
}

func (r *Run) build(ctx context.Context, program, path string) error {
	args, how := []string{"build", "-o", path}, ""
	if raceDetector() && !r.Plain {
		args, how = append(args, "-race"), " with the race detector"
	}
	r.Say("building %s%s", program, how)
	start := time.Now()
	args = append(args, Module+"/cmd/"+program)
	if out, err := exec.CommandContext(ctx, "go", args...).CombinedOutput(); err != nil {
		_ = os.Remove(path) // the next call builds it again
		return fmt.Errorf("build %s: %w\n%s", program, err, out)
	}
	r.Say("built %s in %.1fs", program, time.Since(start).Seconds())
	return nil
}

func raceDetector() bool {
	info, ok := debug.ReadBuildInfo()
	return ok && slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
}
