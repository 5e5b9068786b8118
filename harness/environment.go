package harness

import (
	"context"
	"errors"
)

// Environment is a rack with its drivers, and a ledger that was taken before they did
// anything. The proofs build their own environments on it.
type Environment struct {
	Rack *Rack
	// Plugins are the drivers, in the order in which they were started.
	Plugins []*Plugin
	// Baseline is the ledger with which Balance compares.
	Baseline Ledger
}

// StartEnvironment starts a rack without drivers.
func (r *Run) StartEnvironment(ctx context.Context, options RackOptions) (*Environment, error) {
	rack, err := r.StartRack(ctx, options)
	return &Environment{Rack: rack}, err
}

// StartPlugin starts a driver and waits until it is ready.
func (e *Environment) StartPlugin(ctx context.Context, options PluginOptions) (*Plugin, error) {
	plugin, err := e.Rack.StartPlugin(ctx, options)
	if err != nil {
		return plugin, err
	}
	e.Plugins = append(e.Plugins, plugin)
	return plugin, plugin.AwaitReady(ctx)
}

// StartNodes starts a node driver in every instance, and returns them by the instance's name.
func (e *Environment) StartNodes(ctx context.Context, options PluginOptions) (
	map[string]*Plugin, error) {
	options.Mode = ModeNode
	nodes := map[string]*Plugin{}
	for _, instance := range e.Rack.Instances {
		options.Instance = instance.Name
		plugin, err := e.StartPlugin(ctx, options)
		if err != nil {
			return nil, err
		}
		nodes[instance.Name] = plugin
	}
	return nodes, nil
}

// TakeBaseline takes the ledger with which Balance compares.
func (e *Environment) TakeBaseline(ctx context.Context) (err error) {
	e.Baseline, err = e.Rack.Ledger(ctx, e.Plugins...)
	return err
}

// Balance waits until nothing exists that is not in the baseline, and otherwise returns an
// error.
func (e *Environment) Balance(ctx context.Context) error {
	return e.Rack.Balance(ctx, e.Baseline, e.Plugins...)
}

// Compare compares with the baseline once, without waiting. It ends no process.
func (e *Environment) Compare(ctx context.Context) error {
	return e.Rack.compare(ctx, e.Baseline, e.Plugins...)
}

// Close stops the drivers and the rack. It returns an error if one of them fails or leaves
// something behind.
func (e *Environment) Close() error {
	var errs []error
	for _, plugin := range e.Plugins {
		errs = append(errs, plugin.Stop())
	}
	if e.Rack != nil && e.Rack.Running() {
		errs = append(errs, e.Rack.Stop())
	}
	return errors.Join(errs...)
}
