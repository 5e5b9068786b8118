package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestItTakesInChildrenAndEndsWhenTold(t *testing.T) {
	signals := make(chan os.Signal, 3)
	signals <- syscall.SIGCHLD
	signals <- syscall.SIGCHLD
	signals <- syscall.SIGTERM
	reaped := 0
	wait(signals, func() { reaped++ })
	if reaped != 2 {
		t.Errorf("reaped %d times, want once for each of two signals of a child", reaped)
	}
}

func TestAnEndedChildIsTakenIn(t *testing.T) {
	child := exec.CommandContext(t.Context(), "true")
	output, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	// The end of its output is the end of the child, give or take the kernel's last touch.
	if _, err := output.Read(make([]byte, 1)); err == nil {
		t.Fatal("true wrote something")
	}
	for syscall.Kill(child.Process.Pid, 0) == nil && t.Context().Err() == nil {
		reap()
	}
	if err := syscall.Kill(child.Process.Pid, 0); err != syscall.ESRCH {
		t.Errorf("kill(child, 0) = %v after reap, want %v", err, syscall.ESRCH)
	}
}
