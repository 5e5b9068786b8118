package conformance

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// deadRun describes a run that ended without removing everything.
type deadRun struct {
	id   string
	mark mark // complete if the disk that has it exists
	left inventory
}

// runsIn finds the runs that have objects in an inventory.
func runsIn(all inventory) []deadRun {
	runs := map[string]*deadRun{}
	for _, one := range all {
		id, ok := one.run()
		if !ok {
			continue
		}
		if runs[id] == nil {
			runs[id] = &deadRun{id: id, left: all.of(func(run string) bool { return run == id })}
		}
		if m, is := parseMark(one.description); is && m.whole() {
			runs[id].mark = m
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
// instance.
func (r deadRun) alive(here string) string {
	boot, _, _ := strings.Cut(bootID(), " ")
	switch {
	case !r.mark.whole():
		return "without the disk that describes it these may be the objects of somebody else; if they " +
			"are not: oxide-conformance clean --run " + r.id
	case r.mark.Boot == bootID():
		if start := startTime(r.mark.PID); start != "" && (start == r.mark.Start || r.mark.Start == "") {
			return fmt.Sprintf("it still runs, as process %d", r.mark.PID)
		}
		return ""
	case slices.Index(r.mark.Instances, here) == 0 && !strings.HasPrefix(r.mark.Boot, boot):
		return "" // this instance was started again since
	default:
		// Machines that are copies of one image have the same host name.
		return fmt.Sprintf("this is not %s as the run saw it, so nobody here knows whether it still "+
			"runs; if it does not: oxide-conformance clean --run %s", r.mark.Host, r.id)
	}
}

// notAsBefore names the instances that the run stopped or started and that are still in that
// state. Clean does not touch them, because somebody may want them so by now.
func (r deadRun) notAsBefore(all inventory) (notes []string) {
	for _, n := range all {
		i, state := slices.Index(r.mark.Instances, n.id), oxide.InstanceState(n.state)
		switch {
		case i > 0 && n.id != r.mark.Helper && state == oxide.InstanceStateStopped:
			notes = append(notes, fmt.Sprintf("Instance %s is stopped, and ran when the run began: start "+
				"it if it is to run.", n.name))
		case n.id == r.mark.Helper && state == oxide.InstanceStateRunning:
			notes = append(notes, fmt.Sprintf("Instance %s runs, and was stopped when the run began: stop "+
				"it if it is not to run.", n.name))
		}
	}
	return notes
}

// startTime returns when a process that lives started, in the kernel's ticks, or "".
func startTime(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, fields, _ := strings.Cut(string(text[bytes.LastIndexByte(text, ')')+1:]), " ")
	// These fields begin with the third of proc(5), because the second may contain anything.
	if all := strings.Fields(fields); len(all) >= 20 && all[0] != "Z" {
		return all[19]
	}
	return ""
}

// endProcesses waits until the drivers of a dead run have ended, because they may still carry out
// a call. It kills those that do not end.
func (p *Program) endProcesses(ctx context.Context, run string) error {
	if pids := processesOf(run); len(pids) > 0 {
		p.say("Waiting until the processes %v of run %s have ended.", pids, run)
	}
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
		process, err := os.FindProcess(pid) // which is the same process from here on
		if err == nil && slices.Contains(processesOf(run), pid) {
			_ = process.Kill()
		}
	}
	return ended()
}

// workDir names the directory of a run's processes. The report's directory is another one, and
// may be next to it.
func workDir(run string) string { return prefix + run + ".work" }

// processesOf finds this user's driver processes whose socket is in the run's directory. It does
// not read the arguments of other users, who can make that wait.
func processesOf(run string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, file := range files {
		info, err := os.Lstat(filepath.Dir(file))
		if err != nil || !guest.IsOwn(info) {
			continue
		}
		args, _ := os.ReadFile(file) // "" if it has ended
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && slices.ContainsFunc(strings.Split(string(args), "\x00"), func(arg string) bool {
			return strings.HasPrefix(arg, "--endpoint=unix:") && strings.Contains(arg, "/"+workDir(run)+"/")
		}) {
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
