package proof

import (
	"fmt"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/namespace"
)

// Main runs a package's tests in this binary, started again in a mount namespace of its own: a
// proof sees no mounts of another, and what a failed one leaves mounted is gone with it. Call it
// from TestMain.
func Main(m *testing.M) {
	if err := namespace.Enter(); err != nil {
		fmt.Fprintln(os.Stderr, "the proofs make loop devices and mount them:", err)
		os.Exit(1)
	}
	os.Exit(m.Run())
}
