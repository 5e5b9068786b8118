package conformance

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// deadRun describes a run that ended without removing everything.
type deadRun struct {
	id   string
	mark mark // complete if the disk that has it exists
	left inventory
}

// runsIn finds the runs that have objects in the first inventory. Later inventories only add
// marks.
func runsIn(all inventory, later ...inventory) []deadRun {
	runs := map[string]*deadRun{}
	note := func(description string) {
		id, ok := runOf(description)
		if !ok {
			return
		}
		if runs[id] == nil {
			runs[id] = &deadRun{id: id, left: all.of(func(run string) bool { return run == id })}
		}
		if m, is := parseMark(description); is && m.whole() {
			runs[id].mark = m
		}
	}
	for _, d := range all.disks {
		note(d.Description)
	}
	for _, s := range all.snapshots {
		note(s.Description)
	}
	for _, m := range all.images {
		note(m.Description)
	}
	for _, n := range all.instances {
		if _, is := parseMark(n.Description); is {
			note(n.Description)
		}
	}
	for _, i := range later {
		for _, d := range i.disks {
			if m, is := parseMark(d.Description); is && m.whole() && runs[m.Run] != nil {
				runs[m.Run].mark = m
			}
		}
	}
	var list []deadRun
	for _, id := range slices.Sorted(maps.Keys(runs)) {
		list = append(list, *runs[id])
	}
	return list
}

func (r deadRun) title() string {
	if !r.mark.whole() {
		return "Run " + r.id + ", of which nothing tells where it ran:"
	}
	return fmt.Sprintf("Run %s, begun %s on %s:", r.id,
		r.mark.Began.UTC().Format("2006-01-02 15:04:05 UTC"), r.mark.Host)
}

// alive returns the reason why the run may still be under way, or "". here is the ID of this
// instance. named is true if the operator has named the run, and so knows that it is dead.
func (r deadRun) alive(named bool, here string) string {
	boot, _, _ := strings.Cut(bootID(), " ")
	switch {
	case !r.mark.whole():
		return ""
	case r.mark.Boot == bootID():
		if isConformance(r.mark.PID) {
			return fmt.Sprintf("it still runs, as process %d", r.mark.PID)
		}
		return ""
	case slices.Index(r.mark.Instances, here) == 0 && !strings.HasPrefix(r.mark.Boot, boot):
		return "" // this instance was started again since
	case !named:
		// Machines that are copies of one image have the same host name.
		return fmt.Sprintf("this is not %s as the run saw it, so nobody here knows whether it still "+
			"runs; if it does not: oxide-conformance clean --run %s", r.mark.Host, r.id)
	}
	return ""
}

// notAsBefore names the instances that the run stopped or started and that are still in that
// state. Clean does not touch them, because somebody may want them so by now.
func (r deadRun) notAsBefore(instances []oxide.Instance) (notes []string) {
	for _, n := range instances {
		i := slices.Index(r.mark.Instances, n.Id)
		switch {
		case i > 0 && n.Id != r.mark.Helper && n.RunState == oxide.InstanceStateStopped:
			notes = append(notes, fmt.Sprintf("Instance %s is stopped, and ran when the run began: start "+
				"it if it is to run.", n.Name))
		case n.Id == r.mark.Helper && n.RunState == oxide.InstanceStateRunning:
			notes = append(notes, fmt.Sprintf("Instance %s runs, and was stopped when the run began: stop "+
				"it if it is not to run.", n.Name))
		}
	}
	return notes
}

// isConformance reports whether the process exists and runs this program.
func isConformance(pid int) bool {
	if pid <= 0 || pid == os.Getpid() || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(name), "conformance")
}

// endProcesses waits until the drivers of a dead run have ended, because they may still carry out
// a call. It kills those that do not end.
func endProcesses(ctx context.Context, run string) error {
	ended := func() error {
		return harness.Await(ctx, harness.StopTimeout, func() error {
			if pids := processesOf(run); len(pids) > 0 {
				return fmt.Errorf("processes %v of run %s do not end", pids, run)
			}
			return nil
		})
	}
	err := ended()
	if err == nil || ctx.Err() != nil {
		return err
	}
	for _, pid := range processesOf(run) {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return ended()
}

// workDir names the directory of a run's processes. The report's directory is another one, and
// may be next to it.
func workDir(run string) string { return prefix + run + ".work" }

// processesOf finds the driver processes whose arguments contain the run's directory. An editor
// that shows a log of the run has the directory in its arguments, too, but is no driver.
func processesOf(run string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, file := range files {
		args, err := os.ReadFile(file)
		pid, errPID := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && errPID == nil && pid != os.Getpid() &&
			strings.Contains(string(args), "/"+workDir(run)+"/") &&
			strings.Contains(string(args), "oxide-csi-plugin") {
			pids = append(pids, pid)
		}
	}
	return pids
}

// bootID returns an ID of this boot of the machine and, after a space, of the namespace of
// process IDs. A process ID means another process in another boot or container.
func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // "" where it is not Linux
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(id)) + " " + namespace
}
