package proof

import (
	"context"
	"errors"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// Environment is a rack with its drivers, and with bystanders in one of its instances. A trial
// that ends clean leaves it for the next one.
type Environment struct {
	*harness.Environment
	Proof *Proof
	// Bystanders are other disks of an instance, which no call may change.
	Bystanders *RackBystanders
}

// StartEnvironment starts a rack. The instance gets bystanders, unless its name is empty.
func (p *Proof) StartEnvironment(ctx context.Context, run *harness.Run,
	options harness.RackOptions, instance string, member Member) (*Environment, error) {
	started, err := run.StartEnvironment(ctx, options)
	env := &Environment{Environment: started, Proof: p, Bystanders: &RackBystanders{}}
	if err == nil && instance != "" {
		env.Bystanders, err = NewRackBystanders(ctx, env.Rack, instance, member, p.Bystanders)
	}
	return env, err
}

// Close compares the bystanders, and stops the drivers and the rack. It returns an error if one of
// them fails or leaves something behind.
func (e *Environment) Close() error {
	return errors.Join(e.Bystanders.Close(), e.Environment.Close())
}

// Abandon kills all processes after a failure, and releases their mounts and devices. The files
// remain until the run ends.
func (e *Environment) Abandon(ctx context.Context) error {
	errs := []error{e.Bystanders.Suspend()}
	for _, plugin := range e.Plugins {
		plugin.Kill()
	}
	e.Rack.Kill()
	errs = append(errs, EndMountsBelow(e.Rack.Dir))
	_, err := loopdev.DetachBelow(ctx, e.Rack.Dir)
	return errors.Join(append(errs, err)...)
}
