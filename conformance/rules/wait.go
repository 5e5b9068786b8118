package rules

import (
	"context"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// stateTimeout limits how long a rack takes to start or stop an instance.
const stateTimeout = 3 * time.Minute

// patience limits how long a rack takes for a change that it makes by itself.
const patience = time.Minute

// Await waits until an instance is in a state. It sends at most one request a second, because a
// real rack takes many seconds. A failed read ends it, because the transport has already repeated
// what may be repeated.
func (r *TestedRack) Await(ctx context.Context, instance string, want oxide.InstanceState) error {
	ctx, cancel := context.WithTimeout(ctx, stateTimeout)
	defer cancel()
	for backoff := (harness.Backoff{Max: time.Second}); ; {
		seen, err := r.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err != nil || seen.RunState == want {
			return err
		}
		if backoff.Wait(ctx) != nil {
			return fmt.Errorf("after %s: instance %s is %s, not %s", stateTimeout, instance,
				seen.RunState, want)
		}
	}
}
