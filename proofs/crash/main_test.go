//go:build linux

package crash_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
	"github.com/oxidecomputer/oxide-csi-plugin/proofs/crash/trace"
)

// tracer is the environment variable that makes this binary run as a tracer.
const tracer = "CRASH_TRACER"

func TestMain(m *testing.M) {
	if os.Getenv(tracer) != "" {
		if err := trace.Serve(os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "tracer:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	namespace.Main(m)
}
