package kube

import (
	"os/exec"
	"runtime"
	"syscall"
)

// runMortal runs a command, which the kernel kills when this process dies or when the thread that
// started the command ends. So runMortal keeps that thread until the command has ended.
func runMortal(cmd *exec.Cmd) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd.Run()
}
