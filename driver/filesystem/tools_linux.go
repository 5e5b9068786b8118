package filesystem

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/driver/csierr"
)

// toolResult is what a program left behind.
type toolResult struct {
	Exit   int
	Stdout string
	Stderr string
}

// runTool runs a program that dies with the driver, to its end, and reports its exit status,
// whatever it is; an error means that it could not be run. There is no context on purpose: what
// began has to end. inherit becomes descriptors 3 and up.
//
// Dying with the driver is for programs whose work is done again from the start: a mkfs that
// lived on would write to a disk that the next driver looks at.
func runTool(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(&syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}, inherit, name, args)
}

// runRepair runs a program that goes on when the driver dies: a repair or a resize that is cut off
// leaves worse than it found. It holds the device exclusively, so nobody comes in between.
func runRepair(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(nil, inherit, name, args)
}

// inherited is the path of the first descriptor that a program inherits. A program that opens a
// disk by it cannot be led to another one, whatever becomes of the disk's own path.
const inherited = "/proc/self/fd/3"

func runProgram(attr *syscall.SysProcAttr, inherit []*os.File, name string, args []string) (
	result toolResult, err error) {
	// Its output goes to memory and not through a pipe, which a dead driver would not empty.
	output, err := memoryFile(name)
	if err != nil {
		return result, err
	}
	defer func() { _ = output.Close() }()
	complaints, err := memoryFile(name)
	if err != nil {
		return result, err
	}
	defer func() { _ = complaints.Close() }()
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr, cmd.ExtraFiles = output, complaints, inherit
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C"}
	cmd.SysProcAttr = attr
	// A child is bound to the life of the thread that started it.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	err = cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.Exited():
		result.Exit = exit.ExitCode()
	case err != nil:
		return result, csierr.New(csierr.NodeToolFailed, "run %s: %w", name, err)
	}
	if result.Stdout, err = contents(output); err != nil {
		return result, err
	}
	result.Stderr, err = contents(complaints)
	return result, err
}

// memoryFile is a file without a name, kept in memory.
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make room for the output of %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// contents is what a program wrote, as much as a person reads.
func contents(f *os.File) (string, error) {
	const most = 1 << 20
	b, err := io.ReadAll(io.NewSectionReader(f, 0, most))
	return string(b), err
}

// failure is the error for a program that ended badly, with the end of what it said.
func (r toolResult) failure(name, path string) error {
	return csierr.New(csierr.NodeToolFailed, "%s on %s ended with status %d: %s", name, path, r.Exit,
		csierr.LastWords(r.Stdout+"\n"+r.Stderr))
}
