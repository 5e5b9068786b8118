// Command run prepares a machine for the end-to-end suite, runs the suite, and then removes what it
// has prepared. First it lists what the machine lacks. Then it starts a Docker engine if none
// answers, builds images, runs the suite, and stops an engine that it has started.
//
//	go run ./e2e/run                        with published images
//	go run ./e2e/run -offline               with images that are built here
//	go run ./e2e/run -offline -focus CP-9   only specs with CP-9 in their names
//	KEEP=1 go run ./e2e/run -offline        leaves the cluster running
//	go run ./e2e/run -down                  removes such a cluster
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide-csi-plugin/e2e/engine"
	"github.com/oxidecomputer/oxide-csi-plugin/e2e/images"
)

const usage = `Runs the end-to-end suite: prerequisites, a Docker engine, images, specs.

Settings from the environment: KEEP=1 leaves cluster and engine; E2E_REUSE=1 runs specs on a cluster
that was kept; DOCKER_HOST names an engine; XDG_CACHE_HOME is where what is built is kept.

`

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	// After the first signal the run cleans up. After the second it ends at once.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout)
	switch {
	case errors.Is(err, flag.ErrHelp):
		os.Exit(2)
	case err != nil && ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "e2e: interrupted:", err)
		os.Exit(130)
	case err != nil:
		fmt.Fprintln(os.Stderr, "e2e:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, stdout io.Writer) error {
	o, err := parse(args, stdout)
	if err != nil {
		return err
	}
	m, err := inspect(ctx, o)
	if err != nil {
		return err
	}
	if missing := m.missing(); len(missing) > 0 && !o.down {
		return fmt.Errorf("this machine cannot run the suite:\n  - %s",
			strings.Join(missing, "\n  - "))
	}
	root, err := projectRoot(ctx)
	if err != nil {
		return err
	}
	var before images.Previous
	if !o.down {
		before, err = images.FindPrevious(ctx, root, o.previous)
		switch {
		case err != nil && o.previous != previousRelease:
			return err
		case err != nil: // a tree without its git history, such as an archive
			fmt.Fprintf(stdout, "e2e: NO UPGRADE IS TESTED, its spec is skipped: %v\n", err)
		}
	}
	unlock, err := lock(o.cache)
	if err != nil {
		return err
	}
	defer unlock()
	where := engine.Options{Root: root, Cache: o.cache, Log: stdout}
	if o.down {
		return down(ctx, where, stdout)
	}
	docker, err := engine.Start(ctx, where)
	if err != nil {
		return err
	}
	s := suiteRun{options: o, root: root, before: before, engine: docker, stdout: stdout}
	release, err := s.claim(ctx)
	if err != nil {
		return err
	}
	defer release()
	err = s.buildAndTest(ctx)
	if o.keep && docker.Own() {
		fmt.Fprintf(stdout, "e2e: kept the engine: export DOCKER_HOST=%s; remove everything with "+
			"go run ./e2e/run -down\n", docker.Host)
		return err
	}
	// Stop the engine even after an interrupt.
	return errors.Join(err, docker.Stop(context.WithoutCancel(ctx)))
}
