package proof

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/namespace"
)

// Main runs a package's tests in this binary, started again in a mount namespace of its own: a
// proof sees no mounts of another, and what a failed one leaves mounted is gone with it. Call it
// from TestMain.
func Main(m *testing.M) {
	inside, err := namespace.Inside()
	code := 1
	switch {
	case err != nil:
	case inside:
		code = m.Run()
	default:
		code, err = namespace.Run(context.Background())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "the proofs make loop devices and mount them:", err)
	}
	os.Exit(code)
}
