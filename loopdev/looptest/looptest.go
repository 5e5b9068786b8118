// Package looptest contains helpers for tests of loop devices and of the simulator.
package looptest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// Must fails the test if err is not nil.
func Must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Got returns a function that fails the test if err is not nil, and otherwise returns the value.
func Got[T any](value T, err error) func(*testing.T) T {
	return func(t *testing.T) T {
		t.Helper()
		Must(t, err)
		return value
	}
}

// Await waits until holds() is true. It fails the test if this takes too long.
func Await(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timeout: %s", what)
		}
	}
}

// NeedRoot fails the test if it does not run as root, which loop devices need. It does not skip the
// test, because a skipped test looks like a passed one.
func NeedRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Fatal("this test attaches loop devices: run it as root")
	}
}

// Command runs a program and returns its output. It fails the test if the program fails.
func Command(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), name, args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// Mount mounts a device, and unmounts it at the end of the test.
func Mount(t *testing.T, device, dir string, options ...string) {
	t.Helper()
	Command(t, "mount", append(options, device, dir)...)
	t.Cleanup(func() {
		// The test may have unmounted the device, or cut it off, so ignore errors.
		_ = exec.Command("umount", dir).Run()
		_ = exec.Command("umount", "--lazy", dir).Run()
	})
}
