package kube

import (
	"os/exec"
	"runtime"
	"syscall"
)

// runMortal runs a command that the kernel kills when this process dies. The signal is bound to the
// thread that starts the command, so the thread waits for it.
func runMortal(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}
