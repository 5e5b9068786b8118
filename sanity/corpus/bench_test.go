//go:build linux

package corpus_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// bench is a guest with a driver in it, where one trial after the other is made.
type bench struct {
	run    *harness.Run
	dir    string
	guest  proof.Guest
	plugin *harness.Plugin
	bases  *bases
	// bystanders are other disks of the guest, which no call may change.
	bystanders *proof.GuestBystanders
	// forged counts comparisons of forged files.
	forged *proof.Invariant
	// bin comes first in the driver's PATH. A trial may put a program there.
	bin string
	// evidence keeps the disks of which something is wrong; kept is set when there are some.
	evidence, kept bool
}

// newBench starts a driver: the run's own, or the program.
func newBench(
	ctx context.Context, run *harness.Run, bases *bases, program string, env map[string]string,
) (*bench, error) {
	dir, err := os.MkdirTemp(run.Dir, "bench-")
	if err != nil {
		return nil, err
	}
	b := &bench{run: run, dir: dir, bases: bases, bin: filepath.Join(dir, "bin"),
		bystanders: &proof.GuestBystanders{}, forged: &proof.Invariant{}}
	if err := os.Mkdir(b.bin, 0o755); err != nil {
		return nil, err
	}
	if b.guest, err = proof.NewGuest(filepath.Join(dir, "guest")); err != nil {
		return nil, fmt.Errorf("make a guest: %w", err)
	}
	all := map[string]string{
		"OXIDE_INSTANCE_ID": proof.InstanceID,
		"OXIDE_SYSFS_ROOT":  b.guest.Sys(""),
		"OXIDE_DEV_ROOT":    b.guest.Node(""),
		"PATH":              b.bin + ":" + os.Getenv("PATH"),
		// Nothing here appears later than it is asked for.
		"OXIDE_DEVICE_TIMEOUT": "20ms",
	}
	for key, value := range env {
		all[key] = value
	}
	options := harness.PluginOptions{Mode: harness.ModeNode, Env: all}
	if program != "" {
		options.Command = []string{program}
	}
	b.plugin, err = run.StartPlugin(ctx, options)
	return b, err
}

// addBystanders gives the guest bystanders.
func (b *bench) addBystanders(ctx context.Context, member proof.Member, count *proof.Invariant) (
	err error) {
	b.bystanders, err = proof.NewGuestBystanders(ctx, b.guest, filepath.Join(b.dir, "bystanders"),
		member, count)
	return err
}

// close ends the driver, which must end well, and compares the bystanders.
func (b *bench) close() error {
	err := errors.Join(b.plugin.Stop(), b.bystanders.Close())
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.dir)
}
