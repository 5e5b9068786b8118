package conformance

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc/codes"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func runVerb(ctx context.Context, w *job) (int, error) {
	host, _ := os.Hostname()
	run := &w.report.Run
	run.ID, run.Mark, run.Machine, run.Command = w.id, w.mark, host, w.command
	run.Selected, run.Budget = w.selected, w.settings.budget.String()
	kernel, _ := guest.KernelRelease() // "" on systems other than Linux
	w.report.Versions = report.Versions{Suite: w.Version, Driver: w.Version, SDK: sdkVersion(),
		Go: runtime.Version(), Kernel: kernel, OS: osRelease(), Arch: runtime.GOARCH,
		Tools: toolVersions()}
	release, err := w.claimInstance(ctx)
	if err != nil {
		return interruptedOr(ctx, ExitUsage), fmt.Errorf("nothing was made: %w", err)
	}
	defer release()
	run.Began = time.Now().UTC()
	if !w.preflight(ctx) {
		if ctx.Err() != nil {
			return ExitInterrupted, errors.New("interrupted; nothing was made")
		}
		return ExitUsage, errors.New("nothing was made: see the lines that say fail")
	}
	w.say("\nRun %s of %s. It makes at most %s at one time (--budget %d,%d), all marked %s, and "+
		"removes them; about %s.\n", w.id, strings.Join(w.selected, ", "),
		needOf(w.selected, 0), w.settings.budget.objects, w.settings.budget.gib, w.mark,
		round(estimate(w.selected, w.latency)))
	if !w.yes && !ask(ctx, w.Program, "Go on?") {
		return interruptedOr(ctx, ExitUsage), errors.New("nothing was made: say --yes, or answer yes")
	}
	// The working directory may be removed during the run, so the report's path becomes absolute.
	folder, gone := filepath.Abs(w.folder())
	if gone != nil {
		gone = fmt.Errorf("the directory of this program is gone: %w; change to another one", gone)
	}
	if err := errors.Join(tryFolder(w.folder()), gone); err != nil {
		return ExitUsage, fmt.Errorf("nothing was made: %w", err)
	}
	w.settings.report = folder
	w.carryOut(ctx)
	return w.finish(ctx)
}

// claimInstance waits until no other run is in this instance, because csi-sanity attaches disks
// until the instance is full. The claim is an abstract Unix socket, so it ends with the process.
// Runs in different network namespaces do not see each other's claims.
func (w *job) claimInstance(ctx context.Context) (release func(), err error) {
	id, _ := w.firmwareID() // the preflight explains an error
	// Instances of two simulated racks may have the same ID, but not the same directory of sysfs.
	sum := sha256.Sum256([]byte(id + filepath.Clean(w.sysfsRoot)))
	name := fmt.Sprintf("@oxide-conformance-%x", sum[:16])
	for backoff := (harness.Backoff{Next: 100 * time.Millisecond, Max: 2 * time.Second}); ; {
		claim, err := net.Listen("unix", name)
		if err == nil {
			return func() { _ = claim.Close() }, nil
		}
		if !errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("claim this instance: %w", err)
		}
		w.say("Another run is in this instance: waiting until it ends.")
		// A connection to the other run's claim ends with the claim. So wait for its end.
		other, err := (&net.Dialer{}).DialContext(ctx, "unix", name)
		if err == nil {
			stop := context.AfterFunc(ctx, func() { _ = other.Close() })
			_, _ = other.Read(make([]byte, 1)) // always an error
			stop()
			_ = other.Close()
		}
		if err := backoff.Wait(ctx); err != nil {
			return nil, err
		}
	}
}

func sdkVersion() string {
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, module := range info.Deps {
			if module.Path == "github.com/oxidecomputer/oxide.go" {
				return "oxide.go " + module.Version
			}
		}
	}
	return ""
}

// carryOut runs everything that creates objects on the rack, and then removes these objects.
func (w *job) carryOut(ctx context.Context) {
	stop := context.AfterFunc(ctx, func() {
		w.say("\nInterrupted: removing what the run has made. A second interrupt leaves it to\n%s\n",
			cleanCommand(w.id))
	})
	defer stop()
	w.progress.latency, w.progress.began = w.latency, time.Now()
	w.progress.expected = estimate(w.selected, w.latency)
	before, err := w.project.inventory(ctx)
	if err != nil {
		w.incomplete(err)
		return
	}
	w.report.Ledger.Before = before.count()
	_, err = w.project.createDisk(ctx, "run", w.manifest())
	if err == nil {
		err = w.runParts(ctx)
	}
	// If the rack is lost, the verdict names the loss, and not this error.
	if err != nil && w.contact.ask(ctx) == nil {
		w.incomplete(err)
	}
	if !w.sweep(ctx) {
		return
	}
	after, err := w.project.inventory(context.WithoutCancel(ctx))
	if err != nil {
		w.incomplete(err)
		return
	}
	w.report.Ledger.After = after.count()
}

// manifest returns the mark of the disk that is created first and deleted last.
func (w *job) manifest() mark {
	host, _ := os.Hostname()
	m := mark{Run: w.id, Host: host, PID: os.Getpid(), Start: startTime(os.Getpid()), Boot: bootID(),
		Began: &w.report.Run.Began, Instances: []string{w.here.Id}}
	if w.second != nil {
		m.Instances = append(m.Instances, w.second.Id)
	}
	if w.helper != nil {
		m.Instances, m.Helper = append(m.Instances, w.helper.Id), w.helper.Id
	}
	return m
}

func (w *job) incomplete(err error) {
	if _, is := errors.AsType[errAttach](err); is {
		w.result(report.Result{Group: partRules, ID: "attach", Name: "the rack attaches disks",
			Status: report.Failed, Tries: 1, Reason: err.Error(), Evidence: answers(w.rack.Exchanges())})
		return
	}
	w.stopped = errors.Join(w.stopped, err)
}

func (w *job) runParts(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	harness.Must(w.learnHotplug(ctx))
	w.exchanges = append(w.exchanges, w.rack.Exchanges()...)
	found := pass("yes: a disk was attached to this instance and detached")
	switch w.report.Rack.HotPlug {
	case report.HotPlugNo:
		found = warn("What needs it is blocked; the driver says that the instance must be stopped.",
			"no: the rack attached a disk to a stopped instance, and to this one only when it is stopped")
	case report.HotPlugAttachOnly:
		found = warn("What needs it is blocked; the driver detaches a volume when the instance is "+
			"stopped.", "attach only")
	}
	if len(w.behaviours) > 0 {
		found.Found += "; " + strings.Join(w.behaviours, "; ")
	}
	found.Name = hotplugLine
	for i, line := range w.report.Preflight {
		if line.Name == hotplugLine {
			w.report.Preflight[i] = found
		}
	}
	w.say("\n%-5s %-16s %s", found.Status, hotplugLine, found.Found)
	w.dir = harness.Got(harness.NewNamedRun(w.Stdout, workDir(w.id)))
	w.dir.Programs = w.Self
	harness.Must(guest.MarkOwn(w.dir.Dir, workDir(w.id)))
	if w.selects(partRules) {
		w.runRules(ctx)
	}
	if ctx.Err() == nil && w.contact.lost() == nil && w.selects("ext4", "xfs", "btrfs", "block") {
		err = errors.Join(err, w.runCSISanity(ctx))
	}
	if ctx.Err() == nil && w.contact.lost() == nil && w.selects(partData) {
		err = errors.Join(err, w.runData(ctx))
	}
	w.progress.leave()
	return err
}

func (w *job) selects(parts ...string) bool {
	return slices.ContainsFunc(w.selected, func(part string) bool {
		return slices.Contains(parts, part)
	})
}

// allRules and allChecks return the checks of a run. A test replaces them to run only one.
var allRules, allChecks = rules.All, data.Checks

func (w *job) runRules(ctx context.Context) {
	all := allRules()
	w.progress.enter(partRules, len(all))
	for _, rule := range all {
		if ctx.Err() != nil || w.contact.lost() != nil {
			break
		}
		ruled := w.rack.Run(ctx, rule)
		result := ruled.Result
		result.Group, result.ID, result.Source = partRules, rule.ID, rule.Source
		// Rules are written in Markdown, and the report in plain text.
		result.Name = strings.ReplaceAll(rule.Says, "`", "")
		result.Evidence = answers(ruled.Exchanges)
		if ctx.Err() != nil {
			result.Status, result.Reason = report.Interrupted, "the run was interrupted"
		}
		w.exchanges = append(w.exchanges, ruled.Exchanges...)
		if ruled.Undecided && ctx.Err() == nil {
			if err := w.contact.ask(ctx); err != nil {
				result.Status, result.Reason = report.Interrupted, err.Error()
			} else {
				w.incomplete(fmt.Errorf("%s is not tested: %s", rule.ID, ruled.Reason))
			}
		}
		w.result(w.contact.unlessLost(ctx, result))
	}
}

func (w *job) result(r report.Result) {
	w.report.Results = append(w.report.Results, r)
	status, reason := strings.ReplaceAll(string(r.Status), "_", " "), ""
	switch {
	case r.Status == report.Failed:
		reason = r.Reason
	case r.Status == report.Passed && len(r.Extent.Partly()) > 0:
		status = "kept so far as"
	}
	w.progress.done(status, strings.TrimSpace(r.ID+" "+r.Name), reason)
}

// sweep removes every object with the run's mark, and returns false if it cannot list the objects.
// The run fails if the driver should have deleted one of them. An object that the program created
// without the driver may be left, because the answer to its creation can be lost.
func (w *job) sweep(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanTimeout)
	defer cancel()
	if err := w.rack.Close(ctx); err != nil {
		w.incomplete(err)
	}
	all, err := w.project.inventory(ctx)
	if err != nil {
		w.incomplete(fmt.Errorf("sweep: %w; clean up with %s", err, cleanCommand(w.id)))
		return false
	}
	mine := deadRun{id: w.id, mark: w.manifest(), left: all.of(w.id)}
	w.report.Ledger.Left = slices.DeleteFunc(slices.Clone(mine.left), func(one item) bool {
		return markOf(one.description).Run != "" // the program's own
	}).names()
	if err := w.cleaner.remove(ctx, mine); err != nil {
		w.incomplete(fmt.Errorf("sweep: %w; clean up with %s", err, cleanCommand(w.id)))
	}
	return true
}

// finish decides the verdict, writes the report and prints the verdict.
func (w *job) finish(ctx context.Context) (int, error) {
	w.report.Run.Ended = time.Now().UTC()
	type key struct {
		kind report.Kind
		name string
	}
	times, failed := map[key][]float64{}, map[key]int{}
	add := func(kind report.Kind, name string, took time.Duration, failure bool) {
		k := key{kind, name}
		times[k] = append(times[k], milliseconds(took))
		if failure {
			failed[k]++
		}
	}
	for _, e := range w.exchanges {
		add(report.API, e.Operation, e.Took, e.Status == 0 || e.Status >= 400)
	}
	for _, c := range w.calls.since(0) {
		add(report.RPC, c.name, c.took, c.code != codes.OK)
	}
	delete(times, key{report.API, ""}) // the requests for unknown paths
	for k, samples := range times {
		w.report.Calls = append(w.report.Calls, report.NewCalls(k.kind, k.name, failed[k], samples))
	}
	w.testify(context.WithoutCancel(ctx))
	status := judge(ctx, w.report, errors.Join(w.contact.lost(), w.stopped))
	folder, err := w.writeReport()
	if err != nil && (status == ExitConforms || status == ExitBlocked) {
		status = ExitUsage // there is no verdict without a consistent report
	}
	if w.dir != nil {
		if w.report.Verdict == report.DoesNotConform {
			w.dir.Failed()
		}
		err = errors.Join(err, w.dir.Close())
	}
	w.summarize(folder)
	return status, err
}

func (w *job) summarize(folder string) {
	r := w.report
	w.say("\n%s: %s\n%s\n", strings.ToUpper(r.Headline()), r.Why, r.Promises())
	for _, result := range r.Results {
		switch result.Status {
		case report.Passed:
			if len(result.Extent.Partly()) > 0 {
				w.say("  %s %s", strings.TrimSpace(result.Group+" "+result.ID), result.Kept())
			}
		case report.Failed, report.Blocked, report.NotTested:
			w.say("  %-12s %-6s %s", strings.ReplaceAll(string(result.Status), "_", " "), result.Group,
				strings.TrimSpace(result.ID+" "+result.Name))
		}
	}
	if n := r.Count(report.Interrupted); n > 0 {
		w.say("  %d were interrupted, or not reached any more", n)
	}
	for _, left := range r.Ledger.Left {
		w.say("  left and swept: %s", left)
	}
	for _, finding := range r.Witness.Findings {
		w.say("  witness: %s", finding)
	}
	_, peak := w.budget.held()
	w.say("\nFIGURE conformance verdict=%q results=%d passed=%d failed=%d blocked=%d not_tested=%d "+
		"not_applicable=%d interrupted=%d peak_objects=%d peak_gib=%d seconds=%.1f", r.Verdict,
		len(r.Results), r.Count(report.Passed), r.Count(report.Failed), r.Count(report.Blocked),
		r.Count(report.NotTested), r.Count(report.NotApplicable), r.Count(report.Interrupted),
		peak.objects, peak.gib, r.Run.Ended.Sub(r.Run.Began).Seconds())
	page := filepath.Join(folder, "index.html")
	if full, err := filepath.Abs(page); err == nil {
		page = full
	}
	w.say("The report: %s", page)
	w.say("To clean up after it, should anything be left: %s", cleanCommand(w.id))
}

func (w *job) folder() string { return cmp.Or(w.settings.report, prefix+w.id) }

// tryFolder creates the report's folder and removes it again. So a run fails before it begins if
// the folder cannot be created, and a killed run leaves no empty folder.
func tryFolder(folder string) error {
	if err := report.MakeFolder(folder); err != nil {
		return err
	}
	return os.Remove(folder)
}

// writeReport writes the report and returns its folder. If it cannot write the folder, it writes
// into the run's directory.
func (w *job) writeReport() (folder string, err error) {
	folder = w.folder()
	err = report.Write(folder, w.report, w.token)
	if w.dir != nil && errors.Is(err, report.ErrNotWritten) {
		folder = filepath.Join(w.dir.Dir, "report")
		w.dir.Failed()
		err = errors.Join(err, report.Write(folder, w.report, w.token))
	}
	return folder, err
}

func toolVersions() map[string]string {
	versions := map[string]string{}
	for tool, flag := range map[string]string{"mke2fs": "-V", "mkfs.xfs": "-V",
		"mkfs.btrfs": "--version", "blkid": "--version"} {
		out, err := exec.Command(tool, flag).CombinedOutput()
		if first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n"); err == nil {
			versions[tool] = first
		}
	}
	return versions
}

func osRelease() string {
	text, _ := guest.ReadFile("/etc/os-release")
	for line := range strings.Lines(string(text)) {
		if name, is := strings.CutPrefix(strings.TrimSpace(line), "PRETTY_NAME="); is {
			return strings.Trim(name, `"`)
		}
	}
	return ""
}

// job is one call of preflight, run or clean.
type job struct {
	*Program
	*settings
	id   string // the run's ID
	mark string // the cluster ID of the run's driver
	rack *rules.TestedRack
	// client sends all requests but those of the rule checks. It repeats a request while the rack is
	// busy.
	client  *oxide.Client
	contact *contact
	project *project
	cleaner *cleaner
	budget  *budget
	// admin is the client of a simulated rack's admin listener, or nil.
	admin *adminapi.Client
	// here is the instance in which this program runs. second and helper are other instances, or nil.
	here, second, helper *oxide.Instance
	latency              time.Duration // the median of a small request to the rack

	// behaviours describes, in sentences, what the rack does with the disks of running instances.
	behaviours []string

	// dir has the run's processes and their logs. It is nil until the parts run.
	dir       *harness.Run
	calls     callLog
	exchanges []rules.RecordedCall
	progress  progress
	report    *report.Report
	stopped   error // the reason why the run ended early
}

func openJob(p *Program, s *settings) (w *job, err error) {
	defer harness.Catch(&err)
	// Remove the token from all output, because a rack may repeat it in an error.
	secret := report.Redactor(s.token)
	p.Stdout = report.PlainWriter{To: p.Stdout, Redact: secret}
	p.Stderr = report.PlainWriter{To: p.Stderr, Redact: secret}
	w = &job{Program: p, settings: s, id: newRunID()}
	w.mark, w.budget, w.progress = prefix+w.id, newBudget(s.budget), progress{out: p.Stdout}
	if s.admin != "" {
		w.admin = &adminapi.Client{URL: s.admin}
	}
	w.report = &report.Report{Schema: report.SchemaVersion, CleanUp: cleanCommand(w.id),
		Rack: report.RackFacts{Host: s.host, Project: s.project, APIVersion: rules.APIVersion,
			HotPlug: report.HotPlugUnknown, Release: s.release, Simulated: s.admin != ""}}
	w.rack = harness.Got(rules.Open(rules.Config{Host: s.host, Token: s.token, Project: s.project,
		CAFile: s.caFile, Mark: w.id, Description: mark{Run: w.id}.description(), Admin: w.admin,
		Through: func(next http.RoundTripper) http.RoundTripper {
			return budgeted{next, w.budget, w.id}
		}}))
	client := *w.rack.HTTP()
	client.Transport, client.Timeout = patient{client.Transport}, 0
	w.client, err = oxide.NewClient(oxide.WithHost(s.host), oxide.WithToken(s.token),
		oxide.WithHTTPClient(&client))
	harness.Must(harness.Wrap(err, "make a client of the rack"))
	w.project = &project{w.client, oxide.NameOrId(s.project)}
	w.cleaner = &cleaner{program: p, client: w.client, project: w.project, rack: w.rack, run: w.id,
		helper: s.helper, known: map[string]bool{}, dead: map[string]bool{}}
	w.contact = &contact{client: w.client}
	w.calls.budget, w.calls.contact = w.budget, w.contact
	return w, nil
}

func cleanCommand(run string) string { return "oxide-conformance clean --run " + run }

func (s *settings) firmwareID() (string, error) {
	id, vendor, err := guest.Firmware(s.sysfsRoot)
	switch {
	case err != nil:
		return "", err
	case vendor != "Oxide":
		return "", fmt.Errorf("the firmware's vendor is %q, not Oxide", vendor)
	case !isUUID(id):
		return "", fmt.Errorf("the firmware's serial number is %q, not the UUID of an instance", id)
	}
	return id, nil
}

// These errors say why a run lost its rack. Failures after the loss do not count against the rack.
var (
	errAway  = errors.New("the rack does not answer any more")
	errToken = errors.New("the rack does not know the token any more: it has expired, or somebody " +
		"has deleted it; create another one with oxide auth login")
)

// lostAfter is how long a rack does not answer, or refuses the token, before it counts as lost.
const lostAfter = 10 * time.Second

// contact records whether the rack still answers, and still accepts the token.
type contact struct {
	client *oxide.Client
	loss   atomic.Pointer[error] // why the rack was lost, or nil
}

func (c *contact) lost() error {
	if err := c.loss.Load(); err != nil {
		return *err
	}
	return nil
}

// ask sends a request, and returns an error if the rack is lost. Any answer shows that the rack
// is there, except 401: then the token is not valid any more.
func (c *contact) ask(ctx context.Context) error {
	if c.lost() != nil || ctx.Err() != nil {
		return c.lost()
	}
	loss := errAway
	asking, cancel := context.WithTimeout(ctx, lostAfter)
	defer cancel()
	err := harness.Await(asking, lostAfter, func() error {
		_, err := c.client.CurrentUserView(asking)
		switch _, answered := errors.AsType[*oxide.HTTPError](err); {
		case errors.Is(err, oxide.ErrHTTP401):
			loss = errToken
		case answered:
			return nil
		case asking.Err() == nil: // otherwise the rack had no time to answer
			loss = errAway
		}
		return err
	})
	if err != nil && ctx.Err() == nil {
		c.loss.Store(&loss)
	}
	return c.lost()
}

// unlessLost turns a failure into an interruption if the rack is lost. It asks the rack only after
// a failure.
func (c *contact) unlessLost(ctx context.Context, r report.Result) report.Result {
	if r.Status == report.Failed {
		if err := c.ask(ctx); err != nil {
			r.Status, r.Reason = report.Interrupted, err.Error()
		}
	}
	return r
}

// briefly returns an error that names the failed step and contains the rack's refusal on one line.
func briefly(step string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %s", step, rules.Brief(err))
}
