package flakydisk

import (
	"errors"
	"fmt"
	"os/exec"
	"runtime"
	"syscall"
)

// guard is a process that waits until this process ends and then unmounts a filesystem by
// force, so that no other process waits for the filesystem any more.
//
// The kernel does the same when the last user closes the filesystem's connection. But a killed
// process keeps its files open as long as one of its threads waits for a disk and cannot be
// interrupted by a signal. If this process itself serves that disk, both wait for ever.
type guard struct {
	process *exec.Cmd
	ended   chan struct{}
}

// guardScript unmounts its first argument when it gets SIGTERM. It prints a line when it is
// ready, and then waits on its stdin, to which nothing is written.
const guardScript = `end() { trap "" TERM; exec umount -l -f -- "$0"; }
trap end TERM
echo
read -r nothing
end`

// newGuard starts a guard of a filesystem that will be mounted at a directory.
func newGuard(dir string) (*guard, error) {
	g := &guard{exec.Command("/bin/sh", "-c", guardScript, dir), make(chan struct{})}
	// The guard gets no signals from a terminal. The kernel sends it SIGTERM when the thread that
	// started it ends.
	g.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	_, err := g.process.StdinPipe()
	out, outErr := g.process.StdoutPipe()
	if err := errors.Join(err, outErr); err != nil {
		return nil, err
	}
	started := make(chan error)
	go func() {
		// The thread only waits, so that it ends together with this process and not earlier.
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

// close ends the guard without unmounting anything.
func (g *guard) close() {
	if g.process.Process != nil {
		_ = g.process.Process.Kill()
	}
	<-g.ended
}
