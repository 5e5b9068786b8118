//go:build linux

package guest_test

import (
	"context"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

// TestMain turns this binary into an agent when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == guest.Verb {
		os.Exit(guest.Main(context.Background()))
	}
	namespace.Main(m)
}
