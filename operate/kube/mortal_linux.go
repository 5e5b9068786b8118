package kube

import (
	"os/exec"
	"runtime"
	"syscall"
)

// runMortal runs a command, which the kernel kills when this process dies. The kernel also kills it
// when the thread that started it ends. So runMortal keeps the thread until the command has ended.
func runMortal(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}
