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

// settleTimeout is how long a ledger may take to balance: connections close, goroutines end.
const settleTimeout = 15 * time.Second

// Ledger counts what exists, by name: the rack's disks, snapshots and attachments, the kernel's
// loop devices and mounts, the processes' open files and goroutines. What a ledger at the end has
// more of than one at the start has leaked.
type Ledger map[string]int

// More lists what l has more of than start, with its name.
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

// Ledger counts what there is of the rack, of this machine below the rack's directory, and of the
// rack's and the plugins' processes.
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

// watched are the processes that a ledger looks into.
func (r *Rack) watched(plugins []*Plugin) []watchedProcess {
	port := netPort(r.URL)
	all := []watchedProcess{
		{name: "the simulator", proc: r.proc, port: port, peers: max(1, len(plugins)),
			goroutines: r.Admin.Goroutines},
	}
	for _, p := range plugins {
		all = append(all, watchedProcess{name: "the driver in mode " + p.options.Mode, proc: p.proc,
			port: port, peers: 1, goroutines: p.GoroutineProfile})
	}
	return all
}

// Balance waits until nothing is there that was not at the start, and otherwise names it. A process
// that then has too many goroutines is ended, so that their stacks are in its log.
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

// compare returns an error that names what is there and was not at the start.
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

// addState counts the rack's own records, each by what it is.
func (r *Rack) addState(ctx context.Context, ledger Ledger) error {
	state, err := r.Admin.State(ctx)
	return errors.Join(err, addEach(ledger, "disk", state.Disks),
		addEach(ledger, "snapshot", state.Snapshots),
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

// KernelLedger counts loop devices whose file lies below the directory, and mounts there.
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

// loopDevices lists the files below the directory that a loop device holds, once for each device.
// The devices' own names are left out: a file may come back on another device.
func loopDevices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var held []string
	for _, file := range files {
		backing, err := os.ReadFile(file)
		if err != nil {
			continue // it was released since the directory was read
		}
		name := strings.TrimSpace(string(backing))
		if strings.HasPrefix(name, dir+"/") {
			held = append(held, name)
		}
	}
	return held, nil
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

// nothingLeft demands that a stopped rack holds no process, no loop device and no mount.
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
