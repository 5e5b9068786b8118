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

// Session is the environment in which the commands of a page run.
type Session struct {
	// Root is the directory of the repository. A reader types the commands there.
	Root string
	// Dir is the directory for what the commands create: mktemp -d uses it. Their output is kept
	// there, too.
	Dir string
	// Env is the complete environment of the commands.
	Env []string
	// User is who runs the commands, who must be able to write to Dir; nil is this process's.
	User *syscall.Credential
}

// endGrace is how long processes that a page has left running may take to end.
const endGrace = 30 * time.Second

// Run runs blocks in one bash -e. It returns an error if a block fails, does not print what it
// promises, or leaves a process running.
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
	// Background processes of the commands belong to this group.
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

// script returns the commands of the session. The output of each block goes to a file of its own.
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

// printed checks that the blocks have printed what they promise.
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

// end returns the end of the log, and the output of the block at which the session ended.
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

// endGroup ends the processes of a group. It returns an error if there were any.
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
