//go:build linux

package data_test

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

func TestACheckThatIsInterruptedLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t, harness.RackOptions{})
	type interruption struct {
		data.Check
		after time.Duration
	}
	var all []interruption
	for _, check := range data.Checks() {
		for _, after := range []time.Duration{20, 90, 400} {
			all = append(all, interruption{check, after * time.Millisecond})
		}
	}
	for _, test := range short.Some(t, 5, all) {
		t.Run(test.ID+" after "+test.after.String(), func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), test.after)
			defer cancel()
			err := test.Run(ctx, b.Bench)
			wantNothingLeft(t, b, err)
		})
	}
}

func TestACheckWhoseCreationIsNotAnsweredLeavesNothing(t *testing.T) {
	t.Parallel()
	b := newBench(t, harness.RackOptions{})
	// What is written does not matter.
	b.Accesses, b.Blocks = []string{"block"}, 16
	for _, check := range short.Some(t, 3, data.Checks()) {
		for number, more := 1, true; more; number++ {
			for _, made := range []bool{false, true} {
				ctx, cancel := context.WithCancel(t.Context())
				unheard := &unheard{ControllerClient: b.Controller, cancel: cancel, left: number,
					made: made}
				bench := *b.Bench
				bench.Controller = unheard
				err := check.Run(ctx, &bench)
				cancel()
				if more = unheard.left <= 0; !more { // the check makes fewer creations
					break
				}
				t.Run(fmt.Sprintf("%s creation %d made %t", check.ID, number, made),
					func(t *testing.T) {
						if err == nil {
							t.Error("the check succeeded although it was interrupted")
						}
						wantNothingLeft(t, b, err)
					})
			}
		}
	}
}

// unheard interrupts a check in a creation, before or after the creation takes effect.
type unheard struct {
	csi.ControllerClient
	cancel context.CancelFunc
	left   int // creations up to the interrupted one
	made   bool
}

func (u *unheard) CreateVolume(
	ctx context.Context, req *csi.CreateVolumeRequest, opts ...grpc.CallOption,
) (*csi.CreateVolumeResponse, error) {
	return interrupt(ctx, u, u.ControllerClient.CreateVolume, req, opts)
}

func (u *unheard) CreateSnapshot(
	ctx context.Context, req *csi.CreateSnapshotRequest, opts ...grpc.CallOption,
) (*csi.CreateSnapshotResponse, error) {
	return interrupt(ctx, u, u.ControllerClient.CreateSnapshot, req, opts)
}

func interrupt[Q, R any](
	ctx context.Context, u *unheard, call func(context.Context, Q, ...grpc.CallOption) (*R, error),
	req Q, opts []grpc.CallOption,
) (*R, error) {
	u.left--
	if u.left != 0 || u.made {
		resp, err := call(ctx, req, opts...)
		if u.left != 0 || err != nil {
			return resp, err
		}
	}
	u.cancel()
	return nil, status.FromContextError(context.Canceled).Err()
}

// wantNothingLeft demands that the check removed everything that it created.
func wantNothingLeft(t *testing.T, b *bench, err error) {
	t.Helper()
	if err != nil && strings.Contains(err.Error(), "remove what the check made") {
		t.Error(err)
	}
	if err := b.env.Balance(t.Context()); err != nil {
		t.Fatal(err)
	}
}
