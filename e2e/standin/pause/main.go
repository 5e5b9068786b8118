// Command pause holds a pod's namespaces open, in the place of registry.k8s.io/pause where no
// registry can be reached: it waits until it is told to end, and takes in children that their
// parents left.
package main

import (
	"os"
	"os/signal"
	"syscall"
)

func main() {
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGCHLD)
	wait(signals, reap)
}

// wait returns at the first signal that asks for the end.
func wait(signals <-chan os.Signal, reap func()) {
	for s := range signals {
		if s != syscall.SIGCHLD {
			return
		}
		reap()
	}
}

// reap takes in every child that has ended.
func reap() {
	for {
		pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil)
		if pid <= 0 && err != syscall.EINTR {
			return
		}
	}
}
