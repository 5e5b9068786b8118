// Package simtest has helpers for the tests of the simulator's packages.
package simtest

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// NoError fails the test if err is not nil.
func NoError(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Eventually waits until holds returns true, and fails the test if that takes too long.
func Eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !holds(); <-time.After(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("timeout: %s", what)
		}
	}
}

// NeedRoot fails the test if it does not run as root, which loop devices need. A skipped test would
// look as if it had passed.
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

// Mount mounts a device until the test ends.
func Mount(t *testing.T, device, dir string, options ...string) {
	t.Helper()
	Command(t, "mount", append(options, device, dir)...)
	t.Cleanup(func() {
		// Ignore errors: the test may have unmounted the device, or cut it off.
		_ = exec.Command("umount", dir).Run()
		_ = exec.Command("umount", "--lazy", dir).Run()
	})
}
