package conformance

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

const cleanTimeout = 5 * time.Minute

// cleanVerb removes the objects, processes and directories of runs that died.
func cleanVerb(ctx context.Context, w *job) (int, error) {
	p, s := w.Program, w.settings
	all, err := w.project.inventory(ctx)
	if err != nil {
		return ExitUsage, err
	}
	found := runsIn(all)
	if s.run != "" {
		found = slices.DeleteFunc(found, func(r deadRun) bool { return r.id != s.run })
	}
	if len(found) == 0 {
		which := "any run"
		if s.run != "" {
			which = "run " + s.run
		}
		p.say("Nothing is left of %s in the project %s.", which, s.project)
		if err := p.removeDirs(s.run); err != nil {
			return ExitFails, err
		}
		return ExitConforms, nil
	}
	here, _ := s.firmwareID() // "" outside an instance of the rack
	var dead []deadRun
	for _, run := range found {
		p.say("%s\n%s", run.title(), "  "+strings.Join(run.plan(), "\n  "))
		if why := run.alive(here); why != "" && s.run == "" {
			p.say("  left alone: %s", why)
			continue
		} else if why != "" {
			p.say("  named with --run, although: %s", why)
		}
		dead, w.cleaner.dead[run.id] = append(dead, run), true
	}
	if len(dead) == 0 {
		return ExitConforms, nil
	}
	if !s.yes && !ask(ctx, p, "Remove this?") {
		return interruptedOr(ctx, ExitUsage), errors.New("nothing was removed: say --yes, or answer yes")
	}
	var errs []error
	for _, run := range dead {
		// Remove the objects last, because a repeated clean finds the run by them.
		errs = append(errs, p.endProcesses(ctx, run.id), p.removeDirs(run.id), w.cleaner.remove(ctx, run))
	}
	if all, err = w.project.inventory(context.WithoutCancel(ctx)); err != nil {
		errs = append(errs, err)
	}
	for _, run := range dead {
		for _, note := range run.notAsBefore(all) {
			p.say("%s", note)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return interruptedOr(ctx, ExitFails), err
	}
	p.say("Removed.")
	return ExitConforms, nil
}

// ask reports whether the user answers a question with "y" or "yes". An interrupt counts as a no.
func ask(ctx context.Context, p *Program, question string) bool {
	fmt.Fprintf(p.Stdout, "%s [yes/no] ", question)
	answer, _ := readLine(ctx, bufio.NewReader(p.Stdin)) // "" after an interrupt
	return slices.Contains([]string{"y", "yes"}, strings.ToLower(strings.TrimSpace(answer)))
}

// readLine returns the next line of the input, or "" at the end of the input. After an interrupt it
// returns the interrupt's cause as its error.
func readLine(ctx context.Context, in *bufio.Reader) (string, error) {
	lines := make(chan string, 1)
	// A read from a terminal cannot be interrupted, so this goroutine outlives an interrupt.
	go func() {
		line, _ := in.ReadString('\n')
		lines <- line
	}()
	select {
	case line := <-lines:
		return line, nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

func interruptedOr(ctx context.Context, status int) int {
	if ctx.Err() != nil {
		return ExitInterrupted
	}
	return status
}

func (r deadRun) plan() []string {
	lines := r.left.names()
	for _, one := range r.left {
		if instance := one.attachedTo(); instance != "" && !r.detaches(instance) {
			lines = append(lines, fmt.Sprintf("disk %s stays attached to instance %s, which the run "+
				"does not name: detach it by hand", one.name, instance))
		}
	}
	return lines
}

// detaches reports whether clean may detach disks from an instance: the run created or named it.
func (r deadRun) detaches(instance string) bool {
	return slices.Contains(r.mark.Instances, instance) ||
		slices.ContainsFunc(r.left, func(one item) bool { return one.id == instance })
}

// cleaner removes the objects of runs that are over, and knows which instances may be stopped.
type cleaner struct {
	program *Program
	client  *oxide.Client
	project *project
	rack    *rules.TestedRack
	// run is this run's ID, and helper the value of the setting --helper.
	run, helper string
	// known has the IDs of the disks that the preflight found on the instances that the run may stop.
	// dead has the IDs of the runs whose objects clean removes. mayStop permits disks of these runs.
	known, dead map[string]bool
	// started records whether a data check started the helper. It is nil before the data checks.
	started *data.Helper
}

// remove removes a run's objects: first those that block the removal of others, and last the disk
// that describes the run. It repeats this until a list shows no object of the run, because a
// request that the run sent before it died may take effect later.
func (c *cleaner) remove(ctx context.Context, run deadRun) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	told := ""
	for pause := (harness.Backoff{Next: settle, Max: settle}); ; {
		err := c.removeOnce(ctx, run)
		if errWait := pause.Wait(ctx); errWait != nil {
			return errors.Join(err, errWait)
		}
		all, errList := c.project.inventory(ctx)
		run.left = all.of(run.id)
		switch {
		case errList != nil:
			return errors.Join(err, errList)
		case len(run.left) == 0:
			return nil
		case err != nil && !slices.ContainsFunc(run.left, func(one item) bool {
			return one.kind != "instance" && slices.Contains([]string{"creating", "maintenance",
				"finalizing"}, one.state) // the rack ends these states by itself
		}):
			return err
		}
		if names := strings.Join(run.left.names(), ", "); names != told {
			c.program.say("Waiting until these are gone: %s", names)
			told = names
		}
	}
}

// settle is the pause after each round of remove, before it lists the run's objects again.
const settle = 500 * time.Millisecond

func (c *cleaner) removeOnce(ctx context.Context, run deadRun) error {
	var errs []error
	remove := func(one item) {
		var err error
		id := oxide.NameOrId(one.id)
		switch one.kind {
		case "instance":
			err = rules.Patiently(ctx, func(ctx context.Context) error {
				return c.rack.RemoveInstance(ctx, one.id)
			})
		case "snapshot":
			err = c.client.SnapshotDelete(ctx, oxide.SnapshotDeleteParams{Snapshot: id})
		case "image":
			err = c.client.ImageDelete(ctx, oxide.ImageDeleteParams{Image: id})
		default:
			err = c.removeDisk(ctx, run, *one.disk)
		}
		if err != nil && !rules.IsGone(err) {
			errs = append(errs, fmt.Errorf("remove %s %s: %s", one.kind, one.name, rules.Brief(err)))
		}
	}
	last := slices.IndexFunc(run.left, func(one item) bool { return markOf(one.description).whole() })
	for _, kind := range []string{"instance", "snapshot", "image", "disk"} {
		for i, one := range run.left {
			if one.kind == kind && i != last {
				remove(one)
			}
		}
	}
	if last >= 0 && len(errs) == 0 {
		remove(run.left[last])
	}
	return errors.Join(errs...)
}

func (c *cleaner) removeDisk(ctx context.Context, run deadRun, disk oxide.Disk) (err error) {
	defer harness.Catch(&err)
	if attached, is := disk.State.AsAttached(); is {
		if !run.detaches(attached.Instance) {
			return fmt.Errorf("it is attached to instance %s, which the run does not name: detach it "+
				"by hand", attached.Instance)
		}
		err := c.project.detach(ctx, disk.Id, attached.Instance)
		if rules.SaysNotStopped(err) {
			harness.Must(harness.Wrap(c.stop(ctx, run, attached.Instance),
				"the rack detaches it only from a stopped instance"))
			err = c.project.detach(ctx, disk.Id, attached.Instance)
		}
		harness.Must(err)
	}
	harness.Must(c.rack.EndImport(ctx, &disk))
	err = c.client.DiskDelete(ctx, oxide.DiskDeleteParams{Disk: oxide.NameOrId(disk.Id)})
	if rules.IsGone(err) {
		return nil // an earlier request without an answer deleted it
	}
	return err
}

// removeDirs removes the directories of dead agents on this machine. If the ID of a dead run is
// given, it also removes the directories of that run.
func (p *Program) removeDirs(run string) error {
	guest.Sweep()
	if run == "" {
		return nil
	}
	if pids := processesOf(run); len(pids) > 0 {
		return fmt.Errorf("run %s is at work, as processes %v, in another project or on another rack: "+
			"its directory was left", run, pids)
	}
	var errs []error
	for _, parent := range harness.RunParents() {
		err := guest.RemoveOwn(filepath.Join(parent, workDir(run)), workDir(run))
		if errors.Is(err, guest.ErrNotOwn) {
			p.say("  left alone: %s", err)
			err = nil
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// stop stops a run's helper and waits until the helper is stopped. It stops this run's helper only
// if a data check started that helper, and a dead run's helper only if --helper names it.
func (c *cleaner) stop(ctx context.Context, run deadRun, instance string) (err error) {
	defer harness.Catch(&err)
	named := run.id != c.run && c.helper != ""
	if named {
		found, err := c.project.find(ctx, c.helper)
		named = err == nil && found.Id == instance
	}
	started := run.id == c.run && c.started != nil && c.started.Started
	if instance != run.mark.Helper || !named && !started {
		return fmt.Errorf("instance %s may be somebody else's by now: stop it, or name it with "+
			"--helper if it was the run's", instance)
	}
	harness.Must(c.mayStop(ctx, instance))
	harness.Got(c.client.InstanceStop(ctx,
		oxide.InstanceStopParams{Instance: oxide.NameOrId(instance)}))
	return c.rack.Await(ctx, instance, oxide.InstanceStateStopped)
}

// deadRun describes a run that ended without removing all its objects.
type deadRun struct {
	id   string
	mark mark // complete if the disk that describes the run exists
	left inventory
}

func runsIn(all inventory) []deadRun {
	runs := map[string]deadRun{}
	for _, one := range all {
		id := one.run()
		if id == "" {
			continue
		}
		run := deadRun{id, runs[id].mark, all.of(id)}
		if m := markOf(one.description); m.whole() {
			run.mark = m
		}
		runs[id] = run
	}
	return slices.SortedFunc(maps.Values(runs), func(a, b deadRun) int {
		return strings.Compare(a.id, b.id)
	})
}

func (r deadRun) title() string {
	if !r.mark.whole() {
		return "Run " + r.id + ", of which nothing tells where it ran:"
	}
	return fmt.Sprintf("Run %s, begun %s on %s:", r.id,
		r.mark.Began.UTC().Format("2006-01-02 15:04:05 UTC"), r.mark.Host)
}

// alive returns why clean must not remove the run, or "". The argument is the ID of this instance.
func (r deadRun) alive(here string) string {
	boot, _, _ := strings.Cut(bootID(), " ")
	switch {
	case !r.mark.whole():
		return "without the disk that describes it these may be the objects of somebody else; if they " +
			"are not: " + cleanCommand(r.id)
	case r.mark.Boot == bootID():
		if start := startTime(r.mark.PID); start != "" && (start == r.mark.Start || r.mark.Start == "") {
			return fmt.Sprintf("it still runs, as process %d", r.mark.PID)
		}
		return ""
	case slices.Index(r.mark.Instances, here) == 0 && !strings.HasPrefix(r.mark.Boot, boot):
		return "" // this instance has been restarted since the run began
	default:
		// The host name proves nothing, because copies of one machine image have the same name.
		return fmt.Sprintf("this is not %s as the run saw it, so nobody here knows whether it still "+
			"runs; if it does not: %s", r.mark.Host, cleanCommand(r.id))
	}
}

// notAsBefore describes the instances that the run may have left stopped, and the helper if the
// helper runs. The verb clean does not change these states: somebody may rely on them by now.
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

// startTime returns the start time of a process in clock ticks, or "" if the process has ended.
func startTime(pid int) string {
	text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, fields, _ := strings.Cut(string(text[bytes.LastIndexByte(text, ')')+1:]), " ")
	// Field 2 of proc(5) may contain spaces. The slice begins after it, so all[19] is field 22.
	if all := strings.Fields(fields); len(all) >= 20 && all[0] != "Z" {
		return all[19]
	}
	return ""
}

// endProcesses waits until the drivers of a dead run have ended, because they may still carry out a
// call. After harness.StopTimeout it kills them.
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
		process, err := os.FindProcess(pid) // uses a pidfd, so Kill ends no other process
		if err == nil && slices.Contains(processesOf(run), pid) {
			_ = process.Kill()
		}
	}
	return ended()
}

// workDir returns the name of the directory in which a run's processes work. The suffix keeps it
// apart from the report's folder.
func workDir(run string) string { return prefix + run + ".work" }

// processesOf finds this user's driver processes whose socket is in the run's directory. It skips
// the processes of other users, who can make a read of the arguments hang.
func processesOf(run string) (pids []int) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline") // the pattern is valid
	for _, file := range files {
		info, err := os.Lstat(filepath.Dir(file))
		if err != nil || !guest.IsOwn(info) {
			continue
		}
		args, _ := os.ReadFile(file) // "" if the process has ended
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err == nil && slices.ContainsFunc(strings.Split(string(args), "\x00"), func(arg string) bool {
			return strings.HasPrefix(arg, "--endpoint=unix:") && strings.Contains(arg, "/"+workDir(run)+"/")
		}) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// bootID returns the ID of the machine's boot and, after a space, that of the PID namespace. After
// a reboot, or in another container, a process ID belongs to another process.
func bootID() string {
	id, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // "" on systems other than Linux
	namespace, _ := os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(id)) + " " + namespace
}

// inventory lists the objects of a project.
type inventory []item

// item is an object whose kind is "instance", "disk", "snapshot" or "image".
type item struct {
	kind, id           string
	name               oxide.Name
	description, state string
	size               oxide.ByteCount
	// disk is set only if kind is "disk".
	disk *oxide.Disk
}

// project is the rack's project in which this program works. Its methods do not use the driver.
type project struct {
	client *oxide.Client
	name   oxide.NameOrId
}

func (p *project) find(ctx context.Context, nameOrID string) (_ *oxide.Instance, err error) {
	defer harness.Catch(&err)
	params := oxide.InstanceViewParams{Instance: oxide.NameOrId(nameOrID)}
	if !isUUID(nameOrID) {
		params.Project = p.name
	}
	instance, failed := p.client.InstanceView(ctx, params)
	harness.Must(briefly("instance "+nameOrID, failed))
	project, failed := p.client.ProjectView(ctx, oxide.ProjectViewParams{Project: p.name})
	harness.Must(briefly("project "+string(p.name), failed))
	if project.Id != instance.ProjectId {
		return nil, fmt.Errorf("%s (%s) is not in the project %s", instance.Name, instance.Id,
			project.Name)
	}
	return instance, nil
}

// createDisk creates a blank disk of 1 GiB through the rack's API, without the driver, and checks
// that the answer contains the mark. The disk's name contains the run's ID.
func (p *project) createDisk(ctx context.Context, what string, m mark) (*oxide.Disk, error) {
	disk, err := p.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: p.name,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + m.Run + "-" + what),
			Description: m.description(), Size: oxide.ByteCount(harness.GiB),
			DiskBackend: harness.BlankBackend()}})
	if errors.Is(err, oxide.ErrObjectAlreadyExists) {
		// A request without an answer may have created the disk.
		disk, err = p.client.DiskView(ctx, oxide.DiskViewParams{Project: p.name,
			Disk: oxide.NameOrId("conf-" + m.Run + "-" + what)})
	}
	if err == nil && disk.Description != m.description() {
		err = fmt.Errorf("expected the description %q; found %q: nobody could find what the run makes, "+
			"so it makes nothing more; the disk %s is left if it was the run's", m.description(),
			disk.Description, disk.Name)
	}
	return disk, briefly("create a disk", err)
}

func (p *project) look(ctx context.Context, disk string) (*oxide.Disk, error) {
	return p.client.DiskView(ctx, oxide.DiskViewParams{Disk: oxide.NameOrId(disk)})
}

func (p *project) attach(ctx context.Context, disk, instance string) error {
	_, err := p.client.InstanceDiskAttach(ctx, oxide.InstanceDiskAttachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func (p *project) detach(ctx context.Context, disk, instance string) error {
	_, err := p.client.InstanceDiskDetach(ctx, oxide.InstanceDiskDetachParams{
		Instance: oxide.NameOrId(instance), Body: &oxide.DiskPath{Disk: oxide.NameOrId(disk)}})
	return err
}

func (p *project) inventory(ctx context.Context) (all inventory, err error) {
	defer harness.Catch(&err)
	// If the rack does not answer, each list takes long. So the first error ends the inventory.
	instances, failed := p.client.InstanceListAllPages(ctx, oxide.InstanceListParams{Project: p.name})
	for _, n := range instances {
		all = append(all, item{"instance", n.Id, n.Name, n.Description, string(n.RunState), 0, nil})
	}
	harness.Must(briefly("list the project's instances", failed))
	all = append(all, harness.Got(p.volumes(ctx))...)
	images, failed := p.client.ImageListAllPages(ctx, oxide.ImageListParams{Project: p.name})
	for _, m := range images {
		all = append(all, item{"image", m.Id, m.Name, m.Description, "", m.Size, nil})
	}
	harness.Must(briefly("list the project's images", failed))
	return all, nil
}

// volumes lists the disks and snapshots of the project.
func (p *project) volumes(ctx context.Context) (all inventory, err error) {
	disks, err := p.client.DiskListAllPages(ctx, oxide.DiskListParams{Project: p.name})
	for _, d := range disks {
		all = append(all, item{"disk", d.Id, d.Name, d.Description, string(d.State.State()), d.Size, &d})
	}
	if err != nil {
		return nil, briefly("list the project's disks", err)
	}
	snapshots, err := p.client.SnapshotListAllPages(ctx, oxide.SnapshotListParams{Project: p.name})
	for _, s := range snapshots {
		all = append(all, item{"snapshot", s.Id, s.Name, s.Description, string(s.State), s.Size, nil})
	}
	return all, briefly("list the project's snapshots", err)
}

// count returns the numbers of disks, snapshots, instances and attachments, for a report.Ledger.
func (i inventory) count() map[string]int {
	count := map[string]int{"disks": 0, "snapshots": 0, "instances": 0, "attachments": 0}
	for _, one := range i {
		if one.kind != "image" {
			count[one.kind+"s"]++
		}
		if one.attachedTo() != "" {
			count["attachments"]++
		}
	}
	return count
}

// attachedTo returns the ID of the instance to which a disk is attached, or "".
func (i item) attachedTo() string {
	if i.disk != nil {
		if attached, is := i.disk.State.AsAttached(); is {
			return attached.Instance
		}
	}
	return ""
}

// run returns the ID of the run that created the object, with or without the driver, or "". The
// driver creates no instances, so an instance counts only if its description is a run's mark.
func (i item) run() string {
	if i.kind == "instance" {
		return markOf(i.description).Run
	}
	return runOf(i.description)
}

func (i inventory) of(run string) inventory {
	return slices.DeleteFunc(slices.Clone(i), func(one item) bool {
		return run == "" || one.run() != run
	})
}

func (i inventory) names() (names []string) {
	for _, one := range i {
		about := fmt.Sprintf("%d GiB", int64(one.size)/harness.GiB)
		switch one.kind {
		case "instance":
			about = one.state
		case "disk":
			about += ", " + one.state
		}
		names = append(names, fmt.Sprintf("%s %s (%s)", one.kind, one.name, about))
	}
	return names
}

func isUUID(s string) bool { return len(s) == 36 && uuid.Validate(s) == nil }

func newRunID() string { return uuid.NewString()[:8] } // random hexadecimal digits

// meet records which disks are attached to an instance that the run may stop, and returns an error
// if somebody else uses the instance.
func (c *cleaner) meet(ctx context.Context, instance *oxide.Instance) (err error) {
	defer harness.Catch(&err)
	for _, d := range harness.Got(c.project.disksOf(ctx, instance.Id)) {
		c.known[d.Id] = true
	}
	return c.mayStop(ctx, instance.Id)
}

// mayStop returns an error if somebody else may use an instance: if it is in another project, if a
// run created it, if another run's mark names it, if it has a disk of another run or of a cluster,
// or if it has a disk, other than its boot disk, that was not attached at the preflight.
func (c *cleaner) mayStop(ctx context.Context, id string) (err error) {
	defer harness.Catch(&err)
	instance := harness.Got(c.project.find(ctx, id))
	left := func(format string, args ...any) error {
		return fmt.Errorf("instance %s was left as it is: %s", instance.Name,
			fmt.Sprintf(format, args...))
	}
	if markOf(instance.Description).Run != "" {
		return left("a run has made it")
	}
	for _, d := range harness.Got(c.project.disksOf(ctx, id)) {
		switch run := runOf(d.Description); {
		case run != "" && (run == c.run || c.dead[run]):
		case run != "":
			return left("the disk %s of run %s is attached to it", d.Name, run)
		case strings.HasPrefix(d.Description, driverWord):
			return left("the volume %s of a cluster is attached to it", d.Name)
		case d.Id != instance.BootDiskId && !c.known[d.Id]:
			return left("the disk %s, which is not the run's, is attached to it", d.Name)
		}
	}
	all, failed := c.client.DiskListAllPages(ctx, oxide.DiskListParams{Project: c.project.name})
	harness.Must(briefly("list the project's disks", failed))
	for _, d := range all {
		if m := markOf(d.Description); m.Run != c.run && !c.dead[m.Run] &&
			slices.Contains(m.Instances, id) {
			return left("run %s on %s uses it; if that has ended: %s", m.Run, m.Host, cleanCommand(m.Run))
		}
	}
	return nil
}

func (p *project) disksOf(ctx context.Context, instance string) ([]oxide.Disk, error) {
	disks, err := p.client.InstanceDiskListAllPages(ctx,
		oxide.InstanceDiskListParams{Instance: oxide.NameOrId(instance)})
	return disks, briefly("list the disks of instance "+instance, err)
}
