package harness

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
)

// settleTimeout limits how long a ledger may take to balance, while connections close and
// goroutines end.
const settleTimeout = 15 * time.Second

// Ledger counts what exists, by name: the rack's disks, snapshots and attachments, the
// kernel's loop devices and mounts, the processes' open files and goroutines. If a ledger at
// the end has more of something than the ledger at the start, this has leaked.
type Ledger map[string]int

// More lists by name everything of which l has more than start.
func (l Ledger) More(start Ledger) []string {
	var more []string
	for _, name := range slices.Sorted(maps.Keys(l)) {
		switch surplus := l[name] - start[name]; {
		case surplus <= 0:
		case start[name] == 0 && surplus == 1:
			more = append(more, name)
		default:
			more = append(more, fmt.Sprintf("%s (%d at the start, %d now)",
				name, start[name], l[name]))
		}
	}
	return more
}

func (l Ledger) add(kind string, names ...string) {
	for _, name := range names {
		l[kind+" "+name]++
	}
}

// Ledger counts the objects of the rack, the loop devices and mounts below the rack's
// directory, and the open files and goroutines of the simulator and the plugins.
func (r *Rack) Ledger(ctx context.Context, plugins ...*Plugin) (Ledger, error) {
	ledger := Ledger{}
	if err := r.addState(ctx, ledger); err != nil {
		return nil, err
	}
	kernel, err := KernelLedger(r.Dir)
	if err != nil {
		return nil, err
	}
	maps.Copy(ledger, kernel)
	for _, s := range r.watched(plugins) {
		if err := s.add(ctx, ledger); err != nil {
			return nil, err
		}
	}
	return ledger, nil
}

// watched returns the processes whose files and goroutines a ledger counts.
func (r *Rack) watched(plugins []*Plugin) []watchedProcess {
	port := netPort(r.URL)
	all := []watchedProcess{
		{name: "the simulator", proc: r.proc, port: port, peers: max(1, len(plugins)),
			console: netPort(r.Admin.URL), goroutines: r.Admin.Goroutines},
	}
	for _, p := range plugins {
		all = append(all, watchedProcess{name: "the driver in mode " + p.options.Mode, proc: p.proc,
			port: port, peers: 1, goroutines: p.GoroutineProfile})
	}
	return all
}

// Balance waits until nothing exists that did not exist at the start. When the time is over,
// it returns an error that names what has leaked. If a process has too many goroutines then,
// Balance ends the process so that its log gets their stacks.
func (r *Rack) Balance(ctx context.Context, start Ledger, plugins ...*Plugin) error {
	err := Await(ctx, settleTimeout, func() error { return r.compare(ctx, start, plugins...) })
	if err == nil {
		return nil
	}
	for _, s := range r.watched(plugins) {
		if strings.Contains(err.Error(), s.goroutineEntry()) {
			s.proc.quit()
			err = fmt.Errorf("%w\nthe stacks of %s are at the end of %s", err, s.name, s.proc.log)
		}
	}
	return err
}

// compare returns an error that names everything that exists and did not exist at the start.
func (r *Rack) compare(ctx context.Context, start Ledger, plugins ...*Plugin) error {
	now, err := r.Ledger(ctx, plugins...)
	if err != nil {
		return err
	}
	if more := now.More(start); len(more) > 0 {
		return fmt.Errorf("more than at the start:\n  %s", strings.Join(more, "\n  "))
	}
	return nil
}

// addState counts the records of the simulator, each by its kind.
func (r *Rack) addState(ctx context.Context, ledger Ledger) error {
	state, err := r.Admin.State(ctx)
	return errors.Join(err, addEach(ledger, "disk", state.Disks),
		addEach(ledger, "snapshot", state.Snapshots), addEach(ledger, "image", state.Images),
		addEach(ledger, "attachment", state.Attachments))
}

func addEach[T any](ledger Ledger, kind string, entries []T) error {
	for _, entry := range entries {
		text, err := json.Marshal(entry)
		if err != nil {
			return err
		}
		ledger.add(kind, string(text))
	}
	return nil
}

// KernelLedger counts the loop devices whose file lies below the directory, and the mounts
// below the directory.
func KernelLedger(dir string) (Ledger, error) {
	devices, err := loopDevices(dir)
	if err != nil {
		return nil, err
	}
	mounts, err := MountsBelow(dir)
	if err != nil {
		return nil, err
	}
	ledger := Ledger{}
	ledger.add("loop device on", devices...)
	ledger.add("mount", mounts...)
	return ledger, nil
}

// loopDevices lists the files below the directory that have a loop device, once for each
// device. It leaves out the devices' names, because a file may get another device later.
func loopDevices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var backed []string
	for _, file := range files {
		backing, err := os.ReadFile(file)
		if err != nil {
			continue // it was released since the directory was read
		}
		name := strings.TrimSpace(string(backing))
		if strings.HasPrefix(name, dir+"/") {
			backed = append(backed, name)
		}
	}
	return backed, nil
}

// MountsBelow lists the mounts of this namespace below the directory.
func MountsBelow(dir string) ([]string, error) {
	infos, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	var mounts []string
	for _, info := range infos {
		mounts = append(mounts,
			fmt.Sprintf("%s of %s (%s)", info.Mountpoint, info.Source, info.FSType))
	}
	return mounts, nil
}

// nothingLeft returns an error if a stopped rack still has a process, a loop device or a
// mount.
func (r *Rack) nothingLeft() error {
	ledger, err := KernelLedger(r.Dir)
	if err != nil {
		return err
	}
	err = r.proc.noneLeft()
	if left := ledger.More(nil); len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left after the rack was stopped:\n  %s",
			strings.Join(left, "\n  ")))
	}
	if err != nil {
		r.run.Failed()
	}
	return err
}
