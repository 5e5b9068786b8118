//go:build linux

package powercut_test

import (
	"context"
	"errors"
	"sync"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// workers is how many drivers work at once.
const workers = 5

// job is something to do with a disk of a volume.
type job struct {
	access string
	do     func(*bench)
}

// work does the jobs, several at once, until over reports true. The kernel knows a btrfs by its
// UUID, so that of these only one is mounted at a time.
func work(ctx context.Context, run *harness.Run, jobs []job, over func() bool) error {
	queues := map[bool]chan job{true: make(chan job), false: make(chan job)}
	errs := make([]error, workers)
	var all sync.WaitGroup
	for i := range workers {
		all.Go(func() {
			b, err := newBench(ctx, run, "")
			for j := range queues[i == 0] {
				if err == nil && !over() {
					j.do(b)
				}
			}
			if err == nil {
				err = b.close()
			}
			errs[i] = err
		})
	}
	for single, queue := range queues {
		all.Go(func() {
			defer close(queue)
			for _, j := range jobs {
				if (j.access == btrfs) == single {
					queue <- j
				}
			}
		})
	}
	all.Wait()
	return errors.Join(errs...)
}
