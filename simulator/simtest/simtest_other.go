//go:build !linux

package simtest

import (
	"os"
	"testing"
)

// Main runs the tests, which report that they need Linux.
func Main(m *testing.M) { os.Exit(m.Run()) }

// Mount fails the test.
func Mount(t *testing.T, _, _ string, _ ...string) {
	t.Helper()
	t.Fatal("this test needs Linux")
}
