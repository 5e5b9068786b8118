//go:build !linux

package simtest

import "testing"

// Mount fails the test, because this system has no mounts for it.
func Mount(t *testing.T, _, _ string, _ ...string) {
	t.Helper()
	t.Fatal("this test needs Linux")
}
