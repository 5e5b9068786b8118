package filesystem

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csierr"
)

type toolResult struct {
	Exit   int
	Stdout string
	Stderr string
}

// runTool runs a program to its end and returns its output and exit code. It returns an error only
// if the program could not run. It takes no context, because nothing may interrupt a started
// program. The files in inherit become the program's descriptors from 3 on.
//
// The kernel kills the program if the driver dies. So runTool is for programs that a later call
// runs again from the start. A surviving mkfs would write to the disk while the next driver reads
// it.
func runTool(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(&syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}, inherit, name, args)
}

// runRepair does what runTool does, but the program continues if the driver dies, because an
// interrupted repair or resize damages the filesystem. The program keeps the device open with
// O_EXCL until it ends.
func runRepair(inherit []*os.File, name string, args ...string) (toolResult, error) {
	return runProgram(nil, inherit, name, args)
}

// inherited is the path of the first descriptor that a program inherits. A program that opens this
// path opens the verified device, even if the disk's own path now leads to another device.
const inherited = "/proc/self/fd/3"

// extConfig replaces the machine's mke2fs.conf and e2fsck.conf, which would choose the layout of a
// new ext3 or ext4 and the way a check repairs it. mke2fs gets the features as arguments.
const extConfig = `[defaults]
blocksize = 4096
inode_ratio = 16384
default_mntopts = acl,user_xattr
enable_periodic_fsck = 0
[fs_types]
ext3 = {
	inode_size = 256
}
ext4 = {
	inode_size = 256
}
small = {
	blocksize = 1024
	inode_ratio = 4096
}
`

func runProgram(attr *syscall.SysProcAttr, inherit []*os.File, name string, args []string) (
	result toolResult, err error) {
	// After the driver's death nobody reads a pipe. The program writes to files in memory instead.
	stdout, err := memoryFile(name, "")
	if err != nil {
		return result, err
	}
	defer func() { _ = stdout.Close() }()
	stderr, err := memoryFile(name, "")
	if err != nil {
		return result, err
	}
	defer func() { _ = stderr.Close() }()
	config, err := memoryFile(name, extConfig)
	if err != nil {
		return result, err
	}
	defer func() { _ = config.Close() }()
	path := fmt.Sprintf("/proc/self/fd/%d", 3+len(inherit))
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	cmd.ExtraFiles = append(slices.Clone(inherit), config)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "LC_ALL=C", "MKE2FS_CONFIG=" + path,
		"E2FSCK_CONFIG=" + path}
	cmd.SysProcAttr = attr
	// The kernel sends Pdeathsig when the thread that started the child ends, so keep the thread.
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
	if result.Stdout, err = contents(stdout); err != nil {
		return result, err
	}
	result.Stderr, err = contents(stderr)
	return result, err
}

func memoryFile(name, content string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create a file in memory for %s: %w", name, err)
	}
	f := os.NewFile(uintptr(fd), name)
	_, err = f.WriteString(content)
	return f, err
}

// contents returns the first MiB of a program's output.
func contents(f *os.File) (string, error) {
	const maxBytes = 1 << 20
	b, err := io.ReadAll(io.NewSectionReader(f, 0, maxBytes))
	return string(b), err
}

func (r toolResult) failure(name, path string) error {
	return csierr.New(csierr.NodeToolFailed, "%s on %s ended with status %d: %s", name, path, r.Exit,
		csierr.OutputTail(r.Stdout+"\n"+r.Stderr))
}
