//go:build linux

package data_test

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/data"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

func TestACheckThatIsInterruptedLeavesNothing(t *testing.T) {
	b := newBench(t, harness.RackOptions{})
	for _, check := range data.Checks() {
		for _, after := range []time.Duration{20, 90, 400} {
			after *= time.Millisecond
			t.Run(check.ID+" after "+after.String(), func(t *testing.T) {
				ctx, cancel := context.WithTimeout(t.Context(), after)
				defer cancel()
				err := check.Run(ctx, b.Bench)
				if err != nil && strings.Contains(err.Error(), "remove what the check made") {
					t.Error(err)
				}
				if err := b.env.Balance(t.Context()); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}
