package conformance

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func preflightVerb(ctx context.Context, w *job) (int, error) {
	if !w.preflight(ctx) {
		return ExitUsage, errors.New("a run would fail: see the lines that say fail")
	}
	w.say("\nA run of %s takes about %s on this rack (a request takes %s). It has at most %s at one "+
		"time.", strings.Join(w.selected, ", "), round(estimate(w.selected, w.latency)),
		w.latency.Round(100*time.Microsecond), needOf(w.selected, 0))
	return ExitConforms, nil
}

func pass(format string, args ...any) report.Line {
	return report.Line{Status: report.Pass, Found: fmt.Sprintf(format, args...)}
}

func warn(advice, format string, args ...any) report.Line {
	return report.Line{Status: report.Warn, Found: fmt.Sprintf(format, args...), Advice: advice}
}

func fail(advice, format string, args ...any) report.Line {
	return report.Line{Status: report.Fail, Found: fmt.Sprintf(format, args...), Advice: advice}
}

func skip(advice, format string, args ...any) report.Line {
	return report.Line{Status: report.Skip, Found: fmt.Sprintf(format, args...), Advice: advice}
}

const (
	// Only a run finds out the result of hotplugLine, so the preflight skips the line.
	hotplugLine, simulatorLine = "hot-plug", "simulator"
	// The preflight warns if a certificate or a token expires within the time soon.
	soon = 30 * 24 * time.Hour
	// An instance has at most diskLimit disks (A16). The run attaches roomNeeded disks at one time.
	diskLimit, roomNeeded = 12, 4
	shellTimeout          = time.Minute
)

// Each line examines one property of the rack or of this machine. Some store in the job what the
// run needs later.
var preflightLines = []struct {
	name   string
	needed bool // if the line fails, the preflight ends
	ask    func(*job, context.Context) report.Line
}{
	{"this machine", true, func(p *job, _ context.Context) report.Line {
		if runtime.GOOS != "linux" || os.Geteuid() != 0 {
			return fail("Run it as root, on Linux, in an instance of the rack.", "%s, user ID %d",
				runtime.GOOS, os.Geteuid())
		}
		name, _ := os.Hostname()
		return pass("%s, root", name)
	}},
	{"host", true, func(p *job, ctx context.Context) report.Line {
		_, err := p.client.Ping(ctx)
		answers := p.rack.Exchanges()
		p.exchanges = append(p.exchanges, answers...)
		switch {
		case err == nil && answers[len(answers)-1].RequestID == "" && p.selects(partNames[1:]...):
			return fail("Let the proxy pass it, or check only the rules (--only "+partRules+"): the driver "+
				"takes an answer without it for that of another server.",
				"a proxy before %s removes x-request-id", p.host)
		case err == nil:
			return pass("%s answers", p.host)
		case errors.Is(ctx.Err(), context.Canceled):
			return fail("", "interrupted")
		}
		return fail("OXIDE_HOST names the rack, such as https://silo.sys.example.com; OXIDE_CA_FILE the "+
			"authority of a private certificate; HTTPS_PROXY and NO_PROXY apply.",
			"%s does not answer as a rack: %s", p.host, rules.Brief(err))
	}},
	{"certificate", false, func(p *job, ctx context.Context) report.Line {
		if u, err := url.Parse(p.host); err == nil && u.Scheme == "http" {
			return warn("Use https: everybody on the way can read the token.", "none: plain HTTP")
		}
		var state *tls.ConnectionState
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, p.client.Host()+"v1/ping", nil)
		if err == nil {
			var resp *http.Response
			if resp, err = p.rack.HTTP().Do(req); err == nil {
				_ = resp.Body.Close()
				state = resp.TLS
			}
		}
		if err != nil || state == nil {
			return fail("", "cannot be read: %v", err)
		}
		leaf := state.PeerCertificates[0]
		left := time.Until(leaf.NotAfter)
		says := fmt.Sprintf("of %s, valid until %s", leaf.Issuer,
			leaf.NotAfter.UTC().Format(time.DateOnly))
		if left < soon {
			return warn("Renew it: the driver does not speak to a rack with an expired certificate.",
				"%s: %d days", says, int(left.Hours()/24))
		}
		return pass("%s", says)
	}},
	{"api-version", false, func(p *job, ctx context.Context) report.Line {
		// Each request names the API's version, so any answer shows whether the rack serves it.
		if _, err := p.client.CurrentUserView(ctx); err != nil && !errors.Is(err, oxide.ErrHTTP401) {
			return fail("The rack is older than the driver, or no rack: use a driver of its time.",
				"%s: %s", rules.APIVersion, rules.Brief(err))
		}
		return pass("%s is served", rules.APIVersion)
	}},
	{"token", true, func(p *job, ctx context.Context) report.Line {
		user, err := p.client.CurrentUserView(ctx)
		if err != nil {
			return fail("Set OXIDE_TOKEN, or OXIDE_TOKEN_FILE, to a token of this rack.",
				"the rack does not let it in: %s", rules.Brief(err))
		}
		return pass("is of %s, silo %s", user.DisplayName, user.SiloName)
	}},
	// This line requests a disk with a name that nobody can guess. If the admin listener's log has
	// that request, the listener belongs to the rack under test.
	{simulatorLine, true, func(p *job, ctx context.Context) report.Line {
		ctx, cancel := context.WithTimeout(ctx, shellTimeout)
		defer cancel()
		name := "conf-" + p.id + "-simulator"
		_, _ = p.client.DiskView(ctx, oxide.DiskViewParams{Project: p.project.name,
			Disk: oxide.NameOrId(name)}) // there is none
		log, err := p.admin.Requests(ctx, 0)
		if err != nil || !slices.ContainsFunc(log, func(r adminapi.Request) bool {
			return strings.Contains(r.Path, name)
		}) {
			return fail("Remove --simulator-admin and $OXIDE_CONFORMANCE_SIMULATOR_ADMIN, or name the "+
				"listener of the rack under test.", "%s is not the admin listener of %s: it has not heard of "+
				"a request there (%v)", p.settings.admin, p.host, err)
		}
		return pass("%s is the rack's admin listener", p.settings.admin)
	}},
	{"token's expiry", false, func(p *job, ctx context.Context) report.Line {
		tokens, err := p.client.CurrentUserAccessTokenListAllPages(ctx,
			oxide.CurrentUserAccessTokenListParams{})
		if err != nil {
			return skip("", "the rack does not tell: %s", rules.Brief(err))
		}
		var first *time.Time
		for _, token := range tokens {
			if at := token.TimeExpires; at != nil && (first == nil || at.Before(*first)) {
				first = at
			}
		}
		switch {
		case first == nil:
			return pass("none of the user's %d tokens expires", len(tokens))
		case time.Until(*first) < soon:
			return warn("The rack does not tell which token is in use. If it is this one, renew it, and "+
				"give it to the driver as a file (OXIDE_TOKEN_FILE), which is read again.",
				"the first of the user's %d tokens expires on %s", len(tokens),
				first.UTC().Format(time.DateTime))
		}
		return pass("the first of the user's %d tokens expires on %s", len(tokens),
			first.UTC().Format(time.DateOnly))
	}},
	{"project", true, func(p *job, ctx context.Context) report.Line {
		project, err := p.client.ProjectView(ctx, oxide.ProjectViewParams{Project: p.project.name})
		if err != nil {
			return fail("Set OXIDE_PROJECT to the project of this instance.", "%s: %s", p.project.name,
				rules.Brief(err))
		}
		return pass("%s (%s)", project.Name, project.Id)
	}},
	{"role", false, (*job).askRole},
	{"quota", false, func(p *job, ctx context.Context) report.Line {
		left, err := quotaLeft(ctx, p.client)
		if err != nil {
			return warn("", "the rack does not tell: %s", rules.Brief(err))
		}
		want := needOf(p.selected, 0)
		says := fmt.Sprintf("%d GiB of storage left in the silo; the run has at most %d GiB at one time",
			left, want.gib)
		least, budget := needOf(p.selected, optional), p.settings.budget
		if left < least.gib {
			return fail("Free that much, have the quota raised, or leave parts out (--only).", "%s", says)
		}
		if least.gib > budget.gib || least.objects > budget.objects {
			return fail("Raise --budget, or leave parts out (--only).", "the run needs %s at one time, "+
				"and --budget allows %s", least, budget)
		}
		if missing := want.gib - min(left, budget.gib); missing > 0 {
			return warn("Free that much, or raise the quota and --budget.", "%s; what needs more than "+
				"there is, up to %d GiB more, is not tested", says, missing)
		}
		return pass("%s", says)
	}},
	{"this instance", true, func(p *job, ctx context.Context) report.Line {
		id, err := p.firmwareID()
		if err != nil {
			return fail("Run it in an instance of the rack. In a container, show it the instance's /sys.",
				"the firmware does not tell the instance: %s", err)
		}
		p.here, err = p.project.find(ctx, id)
		if err != nil {
			return fail("Set OXIDE_HOST to the rack of this instance, and OXIDE_PROJECT to its project: a "+
				"disk is attached within its project only.", "the firmware says %s; the rack: %s", id, err)
		}
		p.rack.Here = &rules.GuestFiles{ID: id, Sys: os.DirFS(p.sysfsRoot)}
		p.report.Run.Instance = string(p.here.Name)
		return pass("%s (%s), %s", p.here.Name, id, p.here.RunState)
	}},
	{"room for disks", false, func(p *job, ctx context.Context) report.Line {
		disks, err := p.client.InstanceDiskListAllPages(ctx,
			oxide.InstanceDiskListParams{Instance: oxide.NameOrId(p.here.Id)})
		if err != nil {
			return warn("", "the rack does not tell: %s", rules.Brief(err))
		}
		if diskLimit-len(disks) < roomNeeded {
			return fail("Detach some, or run it in another instance.", "this instance has %d disks, of at "+
				"most %d; the run attaches %d", len(disks), diskLimit, roomNeeded)
		}
		return pass("this instance has %d disks, of at most %d", len(disks), diskLimit)
	}},
	{"second instance", false, func(p *job, ctx context.Context) (f report.Line) {
		if p.settings.second == "" {
			return skip("Volumes are not moved. Name another instance with --second and --second-shell.",
				"none is named")
		}
		p.second, f = p.another(ctx, p.settings.second, oxide.InstanceStateRunning, "start")
		if p.second == nil {
			return f
		}
		p.report.Run.Second = string(p.second.Name)
		return askShell(ctx, "--second-shell", p.secondShell, p.second)
	}},
	{"helper", false, func(p *job, ctx context.Context) (f report.Line) {
		if p.settings.helper == "" {
			return skip("A rack without hot-plug is tested further with a stopped instance: --helper, "+
				"--guest-shell.", "none is named")
		}
		p.helper, f = p.another(ctx, p.settings.helper, oxide.InstanceStateStopped, "stop")
		if p.helper == nil {
			return f
		}
		p.report.Run.Helper = string(p.helper.Name)
		if p.guestShell == "" {
			return warn("Its inside is not looked at. Give a command that reaches it: --guest-shell.",
				"%s (%s) is stopped", p.helper.Name, p.helper.Id)
		}
		return pass("%s (%s) is stopped", p.helper.Name, p.helper.Id)
	}},
	{"tools", false, func(p *job, _ context.Context) report.Line {
		var missing []string
		for _, part := range p.selected {
			for _, tool := range parts[part].tools {
				if _, err := exec.LookPath(tool); err != nil && !slices.Contains(missing, tool) {
					missing = append(missing, tool)
				}
			}
		}
		if len(missing) > 0 {
			return fail("Install e2fsprogs, xfsprogs, btrfs-progs and util-linux, or leave parts out "+
				"(--only).", "missing: %s", strings.Join(missing, ", "))
		}
		return pass("all there")
	}},
	{"kernel", false, func(p *job, _ context.Context) report.Line {
		release, err := guest.KernelRelease()
		switch {
		case err != nil:
			return warn("", "%s", err)
		case !guest.HasMountSetattr():
			return fail("The driver needs Linux 5.12 or newer.", "Linux %s", release)
		}
		return pass("Linux %s", release)
	}},
	{hotplugLine, false, func(p *job, _ context.Context) report.Line {
		return skip("A run finds out first of all, with one disk of 1 GiB.",
			"not tried: a preflight makes nothing")
	}},
	{"latency", false, func(p *job, ctx context.Context) report.Line {
		var took []time.Duration
		for range 7 {
			began := time.Now()
			if _, err := p.client.ProjectView(ctx,
				oxide.ProjectViewParams{Project: p.project.name}); err != nil {
				return fail("", "%s", rules.Brief(err))
			}
			took = append(took, time.Since(began))
		}
		slices.Sort(took)
		p.latency = took[len(took)/2]
		says := fmt.Sprintf("a request takes %s, at most %s", p.latency.Round(100*time.Microsecond),
			took[len(took)-1].Round(100*time.Microsecond))
		if p.latency > time.Second {
			return warn("The run will take long.", "%s", says)
		}
		return pass("%s", says)
	}},
	{"dead runs", false, func(p *job, ctx context.Context) report.Line {
		all, err := p.project.inventory(ctx)
		if err != nil {
			return warn("", "%s", err)
		}
		if runs := runsIn(all); len(runs) > 0 {
			return warn("See what, and remove it: oxide-conformance clean", "%d earlier runs have left "+
				"something", len(runs))
		}
		return pass("nothing is left of any")
	}},
}

func (w *job) preflight(ctx context.Context) bool {
	may := true
	for _, line := range preflightLines {
		if line.name == simulatorLine && w.admin == nil {
			continue
		}
		f := line.ask(w, ctx)
		f.Name = line.name
		w.report.Preflight = append(w.report.Preflight, f)
		w.say("%-5s %-16s %s", f.Status, line.name, f.Found)
		if f.Advice != "" {
			w.say("%-5s %-16s %s", "", "", f.Advice)
		}
		may = may && f.Status != report.Fail
		if line.needed && f.Status == report.Fail {
			break
		}
	}
	return may
}

// askRole requests a disk of 0 bytes. The rack answers 403 if the role may not create disks, and
// otherwise 400 for the size.
func (p *job) askRole(ctx context.Context) report.Line {
	_, err := p.client.DiskCreate(ctx, oxide.DiskCreateParams{Project: p.project.name,
		Body: &oxide.DiskCreate{Name: oxide.Name("conf-" + p.id + "-role"),
			Description: mark{Run: p.id}.description(), Size: 0,
			DiskBackend: harness.BlankBackend()}})
	switch {
	case errors.Is(err, oxide.ErrHTTP400):
		return pass("may create disks in the project")
	case errors.Is(err, oxide.ErrHTTP403):
		return fail("Give the token's user the role limited-collaborator, or collaborator, in the "+
			"project.", "may not create disks in the project: %s", rules.Brief(err))
	case err == nil:
		return fail("Remove the disk: "+cleanCommand(p.id), "the rack has made a disk without a size")
	}
	return warn("", "asking for a disk without a size: expected HTTP 400 or 403; found %s",
		rules.Brief(err))
}

// another() finds the named instance. It fails if the instance is this one, if it is not in the
// state want, or if the run must not stop it because somebody else uses it.
func (p *job) another(ctx context.Context, named string, want oxide.InstanceState,
	advice string) (*oxide.Instance, report.Line) {
	instance, err := p.project.find(ctx, named)
	if err != nil {
		return nil, fail("Name an instance of the project.", "%s", err)
	}
	if instance.Id == p.here.Id || instance.RunState != want {
		return nil, fail("Name another instance than this, and "+advice+" it.", "%s is %s (%s)",
			instance.Name, instance.RunState, instance.Id)
	}
	if err := p.cleaner.meet(ctx, instance); err != nil {
		return nil, fail("Name an instance that nobody else uses.", "%s", err)
	}
	return instance, report.Line{}
}

func askShell(ctx context.Context, flag, shell string, instance *oxide.Instance) report.Line {
	if shell == "" {
		return fail("Give a command that runs a script in it as root, such as "+flag+" 'ssh root@"+
			string(instance.Name)+"'.", "%s (%s) cannot be reached", instance.Name, instance.Id)
	}
	var stderr strings.Builder
	ctx, cancel := context.WithTimeout(ctx, shellTimeout)
	defer cancel()
	cmd := guest.Shell(ctx, strings.Fields(shell),
		`id -u; cat "${OXIDE_SYSFS_ROOT:-/sys}/class/dmi/id/product_serial"`)
	// If a child of the command keeps the output open, Output returns after WaitDelay.
	cmd.Stderr, cmd.WaitDelay = &stderr, time.Second
	out, err := cmd.Output()
	said := strings.Fields(string(out))
	said = said[max(0, len(said)-2):] // a shell may print a greeting before
	switch {
	case err != nil:
		return fail("Try the command by hand, with id.", "%s: %v: %s", flag, err,
			strings.TrimSpace(stderr.String()))
	case len(said) != 2 || said[0] != "0":
		return fail("It has to reach root.", "%s: expected the user ID 0 and the instance's UUID; "+
			"found %q", flag, said)
	case !strings.EqualFold(said[1], instance.Id):
		return fail("It reaches another instance.", "%s: expected %s; found %s", flag, instance.Id,
			said[1])
	}
	return pass("%s (%s), reached as root; the checks of data stop it hard and start it again",
		instance.Name, instance.Id)
}

// errAttach means that the rack attaches no disks, attaches them only sometimes, or does not show
// them to the instance.
type errAttach struct{ error }

// learnHotplug finds out whether the rack attaches a disk to this running instance. The rack has no
// hot-plug if it refuses with an error that SaysNotStopped recognizes, and then attaches the same
// disk to a stopped instance. Any other refusal is an errAttach.
//
// If a rack attaches but does not detach, a disk stays until the instance stops. So TryHotplug
// first tries an instance that the run creates. If this trial fails, the rule checks report it.
func (w *job) learnHotplug(ctx context.Context) (err error) {
	trial, result := w.rack.TryHotplug(ctx)
	w.exchanges = append(w.exchanges, result.Exchanges...)
	w.behaviours = trial.Says
	if trial.Attaches && !trial.Detaches {
		w.rack.AttachOnly, w.report.Rack.HotPlug = true, report.HotPlugAttachOnly
		return nil
	}
	disk, err := w.project.createDisk(ctx, "hotplug", mark{Run: w.id})
	if err != nil {
		return err
	}
	run := deadRun{id: w.id, mark: mark{Instances: []string{w.here.Id}}}
	defer func() {
		ctx := context.WithoutCancel(ctx)
		now, errLook := w.project.look(ctx, disk.Id)
		if errLook == nil {
			errLook = w.cleaner.removeDisk(ctx, run, *now)
		}
		err = errors.Join(err, briefly("remove the disk of the trial", errLook))
	}()
	defer harness.Catch(&err)
	refused := w.project.attach(ctx, disk.Id, w.here.Id)
	if refused == nil {
		w.rack.Hotplug, w.report.Rack.HotPlug = true, report.HotPlugYes
		harness.Must(w.learnRemoval(ctx, disk))
		trial, result := w.rack.TryRefusal(ctx)
		w.exchanges = append(w.exchanges, result.Exchanges...)
		w.behaviours = append(w.behaviours, trial.Says...)
		return nil
	}
	if !rules.SaysNotStopped(refused) {
		if now, err := w.project.look(ctx, disk.Id); err == nil {
			if says := rules.Recorded(refused, now, w.here.Id); says != "" {
				return errAttach{fmt.Errorf("attach: %s", strings.Join(append(w.behaviours, says), "; "))}
			}
		}
		return errAttach{fmt.Errorf("attach: expected that the rack attaches a disk to this "+
			"instance, or refuses because it is not stopped; found %s", rules.Brief(refused))}
	}
	var stopped *oxide.Instance
	busy, cancel := context.WithTimeout(ctx, busyTimeout)
	defer cancel()
	harness.Must(briefly("make a stopped instance to attach to",
		rules.Patiently(busy, func(ctx context.Context) (err error) {
			stopped, err = w.rack.StoppedInstance(ctx)
			return err
		})))
	run.mark.Instances = append(run.mark.Instances, stopped.Id)
	harness.Must(w.onlyToStopped(ctx, disk.Id, stopped.Id, w.here.Id, refused))
	w.report.Rack.HotPlug = report.HotPlugNo
	return nil
}

// These limit the wait for the device of an attached disk. A simulated rack shows it at once.
const (
	deviceTimeout          = 30 * time.Second
	simulatedDeviceTimeout = 5 * time.Second
)

// learnRemoval waits for the device of an attached disk. Then it detaches the disk, and measures
// how long a program can still read the device.
func (w *job) learnRemoval(ctx context.Context, disk *oxide.Disk) error {
	serial, timeout := rules.SerialOf(disk.Name), deviceTimeout
	if w.rack.Admin != nil {
		timeout = simulatedDeviceTimeout
	}
	var shown guest.Device
	err := harness.Await(ctx, timeout, func() error {
		devices, err := guest.Devices(w.sysfsRoot)
		if err != nil {
			return err
		}
		var found []string
		for _, d := range devices {
			if d.Serial == serial {
				shown = d
				return nil
			}
			found = append(found, d.Serial)
		}
		return fmt.Errorf("expected a device with the serial %q in this instance; found %q", serial,
			found)
	})
	if err != nil { // the run ends, because every later volume would wait for its device in vain
		return errors.Join(errAttach{fmt.Errorf("attach: the rack attached a disk, but %w", err)},
			briefly("detach the disk of the trial from this instance",
				w.project.detach(ctx, disk.Id, w.here.Id)))
	}
	device, err := shown.Open(w.devRoot)
	if err != nil {
		return errors.Join(err, w.project.detach(ctx, disk.Id, w.here.Id))
	}
	defer device.Close()
	began, gone := time.Now(), make(chan time.Duration, 1)
	go func() {
		if last, is := readUntilGone(device, int64(disk.Size), began); is {
			gone <- last
		}
	}()
	if err := w.project.detach(ctx, disk.Id, w.here.Id); err != nil {
		return briefly("detach the disk of the trial from this instance", err)
	}
	took := time.Since(began)
	select {
	case last := <-gone:
		w.behaviours = append(w.behaviours, fmt.Sprintf("a detach takes a disk from a program that has "+
			"it open: the program could read for %.1f s after the request, which took %.1f s",
			last.Seconds(), took.Seconds()))
	case <-time.After(deviceGrace): // the device stays (a data check reports it), or was read whole
	}
	return nil
}

// deviceGrace is how long a device may still answer reads after a detach.
const deviceGrace = 2 * time.Second

// readUntilGone reads uncached blocks of a device until a read fails. It returns the time from
// "began" to the last successful read. If it could read all blocks up to size, gone is false:
// nothing shows that the device was removed. A removed device may have the size 0, so EOF counts as
// a failed read.
func readUntilGone(device io.ReaderAt, size int64, began time.Time) (last time.Duration,
	gone bool) {
	block, pace := make([]byte, 512), time.NewTicker(2*time.Millisecond)
	defer pace.Stop()
	for place := int64(0); place < size; place += harness.MiB / 4 {
		if _, err := device.ReadAt(block, place); err != nil {
			return last, true
		}
		last = time.Since(began)
		<-pace.C
	}
	return last, false
}

// onlyToStopped checks that the rack attaches the disk to a stopped instance, and then refuses
// again to attach it to the running one. A rack that refuses only sometimes has hot-plug.
func (w *job) onlyToStopped(ctx context.Context, disk, stopped, running string,
	refused error) error {
	if err := w.project.attach(ctx, disk, stopped); err != nil {
		return errAttach{fmt.Errorf("attach: the rack does not attach a disk to this running "+
			"instance, and not to a stopped one either: %s", rules.Brief(err))}
	}
	if err := w.project.detach(ctx, disk, stopped); err != nil {
		return briefly("detach the disk of the trial from a stopped instance", err)
	}
	again := w.project.attach(ctx, disk, running)
	switch {
	case again == nil:
		return errAttach{fmt.Errorf("attach: the rack attached a disk to this running instance only "+
			"when it was asked again; at first: %s", rules.Brief(refused))}
	case !rules.SaysNotStopped(again):
		return errAttach{fmt.Errorf("attach: expected that the rack refuses again because this "+
			"instance is not stopped; found %s", rules.Brief(again))}
	}
	return nil
}
