package kube

import (
	"os/exec"
	"runtime"
	"syscall"
)

// runMortal runs a command that the kernel kills when this process dies. The kernel kills it when
// the thread that started it ends, so the thread stays locked until the command has ended.
func runMortal(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}
