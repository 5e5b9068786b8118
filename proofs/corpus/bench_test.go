//go:build linux

package corpus_test

import (
	"context"
	"os"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
)

// bench is a guest with a driver in it, which runs one trial after the other.
type bench struct {
	*proof.Bench
	run   *harness.Run
	bases *bases
	// evidence makes the bench keep the disks of failed trials. kept reports whether there are
	// any.
	evidence, kept bool
}

// newBench starts a driver: the given program, or the run's driver.
func newBench(
	ctx context.Context, run *harness.Run, bases *bases, program string, env map[string]string,
) (*bench, error) {
	started, err := proof.StartBench(ctx, run, program, env)
	return &bench{Bench: started, run: run, bases: bases}, err
}

// close ends the driver and compares the bystanders. It returns an error if the driver fails.
func (b *bench) close() error {
	err := b.Close()
	if b.kept || err != nil {
		return err
	}
	return os.RemoveAll(b.Dir)
}
