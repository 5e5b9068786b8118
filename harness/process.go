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
	"strings"
	"sync"
	"syscall"
	"time"
)

// StopTimeout limits how long a process may take to end after SIGTERM, and stopGrace how long
// after SIGKILL.
const (
	StopTimeout = 30 * time.Second
	stopGrace   = 10 * time.Second
)

// process is a running program under test. Its output goes to a log file, and SIGTERM stops it.
type process struct {
	name string
	// log is the path of the file with its standard error.
	log string
	cmd *exec.Cmd
	// lines receives the first line of its standard output. The other lines go to the log.
	lines chan string
	// done is closed when the process has ended. Then err is the result.
	done chan struct{}
	err  error
}

// startProcess starts a program with the variables of env, which inherits files. It does not
// inherit variables of this process that configure our programs.
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

// Environ returns the environment of this process without the variables that configure our
// programs. It also turns off the pause of one second with which the race detector ends every
// program.
func Environ() []string {
	env := []string{"GORACE=atexit_sleep_ms=0"}
	for _, entry := range os.Environ() {
		if !strings.HasPrefix(entry, "OXIDE_") && !strings.HasPrefix(entry, "CSI_") {
			env = append(env, entry)
		}
	}
	return env
}

func (p *process) watch(stdout io.Reader, log *os.File) {
	defer close(p.done)
	defer log.Close()
	reader := bufio.NewReader(stdout)
	if line, err := reader.ReadString('\n'); err == nil {
		p.lines <- line
	}
	_, err := io.Copy(log, reader)
	p.err = errors.Join(p.cmd.Wait(), err)
}

// firstLine waits for the first line that the process prints on its standard output.
func (p *process) firstLine(ctx context.Context) (string, error) {
	select {
	case line := <-p.lines:
		return line, nil
	case <-p.done:
		// The process may have printed the line and ended before firstLine was called.
		select {
		case line := <-p.lines:
			return line, nil
		default:
			return "", p.ended()
		}
	case <-ctx.Done():
		return "", fmt.Errorf("%s printed nothing on its standard output: %w\n%s",
			p.name, ctx.Err(), p.tail())
	}
}

// ended returns an error that describes an unexpected end.
func (p *process) ended() error {
	return fmt.Errorf("%s ended unexpectedly (%s); the end of %s:\n%s",
		p.name, p.cmd.ProcessState, p.log, p.tail())
}

func (p *process) pid() int { return p.cmd.Process.Pid }

// running reports whether the process has not ended yet.
func (p *process) running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// stop asks the process to end. It returns an error unless the process ends in time with exit
// code 0. With the race detector a process that has a race ends with 66.
func (p *process) stop() error {
	if !p.running() {
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

// quit ends the process with SIGQUIT, so that it writes the stacks of all its goroutines to its
// log.
func (p *process) quit() {
	_ = p.cmd.Process.Signal(syscall.SIGQUIT)
	if !p.wait(stopGrace) {
		p.kill()
	}
}

// kill ends the process at once, as a power cut would.
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

// tail returns the end of the log.
func (p *process) tail() string { return TailOf(p.log, 4<<10) }

// TailOf returns the last whole lines of a file, at most size bytes.
func TailOf(path string, size int64) string {
	file, err := os.Open(path)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return err.Error()
	}
	offset := max(info.Size()-size, 0)
	data := make([]byte, info.Size()-offset)
	if _, err := file.ReadAt(data, offset); err != nil && !errors.Is(err, io.EOF) {
		return err.Error()
	}
	if offset > 0 {
		if _, rest, found := bytes.Cut(data, []byte("\n")); found {
			data = rest
		}
	}
	if len(data) == 0 {
		return "(" + filepath.Base(path) + " is empty)"
	}
	return string(data)
}

// Module is the path of the module that contains the two programs.
const Module = "github.com/oxidecomputer/oxide-csi-plugin"

// binaries builds each program once per run. The variables OXIDE_CSI_PLUGIN and
// OXIDE_SIMULATOR name programs that are built already, for machines without Go.
type binaries struct {
	// mu guards built, which has the path of each program that was built.
	mu    sync.Mutex
	built map[string]string
}

// Binary returns the path of a program of this module. The first call builds the program, with
// the race detector if this binary has it and the run is not plain.
func (r *Run) Binary(ctx context.Context, program string) (string, error) {
	if plain := os.Getenv(PlainVariable); r.Plain && plain != "" {
		return filepath.Abs(filepath.Join(plain, program))
	}
	if ready := os.Getenv(BinaryVariable(program)); ready != "" {
		return filepath.Abs(ready)
	}
	r.bins.mu.Lock()
	defer r.bins.mu.Unlock()
	if path := r.bins.built[program]; path != "" {
		return path, nil
	}
	path := filepath.Join(r.Dir, "bin", program)
	if err := r.build(ctx, program, path); err != nil {
		return "", err
	}
	if r.bins.built == nil {
		r.bins.built = map[string]string{}
	}
	r.bins.built[program] = path
	return path, nil
}

// PlainVariable is the environment variable that names the directory of the programs of plain
// runs.
const PlainVariable = "OXIDE_PLAIN_PROGRAMS"

// BinaryVariable returns the name of the environment variable that names a program that is
// built already.
func BinaryVariable(program string) string {
	return strings.ToUpper(strings.ReplaceAll(program, "-", "_"))
}

// command returns the command that starts a program, without its arguments.
func (r *Run) command(ctx context.Context, program string) ([]string, error) {
	if command := r.Programs[program]; command != nil {
		return command, nil
	}
	path, err := r.Binary(ctx, program)
	return []string{path}, err
}

func (r *Run) build(ctx context.Context, program, path string) error {
	args := []string{"build", "-o", path}
	how := ""
	if RaceDetector && !r.Plain {
		args = append(args, "-race")
		how = " with the race detector"
	}
	r.Say("building %s%s", program, how)
	start := time.Now()
	cmd := exec.CommandContext(ctx, "go", append(args, Module+"/cmd/"+program)...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("build %s: %w\n%s", program, err, out)
	}
	r.Say("built %s in %.1fs", program, time.Since(start).Seconds())
	return nil
}
