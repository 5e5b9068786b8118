package flakydisk

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
)

// guard is a process that lives as long as this one, and then unmounts a filesystem by force, so
// that nobody waits for it any more.
//
// The kernel does that by itself when the last one closes the filesystem's connection. But a
// process that is killed keeps its files open for as long as one of its threads waits for a disk
// in a way that no signal ends; and if that disk is its own, both wait for ever.
type guard struct {
	process *exec.Cmd
	ended   chan struct{}
}

// guardScript unmounts its first argument when it is told to end. It prints a line when it is ready
// for that, and waits on its stdin, where nothing comes.
const guardScript = `end() { trap "" TERM; exec umount -l -f -- "$0"; }
trap end TERM
echo
read -r nothing
end`

// newGuard starts a guard of what is about to be mounted at a directory.
func newGuard(dir string) (*guard, error) {
	g := &guard{exec.Command("/bin/sh", "-c", guardScript, dir), make(chan struct{})}
	// It gets no signal of a terminal's, but the kernel's when the thread that started it ends.
	g.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	_, err := g.process.StdinPipe()
	out, outErr := g.process.StdoutPipe()
	if err := errors.Join(err, outErr); err != nil {
		return nil, err
	}
	started := make(chan error)
	go func() {
		// The thread does nothing but wait, so that it ends with the process and not before.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer close(g.ended)
		err := g.process.Start()
		if err == nil {
			_, err = out.Read(make([]byte, 1))
		}
		started <- err
		if g.process.Process != nil {
			_ = g.process.Wait()
		}
	}()
	if err := <-started; err != nil {
		g.close()
		return nil, fmt.Errorf("start a guard of the disks: %w", err)
	}
	return g, nil
}

// close ends the guard. It unmounts nothing.
func (g *guard) close() {
	if g.process.Process != nil {
		_ = g.process.Process.Kill()
	}
	<-g.ended
}
