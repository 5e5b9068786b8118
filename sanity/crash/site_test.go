//go:build linux

package crash_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/crash/trace"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
)

// The processes of a site: the driver with its controller in instance a, its node service in
// instance b, and the rack.
const (
	driverA = "a"
	driverB = "b"
	theRack = "rack"
	// beside is a second node driver in instance a, with the state directory of the first one, as a
	// surge update or a forced deletion of a pod makes it.
	beside = "beside"
)

// site is a rack with a driver in two instances, and a tracer. One life is lived there at a time.
type site struct {
	// name keeps the serials of two sites on one machine apart.
	name    string
	run     *harness.Run
	rack    *harness.Rack
	plugins map[string]*harness.Plugin
	watcher *trace.Watcher
	// ledger and files are what was there before the first life.
	ledger harness.Ledger
	files  map[string]bool
	lives  int
	// killed are the processes that were killed in this life, each the leader of a group.
	killed map[int]bool
	// kills is how often one was, and overlaps how often a second driver was asked beside the first.
	kills, overlaps int
}

// openSite starts everything and takes stock.
func openSite(ctx context.Context, run *harness.Run, name string) (*site, error) {
	rack, err := run.StartRack(ctx, harness.RackOptions{})
	if err != nil {
		return nil, err
	}
	s := &site{name: name, run: run, rack: rack, plugins: map[string]*harness.Plugin{},
		killed: map[int]bool{}}
	for _, name := range []string{driverA, driverB, beside} {
		options := harness.PluginOptions{Mode: harness.ModeNode, Instance: name}
		switch name {
		case driverA:
			options.Mode = harness.ModeAll
		case beside:
			options.Instance = driverA
			options.Env = map[string]string{
				"OXIDE_STATE_DIR": filepath.Join(s.plugins[driverA].Dir, "volumes"),
			}
		}
		if s.plugins[name], err = rack.StartPlugin(ctx, options); err != nil {
			return s, err
		}
		if err := s.ready(ctx, name); err != nil {
			return s, err
		}
		if err := os.Mkdir(filepath.Join(s.plugins[name].Dir, "kubelet"), 0o750); err != nil {
			return s, err
		}
	}
	if s.watcher, err = trace.NewWatcher(tracer); err != nil {
		return s, err
	}
	if s.ledger, err = rack.Ledger(ctx, s.drivers()...); err != nil {
		return s, err
	}
	s.files, err = s.filesNow()
	return s, err
}

func (s *site) drivers() []*harness.Plugin {
	return []*harness.Plugin{s.plugins[driverA], s.plugins[driverB], s.plugins[beside]}
}

// close ends everything in good order and demands that nothing is left.
func (s *site) close() error {
	var errs []error
	if s.watcher != nil {
		errs = append(errs, s.watcher.Close())
	}
	for _, p := range s.plugins {
		errs = append(errs, p.Stop())
	}
	return errors.Join(append(errs, s.rack.Stop())...)
}

// abandon ends a site where something went wrong. Its files stay as evidence; its devices go, at
// the latest with the mounts of these tests.
func (s *site) abandon(ctx context.Context) {
	s.run.Failed()
	for _, p := range s.plugins {
		p.Kill()
	}
	s.rack.Kill()
	if s.rack.Start(ctx) == nil {
		_ = s.rack.Stop()
	}
	if s.watcher != nil {
		_ = s.watcher.Close()
	}
}

// ready waits until a driver has asked the rack what it wants to know, and idles.
func (s *site) ready(ctx context.Context, name string) error {
	return eventually(ctx, func() error {
		answer, err := s.plugins[name].Identity().Probe(ctx, &csi.ProbeRequest{})
		if err == nil && !answer.GetReady().GetValue() {
			err = errors.New("the driver is not ready")
		}
		return err
	})
}

// kill makes sure that a process is dead.
func (s *site) kill(name string) {
	if name == theRack {
		s.rack.Kill()
		return
	}
	s.plugins[name].Kill()
}

// watched does something while a process is watched, which is killed at the point, if one is given.
// failed is what doing it ended with; err is trouble of our own.
func (s *site) watched(name string, kill *trace.Point, do func() error) (
	report trace.Report, failed, err error) {
	order, err := s.order(name, kill)
	if err != nil {
		return report, nil, err
	}
	if name == theRack {
		order.PID = s.rack.PID()
	} else {
		order.PID = s.plugins[name].PID()
	}
	if err := s.watcher.Watch(order); err != nil {
		return report, nil, err
	}
	failed = do()
	report, err = s.watcher.Release()
	if report.Killed {
		s.buried(order.PID)
	}
	return report, failed, err
}

// order says how to watch a process of the site; its id is left out.
func (s *site) order(name string, kill *trace.Point) (order trace.Order, err error) {
	order = trace.Order{As: "driver", Root: s.rack.Dir, Kill: kill}
	if name == theRack {
		order.As, order.Logs = "rack", []string{s.rack.LogFile()}
	} else {
		order.Logs = []string{s.plugins[name].LogFile}
	}
	order.Rack, err = portOf(s.rack.URL)
	return order, err
}

// buried notes that a process was killed.
func (s *site) buried(pid int) {
	s.killed[pid] = true
	s.kills++
}

func portOf(address string) (uint16, error) {
	u, err := url.Parse(address)
	if err != nil {
		return 0, err
	}
	port, err := strconv.ParseUint(u.Port(), 10, 16)
	return uint16(port), err
}

// clean demands that nothing is there that was not before the first life.
func (s *site) clean(ctx context.Context) error {
	if err := eventually(ctx, s.noneLeft); err != nil {
		return err
	}
	clear(s.killed) // their numbers may soon be another's
	if err := s.rack.Balance(ctx, s.ledger, s.drivers()...); err != nil {
		return err
	}
	now, err := s.filesNow()
	if err != nil {
		return err
	}
	var more, less []string
	for path := range now {
		if !s.files[path] {
			more = append(more, path)
		}
	}
	for path := range s.files {
		if !now[path] {
			less = append(less, path)
		}
	}
	if len(more)+len(less) > 0 {
		return fmt.Errorf("files left behind: %q, files lost: %q", more, less)
	}
	return s.consistent(ctx)
}

// noneLeft demands that what a killed process had started has ended.
func (s *site) noneLeft() error {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return err
	}
	for _, path := range stats {
		stat, err := os.ReadFile(path)
		if err != nil {
			continue // it ended since the directory was read
		}
		// After the name, which may hold anything: state, parent, group.
		fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
		if len(fields) < 3 || fields[0] == "Z" {
			continue
		}
		if group, err := strconv.Atoi(fields[2]); err == nil && s.killed[group] {
			return fmt.Errorf("a killed process left one behind: %s", stat)
		}
	}
	return nil
}

// filesNow lists what lies below the rack's directory: the disks' bytes, what the guests see, what
// the drivers keep, and the CO's directories. Logs grow, and sockets come and go.
func (s *site) filesNow() (map[string]bool, error) {
	files := map[string]bool{}
	err := filepath.WalkDir(s.rack.Dir, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.Type()&fs.ModeSocket == 0 && !strings.HasSuffix(path, ".log") {
			files[strings.TrimPrefix(path, s.rack.Dir)] = true
		}
		return nil
	})
	return files, err
}

// eventually waits for a condition.
func eventually(ctx context.Context, ask func() error) error {
	const patience = 20 * time.Second
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 100*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		if wait(ctx, pause) != nil {
			return fmt.Errorf("after %s: %w", patience, err)
		}
	}
}

func wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func sorted[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
