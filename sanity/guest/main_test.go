//go:build linux

package guest_test

import (
	"context"
	"fmt"
	"os"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// TestMain makes this binary an agent when it is started as one.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == guest.Verb {
		if err := guest.Serve(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "agent:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	proof.Main(m)
}
