package concurrency

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/proof"
)

// patience bounds what has to come true; no call takes nearly as long on a machine that is busy
// with other things.
const patience = 2 * time.Minute

// site is a rack with two controllers and a node in each of its two instances, all of them built
// with the race detector when this binary is.
type site struct {
	t     *testing.T
	proof *proof.Proof
	run   *harness.Run
	rack  *harness.Rack

	controllers []*harness.Plugin
	nodes       []*host
	// formats is the file in which every mkfs leaves a line.
	formats string
	start   harness.Ledger
	tally   tally
}

// host is the driver's node service in one instance.
type host struct {
	*harness.Plugin
	instance harness.Instance
	// dir is where the CO's paths on this node lie.
	dir string
}

// newSite starts everything and takes stock when it idles.
func newSite(t *testing.T, p *proof.Proof) *site {
	t.Helper()
	run, err := harness.NewRun(os.Stderr)
	must(t, err)
	t.Cleanup(func() {
		if t.Failed() {
			run.Failed()
		}
		must(t, run.Close())
	})
	s := &site{t: t, proof: p, run: run, formats: filepath.Join(run.Dir, "formats")}
	ctx := t.Context()
	s.rack, err = run.StartRack(ctx, harness.RackOptions{})
	must(t, err)
	path := s.watchedTools()
	for range 2 {
		s.controllers = append(s.controllers, s.plugin(harness.PluginOptions{
			Mode: harness.ModeController,
		}))
	}
	for _, instance := range s.rack.Instances {
		plugin := s.plugin(harness.PluginOptions{Mode: harness.ModeNode, Instance: instance.Name,
			Env: map[string]string{"PATH": path}})
		s.nodes = append(s.nodes, &host{plugin, instance, filepath.Join(plugin.Dir, "kubelet")})
	}
	s.start, err = s.rack.Ledger(ctx, s.plugins()...)
	must(t, err)
	return s
}

// plugin starts a driver and waits until it has asked the rack what it needs to know.
func (s *site) plugin(options harness.PluginOptions) *harness.Plugin {
	s.t.Helper()
	p, err := s.rack.StartPlugin(s.t.Context(), options)
	must(s.t, err)
	must(s.t, await(s.t.Context(), func() error {
		answer, err := p.Identity().Probe(s.t.Context(), &csi.ProbeRequest{})
		if err == nil && !answer.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	}))
	return p
}

func (s *site) plugins() []*harness.Plugin {
	all := append([]*harness.Plugin(nil), s.controllers...)
	for _, n := range s.nodes {
		all = append(all, n.Plugin)
	}
	return all
}

// watchedTools is a PATH on which every mkfs leaves a line before it does its work.
func (s *site) watchedTools() string {
	s.t.Helper()
	dir := filepath.Join(s.run.Dir, "tools")
	must(s.t, os.Mkdir(dir, 0o755))
	must(s.t, os.WriteFile(s.formats, nil, 0o644))
	for _, tool := range []string{"mke2fs", "mkfs.xfs", "mkfs.btrfs"} {
		real, err := exec.LookPath(tool)
		must(s.t, err)
		script := fmt.Sprintf("#!/bin/sh\necho %s \"$@\" >>%s\nexec %s \"$@\"\n", tool, s.formats,
			real)
		must(s.t, os.WriteFile(filepath.Join(dir, tool), []byte(script), 0o755))
	}
	return dir + ":" + os.Getenv("PATH")
}

// formatted says how many filesystems have been made so far.
func (s *site) formatted() int {
	s.t.Helper()
	text, err := os.ReadFile(s.formats)
	must(s.t, err)
	return strings.Count(string(text), "\n")
}

// close demands that nothing is left of what was done, and that every process ends well: one in
// which the race detector found something ends with status 66.
func (s *site) close() {
	s.t.Helper()
	if err := s.rack.Balance(context.Background(), s.start, s.plugins()...); err != nil {
		s.t.Errorf("the ledger does not balance: %v", err)
		s.tally.leaked.Add(int64(strings.Count(err.Error(), "goroutine of")))
	}
	for _, p := range s.plugins() {
		if err := p.Stop(); err != nil {
			s.t.Error(err)
		}
		s.tally.races.Add(races(s.t, p.LogFile))
	}
	if err := s.rack.Stop(); err != nil {
		s.t.Error(err)
	}
	s.tally.races.Add(races(s.t, s.rack.LogFile()))
}

// races counts what the race detector wrote into a log.
func races(t *testing.T, log string) int64 {
	t.Helper()
	text, err := os.ReadFile(log)
	must(t, err)
	return int64(strings.Count(string(text), "WARNING: DATA RACE"))
}

// must ends the test on an error. It is for the test's own goroutine.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// await asks again until the question is answered without an error, and returns the last one when
// it has taken too long.
func await(ctx context.Context, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause := 2 * time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", patience, err)
		case <-time.After(pause):
		}
	}
}

// atOnce lets n callers go at the same moment and waits for all of them.
func atOnce(n int, call func(caller int)) {
	start := make(chan struct{})
	var callers sync.WaitGroup
	for i := range n {
		callers.Go(func() {
			<-start
			call(i)
		})
	}
	close(start)
	callers.Wait()
}
