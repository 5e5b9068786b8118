package main

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
)

func TestPauseReapsChildrenAndEndsOnASignal(t *testing.T) {
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

func TestAChildThatEndedIsReaped(t *testing.T) {
	child := exec.CommandContext(t.Context(), "true")
	output, err := child.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	// The child closes its output when it ends; the kernel may need a moment more.
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
