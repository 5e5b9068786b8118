package conformance

import (
	"bufio"
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
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/sanity/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/sanity/rules"
)

// cleanTimeout is for the removal of one run.
const cleanTimeout = 5 * time.Minute

// cleanVerb removes what runs have left that could not do it themselves.
func cleanVerb(ctx context.Context, p *Program, args []string) (int, error) {
	s, err := parseSettings("clean", args, p.Getenv)
	if err != nil {
		return ExitUsage, err
	}
	if s.run != "" && !isRunID(s.run) {
		return ExitUsage, fmt.Errorf("--run %s: expected the 8 hexadecimal digits of a run", s.run)
	}
	w, err := openSession(p, s)
	if err != nil {
		return ExitUsage, err
	}
	all, err := w.inventory(ctx)
	if err != nil {
		return ExitUsage, err
	}
	found := runsIn(all)
	if s.run != "" {
		found = slices.DeleteFunc(found, func(r deadRun) bool { return r.id != s.run })
	}
	if len(found) == 0 {
		p.say("Nothing is left of %s in the project %s.", runOrAny(s.run), s.project)
		return ExitConforms, removeDirs(s.run, found)
	}
	var dead []deadRun
	for _, run := range found {
		if why := run.alive(s.run != ""); why != "" {
			p.say("%s\n  left alone: %s", run.title(), why)
			continue
		}
		dead = append(dead, run)
		p.say("%s\n%s", run.title(), indent(run.plan()))
	}
	if len(dead) == 0 {
		return ExitConforms, nil
	}
	if !s.yes && !ask(ctx, p, "Remove this?") {
		return interruptedOr(ctx, ExitUsage),
			errors.New("nothing was removed: say --yes, or answer yes")
	}
	var errs []error
	for _, run := range dead {
		errs = append(errs, endProcesses(ctx, run.id), w.remove(ctx, run))
	}
	errs = append(errs, removeDirs(s.run, dead))
	if err := errors.Join(errs...); err != nil {
		return interruptedOr(ctx, ExitFails), err
	}
	p.say("Removed.")
	return ExitConforms, nil
}

func runOrAny(run string) string {
	if run == "" {
		return "any run"
	}
	return "run " + run
}

func indent(lines []string) string { return "  " + strings.Join(lines, "\n  ") }

// ask asks a person; anything but yes is no, and so is an interrupt.
func ask(ctx context.Context, p *Program, question string) bool {
	fmt.Fprintf(p.Stdout, "%s [yes/no] ", question)
	answers := make(chan string, 1)
	go func() {
		answer, _ := bufio.NewReader(p.Stdin).ReadString('\n')
		answers <- answer
	}()
	select {
	case answer := <-answers:
		return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer)))
	case <-ctx.Done():
		return false
	}
}

// interruptedOr is the exit status of what did not succeed.
func interruptedOr(ctx context.Context, status int) int {
	if ctx.Err() != nil {
		return ExitInterrupted
	}
	return status
}

// deadRun is a run of which something is left.
type deadRun struct {
	id   string
	mark mark // whole, if the disk that has it is there
	left inventory
}

// runsIn finds the runs of which something is there.
func runsIn(all inventory) []deadRun {
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
	for _, n := range all.instances {
		if _, is := parseMark(n.Description); is {
			note(n.Description)
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

// alive says why the run may still be under way. Whoever names a run of another machine knows.
func (r deadRun) alive(named bool) string {
	host, _ := os.Hostname()
	switch {
	case !r.mark.whole():
		return ""
	case r.mark.Host != host && !named:
		return fmt.Sprintf("this is not %s, so nobody here knows whether it still runs; if it does "+
			"not: oxide-conformance clean --run %s", r.mark.Host, r.id)
	case r.mark.Host == host && r.mark.Boot == bootID() && isConformance(r.mark.PID):
		return fmt.Sprintf("it still runs, as process %d", r.mark.PID)
	}
	return ""
}

// isConformance reports whether a process is there and is this program.
func isConformance(pid int) bool {
	if pid <= 0 || pid == os.Getpid() || errors.Is(syscall.Kill(pid, 0), syscall.ESRCH) {
		return false
	}
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	return err == nil && strings.Contains(string(name), "conformance")
}

// endProcesses waits until the driver of a dead run has ended, which may still carry out a call,
// and kills it if it does not.
func endProcesses(ctx context.Context, run string) error {
	left := func() []int { return processesOf(run) }
	err := harness.Await(ctx, harness.StopTimeout, func() error {
		if pids := left(); len(pids) > 0 {
			return fmt.Errorf("processes %v of run %s still run", pids, run)
		}
		return nil
	})
	if err == nil || ctx.Err() != nil {
		return err
	}
	for _, pid := range left() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
	}
	return harness.Await(ctx, harness.StopTimeout, func() error {
		if pids := left(); len(pids) > 0 {
			return fmt.Errorf("processes %v of run %s do not end", pids, run)
		}
		return nil
	})
}

// workDir names the directory of a run's processes. It is not that of the report, which may be
// beside it.
func workDir(run string) string { return prefix + run + ".work" }

// processesOf finds the drivers that work in a run's directory, which is in their arguments. An
// editor that shows a log of the run has it there, too.
func processesOf(run string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is well-formed
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

// bootID tells one boot of this machine from another.
func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // "" elsewhere than on Linux
	return strings.TrimSpace(string(id))
}

// plan lists what will be removed.
func (r deadRun) plan() []string {
	lines := r.left.names()
	for _, d := range r.left.disks {
		if attached, is := d.State.AsAttached(); is && !r.detaches(attached.Instance) {
			lines = append(lines, fmt.Sprintf("disk %s stays attached to instance %s, which the run "+
				"does not name: detach it by hand", d.Name, attached.Instance))
		}
	}
	return lines
}

// detaches reports whether the run has attached disks to the instance.
func (r deadRun) detaches(instance string) bool {
	return slices.Contains(r.mark.Instances, instance) ||
		slices.ContainsFunc(r.left.instances, func(n oxide.Instance) bool {
			return n.Id == instance
		})
}

// remove removes what is left of a run: first what is in the way of the rest, last the disk that
// says what the run was. It looks again until nothing is left, because a request that was under way
// when the run died may have its effect later.
func (w *session) remove(ctx context.Context, run deadRun) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	for pause := (harness.Backoff{Next: settle, Max: settle}); ; {
		err := w.removeOnce(ctx, run)
		if errWait := pause.Wait(ctx); errWait != nil {
			return errors.Join(err, errWait)
		}
		all, errList := w.inventory(ctx)
		run.left = all.of(func(id string) bool { return id == run.id })
		switch {
		case errList != nil:
			return errors.Join(err, errList)
		case run.left.empty():
			return nil
		case err != nil && !run.onlyInTheWay():
			return err
		}
	}
}

// settle is how long after a removal it is looked whether anything has come up.
const settle = 500 * time.Millisecond

// onlyInTheWay reports whether what is left may still be removed: states change.
func (r deadRun) onlyInTheWay() bool {
	return slices.ContainsFunc(r.left.disks, func(d oxide.Disk) bool {
		state := d.State.State()
		return state == oxide.DiskStateStateCreating || state == oxide.DiskStateStateMaintenance
	}) || slices.ContainsFunc(r.left.snapshots, func(s oxide.Snapshot) bool {
		return s.State == oxide.SnapshotStateCreating
	})
}

func (w *session) removeOnce(ctx context.Context, run deadRun) error {
	var errs []error
	step := func(what string, name oxide.Name, do func() error) {
		if err := patiently(ctx, do); err != nil && !rules.IsGone(err) {
			errs = append(errs, fmt.Errorf("%s %s: %s", what, name, rules.Brief(err)))
		}
	}
	client := w.client
	for _, n := range run.left.instances {
		step("delete instance", n.Name, func() error { return w.rack.RemoveInstance(ctx, n.Id) })
	}
	for _, s := range run.left.snapshots {
		step("delete snapshot", s.Name, func() error {
			return client.SnapshotDelete(ctx,
				oxide.SnapshotDeleteParams{Snapshot: oxide.NameOrId(s.Id)})
		})
	}
	last := slices.IndexFunc(run.left.disks, func(d oxide.Disk) bool {
		m, is := parseMark(d.Description)
		return is && m.whole()
	})
	for i, d := range run.left.disks {
		if i != last {
			step("remove disk", d.Name, func() error { return w.removeDisk(ctx, run, d) })
		}
	}
	if last >= 0 && len(errs) == 0 {
		d := run.left.disks[last]
		step("remove disk", d.Name, func() error { return w.removeDisk(ctx, run, d) })
	}
	return errors.Join(errs...)
}

func (w *session) removeDisk(ctx context.Context, run deadRun, disk oxide.Disk) error {
	if attached, is := disk.State.AsAttached(); is {
		if !run.detaches(attached.Instance) {
			return fmt.Errorf("it is attached to instance %s, which the run does not name: detach it "+
				"by hand", attached.Instance)
		}
		err := w.detach(ctx, disk.Id, attached.Instance)
		if err != nil && attached.Instance == run.mark.Helper && !rules.IsBusy(err) {
			// The run had started it, and the rack detaches only from stopped instances.
			err = errors.Join(w.stop(ctx, attached.Instance),
				w.detach(ctx, disk.Id, attached.Instance))
		}
		if err != nil {
			return err
		}
	}
	return w.client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})
}

// removeDirs removes the directories of dead runs on this machine.
func removeDirs(named string, dead []deadRun) error {
	ids := []string{}
	if named != "" {
		ids = append(ids, named)
	}
	for _, run := range dead {
		ids = append(ids, run.id)
	}
	var errs []error
	for _, id := range ids {
		for _, parent := range harness.RunParents() {
			errs = append(errs, os.RemoveAll(filepath.Join(parent, workDir(id))))
		}
	}
	return errors.Join(errs...)
}

func (w *session) detach(ctx context.Context, disk, instance string) error {
	_, err := w.client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

// stop stops an instance and waits until it is stopped.
func (w *session) stop(ctx context.Context, instance string) error {
	_, err := w.client.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)})
	if err != nil {
		return err
	}
	return w.rack.Await(ctx, instance, oxide.InstanceStateStopped)
}
