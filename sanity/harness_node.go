package sanity

import (
	"context"
	"maps"
	"path/filepath"
)

// NodeOptions says how to start the driver's node service without a rack.
type NodeOptions struct {
	// Guest is a directory with sys and dev in it, as the driver is to see them.
	Guest string
	// InstanceID is the UUID of the instance that the guest is.
	InstanceID string
	// Program is a driver built elsewhere; empty is the one that the run builds.
	Program string
	// Env overrides what the harness sets, and Args are further arguments.
	Env  map[string]string
	Args []string
}

// StartNode starts the driver in mode node, in a guest that the caller made.
func (r *Run) StartNode(ctx context.Context, options NodeOptions) (*Plugin, error) {
	env := map[string]string{
		"OXIDE_INSTANCE_ID": options.InstanceID,
		"OXIDE_SYSFS_ROOT":  filepath.Join(options.Guest, "sys"),
		"OXIDE_DEV_ROOT":    filepath.Join(options.Guest, "dev"),
	}
	maps.Copy(env, options.Env)
	plugin, err := r.newPlugin(r.Dir, &r.plugs, PluginOptions{
		Mode: ModeNode, Env: env, Args: options.Args, Program: options.Program,
	})
	if err != nil {
		return nil, err
	}
	return plugin, plugin.Start(ctx)
}
