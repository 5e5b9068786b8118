package sanity

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

// Ledger takes stock of the rack, of this machine below the rack's directory, and of the rack's
// and the plugins' processes.
func (r *Rack) Ledger(ctx context.Context, plugins ...*Plugin) (Ledger, error) {
	ledger := Ledger{}
	if err := r.addState(ctx, ledger); err != nil {
		return nil, err
	}
	if err := addKernel(ledger, r.Dir); err != nil {
		return nil, err
	}
	for _, s := range r.stocks(plugins) {
		if err := s.add(ctx, ledger); err != nil {
			return nil, err
		}
	}
	return ledger, nil
}

// stocks are the processes that a ledger looks into.
func (r *Rack) stocks(plugins []*Plugin) []stock {
	port := netPort(r.URL)
	stocks := []stock{
		{name: "the simulator", proc: r.proc, port: port, peers: max(1, len(plugins)),
			goroutines: r.goroutines},
	}
	for _, p := range plugins {
		stocks = append(stocks, stock{name: "the driver in mode " + p.options.Mode, proc: p.proc,
			port: port, peers: 1, goroutines: p.Goroutines})
	}
	return stocks
}

// Balance waits until nothing is there that was not at the start, and otherwise names it. A process
// that then has too many goroutines is ended, so that their stacks are in its log.
func (r *Rack) Balance(ctx context.Context, start Ledger, plugins ...*Plugin) error {
	err := await(ctx, settleTimeout, func() error {
		now, err := r.Ledger(ctx, plugins...)
		if err != nil {
			return err
		}
		if more := now.More(start); len(more) > 0 {
			return fmt.Errorf("more than at the start:\n  %s", strings.Join(more, "\n  "))
		}
		return nil
	})
	if err == nil {
		return nil
	}
	for _, s := range r.stocks(plugins) {
		if strings.Contains(err.Error(), s.goroutineEntry()) {
			s.proc.quit()
			err = fmt.Errorf("%w\nthe stacks of %s are at the end of %s", err, s.name, s.proc.log)
		}
	}
	return err
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

// addKernel counts loop devices whose file lies below the directory, and mounts there.
func addKernel(ledger Ledger, dir string) error {
	devices, err := loopDevices(dir)
	if err != nil {
		return err
	}
	ledger.add("loop device", devices...)
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	ledger.add("mount", mounts...)
	return nil
}

// loopDevices lists the loop devices that hold a file below the directory.
func loopDevices(dir string) ([]string, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var devices []string
	for _, file := range files {
		backing, err := os.ReadFile(file)
		if err != nil {
			continue // it was released since the directory was read
		}
		name := strings.TrimSpace(string(backing))
		if strings.HasPrefix(name, dir+"/") {
			device := strings.Split(file, "/")[3]
			devices = append(devices, device+" on "+name)
		}
	}
	return devices, nil
}

// mountsBelow lists the mounts of this namespace below the directory.
func mountsBelow(dir string) ([]string, error) {
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
	ledger := Ledger{}
	if err := addKernel(ledger, r.Dir); err != nil {
		return err
	}
	err := r.proc.noneLeft()
	if left := ledger.More(nil); len(left) > 0 {
		err = errors.Join(err, fmt.Errorf("left after the rack was stopped:\n  %s",
			strings.Join(left, "\n  ")))
	}
	if err != nil {
		r.run.Failed()
	}
	return err
}

// await asks again and again until the question is answered without an error, and returns the last
// error when the time is over.
func await(ctx context.Context, timeout time.Duration, ask func() error) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for pause := time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		err := ask()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s: %w", timeout, err)
		case <-time.After(pause):
		}
	}
}
