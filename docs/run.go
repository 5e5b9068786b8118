package docs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// Session runs the commands of a page.
type Session struct {
	// Root is the directory of the repository, in which the commands run.
	Root string
	// Dir is for the files that the commands create (it becomes TMPDIR), and for their output.
	Dir string
	// Env is the complete environment of the commands.
	Env []string
	// User runs the commands, and has to be able to write to Dir. Nil means the current user.
	User *syscall.Credential
}

// endGrace is the time in which the remaining processes of a page have to end after a signal.
const endGrace = 30 * time.Second

// Run runs blocks in one bash -e. It returns an error if a block fails or lacks the output that its
// class demands, or if a process remains.
func (s Session) Run(ctx context.Context, blocks []Block) (err error) {
	log, err := os.Create(filepath.Join(s.Dir, "session.log"))
	if err != nil {
		return fmt.Errorf("keep the output of the commands: %w", err)
	}
	defer func() { err = errors.Join(err, log.Close()) }()
	script := filepath.Join(s.Dir, "session.sh")
	if err := os.WriteFile(script, []byte(s.script(blocks)), 0o644); err != nil {
		return fmt.Errorf("write the commands: %w", err)
	}
	bash := exec.CommandContext(ctx, "bash", "-e", "-o", "pipefail", script)
	bash.Dir, bash.Stdout, bash.Stderr = s.Root, log, log
	bash.Env = slices.Concat(s.Env, []string{"TMPDIR=" + s.Dir})
	// The process group also contains the commands' background processes.
	bash.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: s.User}
	bash.Cancel = func() error { return syscall.Kill(-bash.Process.Pid, syscall.SIGTERM) }
	bash.WaitDelay = endGrace
	if err := bash.Start(); err != nil {
		return fmt.Errorf("run the commands: %w", err)
	}
	failed := bash.Wait()
	left := endGroup(bash.Process.Pid)
	if failed != nil {
		return fmt.Errorf("%w; the end of the session:\n%s", failed, s.end(blocks))
	}
	return errors.Join(left, s.printed(blocks))
}

// script returns a bash script that runs all blocks, and writes the output of each to a file.
func (s Session) script(blocks []Block) string {
	var script strings.Builder
	for i, b := range blocks {
		fmt.Fprintf(&script, "echo '== %s' >&2\n{\n%s\n} >'%s'\n", b.At, b.Text, s.output(i))
	}
	return script.String()
}

func (s Session) output(block int) string {
	return filepath.Join(s.Dir, fmt.Sprintf("block-%d.out", block))
}

// printed checks that each block has printed the text that its class demands.
func (s Session) printed(blocks []Block) error {
	var errs []error
	for i, b := range blocks {
		out, err := os.ReadFile(s.output(i))
		if err == nil && !strings.Contains(string(out), b.Prints) {
			err = fmt.Errorf("%s: expected the block to print %q, and it printed:\n%s", b.At, b.Prints,
				out)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// end returns the end of the log and of the output of the last block that ran.
func (s Session) end(blocks []Block) string {
	log, err := os.ReadFile(filepath.Join(s.Dir, "session.log"))
	if err != nil {
		return err.Error()
	}
	for i := range blocks {
		out, err := os.ReadFile(s.output(len(blocks) - 1 - i))
		if err == nil {
			return lastBytes(log) + "and it had printed:\n" + lastBytes(out)
		}
	}
	return lastBytes(log)
}

func lastBytes(data []byte) string { return string(data[max(0, len(data)-4<<10):]) }

// endGroup ends the processes of a process group, and returns an error if any was left.
func endGroup(group int) error {
	gone := func() bool { return errors.Is(syscall.Kill(-group, 0), syscall.ESRCH) }
	if gone() {
		return nil
	}
	err := errors.New("the page leaves processes behind: its last block has to end them")
	_ = syscall.Kill(-group, syscall.SIGTERM)
	for start := time.Now(); !gone(); {
		if time.Since(start) > endGrace {
			return errors.Join(err, syscall.Kill(-group, syscall.SIGKILL))
		}
		<-time.After(10 * time.Millisecond)
	}
	return err
}
