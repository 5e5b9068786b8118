package rules

import (
	"context"
	"fmt"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// stateTimeout is how long a rack may take to start or stop an instance.
const stateTimeout = 3 * time.Minute

// patience is how long a rack may take for something that it does by itself.
const patience = time.Minute

func (r *Rack) await(ctx context.Context, instance string, want oxide.InstanceState) error {
	return harness.Await(ctx, stateTimeout, func() error {
		seen, err := r.Client.InstanceView(ctx,
			oxide.InstanceViewParams{Instance: oxide.NameOrId(instance)})
		if err == nil && seen.RunState != want {
			err = fmt.Errorf("instance %s is %s, not %s", instance, seen.RunState, want)
		}
		return err
	})
}
