//go:build linux

package corpus_test

import (
	"context"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// bench is a guest with a driver in it, where one trial after the other is made.
type bench struct {
	*proof.Bench
	run   *harness.Run
	bases *bases
	// evidence keeps the disks of which something is wrong; kept is set when there are some.
	evidence, kept bool
}

// newBench starts a driver: the run's own, or the program.
func newBench(
	ctx context.Context, run *harness.Run, bases *bases, program string, env map[string]string,
) (*bench, error) {
	started, err := proof.StartBench(ctx, run, program, env)
	return &bench{Bench: started, run: run, bases: bases}, err
}

// close ends the driver, which must end well, and compares the bystanders.
func (b *bench) close() error {
	err := b.Close()
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.Dir)
}
