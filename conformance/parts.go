package conformance

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	csisanity "github.com/kubernetes-csi/csi-test/v5/pkg/sanity"
	. "github.com/onsi/ginkgo/v2"
	"github.com/onsi/ginkgo/v2/formatter"
	"github.com/onsi/ginkgo/v2/types"
	. "github.com/onsi/gomega"
	"github.com/oxidecomputer/oxide.go/oxide"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/csisuite"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
)

// runCSISanity runs csi-sanity for the selected kinds of access. One process of the driver serves
// as controller and as node.
func (w *job) runCSISanity(ctx context.Context) (err error) {
	defer harness.Catch(&err)
	driver := harness.Got(w.startDriver(ctx, harness.ModeAll))
	log, err := os.Create(filepath.Join(w.dir.Dir, "csi-sanity.log"))
	if err != nil {
		return errors.Join(err, driver.Stop())
	}
	defer log.Close()
	formatter.ColorableStdOut = log
	suite, reporter := GinkgoConfiguration()
	suite.PollProgressAfter = time.Minute
	suite.GracePeriod, suite.Timeout = time.Minute, 12*time.Hour
	reporter.NoColor, reporter.SilenceSkips = true, true
	accesses := w.describe(ctx, driver)
	if !w.rack.Hotplug {
		suite.SkipStrings = []string{csisuite.AttachSkip.Spec.String()}
	}
	RegisterFailHandler(Fail)
	csisuite.Quiet()
	s := &specs{job: w}
	ReportBeforeSuite(func(r Report) {
		s.each = r.PreRunStats.TotalSpecs / accesses // the specs are the same for each access
	})
	// Ginkgo waits for the end of an interrupted function only if the function takes a SpecContext.
	ReportBeforeEach(func(_ SpecContext, r SpecReport) { s.begin(ctx, r) })
	ReportAfterEach(func(_ SpecContext, r SpecReport) { s.end(ctx, r) })
	// Change to /: if the working directory is gone, Ginkgo exits before the run removes its objects.
	here, err := os.Getwd()
	_ = os.Chdir("/") // always exists
	RunSpecs(&verdictOfSpecs{}, "csi-sanity", suite, reporter)
	if err == nil {
		_ = os.Chdir(here) // the directory may be gone
	}
	if len(s.untested) > 0 {
		w.incomplete(fmt.Errorf("specs that are not tested: %d, the first because %w; repeat the run "+
			"when nobody else uses the project and this instance", len(s.untested), s.untested[0]))
	}
	return driver.Stop()
}

// describe makes csi-sanity's specs for each selected kind of access, and counts these kinds.
func (w *job) describe(ctx context.Context, driver *harness.Plugin) (accesses int) {
	for _, c := range csisuite.Combinations() {
		access := c.Access()
		if c.Split || !w.selects(access) {
			continue
		}
		accesses++
		config := c.Config()
		config.Address = driver.Endpoint
		config.DialOptions = append(config.DialOptions,
			grpc.WithChainUnaryInterceptor(withMark(ctx, w.mark+"-"+access), w.calls.intercept))
		config.ControllerDialOptions = config.DialOptions
		csisuite.Place(config, driver.Dir)
		Describe(access, Label(access), func() { csisanity.GinkgoTest(config) })
	}
	return accesses
}

// verdictOfSpecs replaces the *testing.T that RunSpecs gets under go test.
type verdictOfSpecs struct{}

// Fail ignores a failed spec, because the report has it.
func (*verdictOfSpecs) Fail() {}

// startDriver starts the driver that is built into this program, with the settings of the run, and
// waits until it is ready.
func (w *job) startDriver(ctx context.Context, mode string) (*harness.Plugin, error) {
	env := map[string]string{"OXIDE_HOST": w.host, "OXIDE_TOKEN": w.token, "OXIDE_CA_FILE": w.caFile,
		"OXIDE_PROJECT": w.settings.project, "OXIDE_CLUSTER_ID": w.mark, "OXIDE_CONFORMANCE_MARK": w.mark,
		"OXIDE_SYSFS_ROOT": w.sysfsRoot, "OXIDE_DEV_ROOT": w.devRoot}
	driver, err := w.dir.StartPlugin(ctx, harness.PluginOptions{Mode: mode, Env: env})
	if err == nil {
		err = driver.AwaitReady(ctx)
	}
	return driver, harness.Wrap(err, "start the driver")
}

// resultOf converts Ginkgo's report of a csi-sanity spec, and the spec's calls, into a result. The
// outermost container of a spec is named after the access.
func resultOf(r SpecReport, calls []rpc, hotplug bool) report.Result {
	access := r.ContainerHierarchyTexts[0]
	name := strings.TrimSpace(strings.TrimPrefix(r.FullText(), access))
	result := report.Result{Group: access, Name: name, Seconds: r.RunTime.Seconds(), Tries: 1,
		Evidence: evidence(calls)}
	for _, c := range calls {
		result.Extent.Answer(c.name, strings.TrimSpace(c.code.String()+" "+c.reason))
	}
	switch {
	case r.State.Is(types.SpecStatePassed):
		result.Status = report.Passed
		if fault := aboutItself(name, calls); fault != "" {
			result.Status, result.Reason = report.Failed, fault
		}
	case r.State.Is(types.SpecStateInterrupted | types.SpecStateAborted):
		result.Status, result.Reason = report.Interrupted, "the run was interrupted"
	case r.State.Is(types.SpecStateSkipped | types.SpecStatePending):
		result.Tries = 0
		switch i, attach := csisuite.Explain(csisuite.Skips, r), csisuite.AttachSkip; {
		case i >= 0:
			skip := csisuite.Skips[i]
			result.Status, result.Reason = report.NotApplicable, skip.Capability+": "+skip.Reason
		case attach.Spec.MatchString(r.FullText()) && !hotplug:
			result.Status, result.Reason = report.Blocked, attach.Capability+": "+attach.Reason
		case r.Failure.IsZero():
			result.Status, result.Reason = report.Interrupted, "the run was interrupted before it"
		default:
			result.Status = report.Failed
			result.Reason = "skipped without an explanation: " + r.Failure.Message
		}
	default:
		reason := strings.TrimSpace(r.Failure.Message)
		if r.Failure.ForwardedPanic != "" {
			reason += "\npanic: " + r.Failure.ForwardedPanic
		}
		result.Status = report.Failed
		result.Reason = fmt.Sprintf("%s\nat %s", reason, r.Failure.Location)
	}
	return result
}

// specs is the state of a run of csi-sanity's specs.
type specs struct {
	job      *job
	each     int       // the number of specs for each access
	point    int       // the number of the driver's calls before the current spec
	before   inventory // the volumes before the spec; nil if the rack did not list them
	untested []error   // why specs are not tested
}

func (s *specs) begin(ctx context.Context, r SpecReport) {
	if access := r.ContainerHierarchyTexts[0]; s.job.progress.part != access {
		s.job.progress.enter(access, s.each)
	}
	s.point = len(s.job.calls.since(0))
	if !r.State.Is(types.SpecStateSkipped | types.SpecStatePending) {
		s.before = s.volumes(ctx)
	}
}

func (s *specs) end(ctx context.Context, r SpecReport) {
	w := s.job
	if r.State.Is(types.SpecStateInterrupted) {
		w.incomplete(awaitFunction(ctx))
	}
	calls := w.calls.since(s.point)
	result := w.contact.unlessLost(ctx, resultOf(r, calls, w.rack.Hotplug))
	if result.Status == report.Failed && ctx.Err() == nil {
		if err := s.misled(ctx, s.volumes(ctx), calls); err != nil {
			result.Status = report.NotTested
			result.Reason = fmt.Sprintf("%s; what the spec found therefore says nothing: %s", err,
				result.Reason)
			s.untested = append(s.untested, err)
		}
	}
	w.result(result)
	if err := w.contact.lost(); err != nil {
		AbortSuite(err.Error())
	}
}

// awaitFunction waits until csi-sanity's function of an interrupted spec has ended. If the function
// called By after the last spec, Ginkgo would end the program before the run removes its objects.
func awaitFunction(ctx context.Context) error {
	return harness.Await(context.WithoutCancel(ctx), 50*time.Second, func() error {
		var stacks strings.Builder
		if err := pprof.Lookup("goroutine").WriteTo(&stacks, 2); err != nil {
			return err
		}
		for goroutine := range strings.SplitSeq(stacks.String(), "\n\n") {
			// Skip a function that has failed: it blocks forever, because nobody receives its failure.
			if strings.Contains(goroutine, "/csi-test/v5/pkg/sanity.") &&
				!strings.Contains(goroutine, " [chan send") {
				return errors.New("a function of csi-sanity still runs, and may end this program before " +
					"the run's objects are removed; then remove them with oxide-conformance clean")
			}
		}
		return nil
	})
}

// volumes returns the disks and snapshots of the project, or nil if the rack does not list them.
func (s *specs) volumes(ctx context.Context) inventory {
	all, err := s.job.project.volumes(ctx)
	s.job.exchanges = append(s.job.exchanges, s.job.rack.Exchanges()...)
	if err != nil {
		return nil
	}
	return all
}

// misled returns an error if other users of the silo may have made a spec fail: their objects were
// in lists, or they used the quota or this instance's disk slots.
func (s *specs) misled(ctx context.Context, after inventory, calls []rpc) error {
	if s.before == nil || after == nil {
		return nil
	}
	if err := s.othersChanged(after, calls); err != nil {
		return err
	}
	full := slices.ContainsFunc(calls, func(c rpc) bool { return c.reason == "RackFull" })
	left, err := quotaLeft(ctx, s.job.client)
	if full && err == nil && left < parts["block"].need.gib {
		return errors.New("others use the silo's quota")
	}
	return nil
}

// othersChanged returns an error if other users changed objects that affect the spec's calls, or if
// a call listed an object of theirs that it would not have listed before the spec.
func (s *specs) othersChanged(after inventory, calls []rpc) error {
	own := map[string]bool{}
	for _, one := range append(s.before.of(s.job.id), after.of(s.job.id)...) {
		own[one.id] = true
	}
	for _, call := range calls {
		in, listed := func(item) bool { return false }, []string(nil)
		switch {
		case call.name == "ControllerPublishVolume":
			in = func(i item) bool { return i.attachedTo() == s.job.here.Id }
		case call.object != "": // the answer is about this object only
		case call.name == "ListVolumes":
			in = func(i item) bool { return i.kind == "disk" }
			listed = []string{"attached", "attaching", "detaching"}
		case call.name == "ListSnapshots":
			in = func(i item) bool { return i.kind == "snapshot" }
			listed = []string{"ready", "faulted"}
		}
		foreign := func(all inventory) map[string]string {
			states := map[string]string{}
			for _, one := range all {
				if in(one) && !own[one.id] && !s.job.budget.made(one.id) {
					states[one.id] = one.state + " " + one.attachedTo()
				}
			}
			return states
		}
		states := foreign(s.before)
		changed := !maps.Equal(states, foreign(after))
		for _, id := range call.listed {
			state, _, _ := strings.Cut(states[id], " ")
			changed = changed || listed != nil && !slices.Contains(listed, state) &&
				!own[id] && !s.job.budget.made(id)
		}
		if changed {
			return fmt.Errorf("others changed their disks or snapshots meanwhile, which %s deals with",
				call.name)
		}
	}
	return nil
}

// rpcNames matches the names of CSI's RPCs. The name of a spec contains the RPC that it tests.
var rpcNames = regexp.MustCompile(`\b(ControllerPublishVolume|ControllerUnpublishVolume|` +
	`ValidateVolumeCapabilities|ControllerGetCapabilities|ControllerGetVolume|GetPluginCapabilities|` +
	`GetPluginInfo|GetCapacity|CreateVolume|DeleteVolume|ListVolumes|CreateSnapshot|DeleteSnapshot|` +
	`ListSnapshots|GetSnapshot|NodeStageVolume|NodeUnstageVolume|NodePublishVolume|` +
	`NodeUnpublishVolume|NodeGetVolumeStats|NodeGetCapabilities|NodeGetInfo|Probe)\b`)

// aboutItself returns why a passed spec proves nothing: it made no call, or did not call the RPC in
// its name. Otherwise aboutItself returns "".
func aboutItself(name string, calls []rpc) string {
	if len(calls) == 0 {
		return "the spec has made no call of the driver, and so has shown nothing"
	}
	about := rpcNames.FindString(name)
	if about == "" || slices.ContainsFunc(calls, func(c rpc) bool { return c.name == about }) {
		return ""
	}
	return fmt.Sprintf("the spec has not called %s, which it is about", about)
}

// runData checks the data on volumes. The driver runs as controller in this process, and as node in
// this instance, in the second instance and in the instance that the setting --helper names.
func (w *job) runData(ctx context.Context) (err error) {
	bench, end, err := w.bench(ctx)
	defer func() { err = errors.Join(err, end()) }()
	if err != nil {
		return fmt.Errorf("prepare the checks of data: %w", err)
	}
	checks := allChecks()
	w.progress.enter(partData, len(checks))
	for _, check := range checks {
		if ctx.Err() != nil || w.contact.lost() != nil {
			break
		}
		result, hangs := w.checkData(ctx, bench, check)
		w.result(w.contact.unlessLost(ctx, result))
		if hangs {
			return fmt.Errorf("the checks after %s were not made: what hangs may still hang", check.ID)
		}
	}
	return nil
}

// checkData returns the result of a check, and whether the check has reached its time limit.
func (w *job) checkData(ctx context.Context, b *data.Bench, check data.Check) (result report.Result,
	hangs bool) {
	result = report.Result{Group: partData, ID: check.ID, Name: check.Says, Source: check.Source}
	if why := check.Blocked(b); why != "" {
		result.Status, result.Reason = report.NotTested, why
		if check.Needs.Hotplug && !b.Hotplug {
			result.Status = report.Blocked
		}
		return result, false
	}
	if missing := check.GiB - w.room(ctx); missing > 0 {
		result.Status = report.NotTested
		result.Reason = fmt.Sprintf("not tested: it needs %d GiB more", missing)
		return result, false
	}
	point := len(w.calls.since(0))
	w.rack.Exchanges()
	began := time.Now()
	logged := *b
	logged.Log = &data.Log{}
	err := check.Run(ctx, &logged)
	result.Extent = logged.Log.Extent()
	calls, exchanges := w.calls.since(point), w.rack.Exchanges()
	w.exchanges = append(w.exchanges, exchanges...)
	result.Tries, result.Seconds = 1, time.Since(began).Seconds()
	result.Evidence = append(evidence(calls), answers(exchanges)...)
	switch missing := notMade(check, calls); {
	case ctx.Err() != nil:
		result.Status, result.Reason = report.Interrupted, "the run was interrupted"
	case err != nil && slices.ContainsFunc(exchanges, func(c rules.RecordedCall) bool {
		return c.Status == http.StatusInsufficientStorage
	}) && w.room(ctx) < max(check.GiB, parts[partData].need.gib-optional):
		result.Status = report.NotTested
		result.Reason = "not tested: others use the silo's quota meanwhile: " + err.Error()
	case err != nil:
		result.Status, result.Reason = report.Failed, err.Error()
	case len(missing) > 0:
		result.Status = report.Failed
		result.Reason = fmt.Sprintf("the check has not called %s, which it is about",
			strings.Join(missing, ", "))
	default:
		result.Status = report.Passed
	}
	return result, errors.Is(err, data.ErrHangs)
}

// quotaLeft returns how many GiB of the silo's quota are left.
func quotaLeft(ctx context.Context, client *oxide.Client) (int64, error) {
	use, err := client.UtilizationView(ctx)
	if err != nil {
		return 0, err
	}
	return (int64(use.Capacity.Storage) - int64(use.Provisioned.Storage)) / harness.GiB, nil
}

// room returns how many GiB the run may still create within its budget and the silo's quota.
func (w *job) room(ctx context.Context) int64 {
	now, _ := w.budget.held()
	left := w.budget.limit.gib - now.gib
	if quota, err := quotaLeft(ctx, w.client); err == nil {
		left = min(left, quota)
	}
	return left
}

func notMade(check data.Check, calls []rpc) (missing []string) {
	for _, name := range check.Calls {
		isRPC := strings.ToLower(name) != name
		if isRPC && !slices.ContainsFunc(calls, func(c rpc) bool { return c.name == name }) {
			missing = append(missing, name)
		}
	}
	return missing
}

// bench starts the programs for the checks of data. The caller must call end, also after an error.
func (w *job) bench(ctx context.Context) (b *data.Bench, end func() error, err error) {
	var ends []func() error
	end = func() error {
		var errs []error
		for _, one := range slices.Backward(ends) {
			errs = append(errs, one())
		}
		return errors.Join(errs...)
	}
	defer harness.Catch(&err)
	driver := harness.Got(w.startDriver(ctx, harness.ModeController))
	ends = append(ends, driver.Stop)
	conn := harness.Got(driver.Dial(ctx, grpc.WithChainUnaryInterceptor(w.calls.intercept)))
	ends = append(ends, conn.Close)
	config := guest.Config{Plugin: w.Self["oxide-csi-plugin"]}
	here := config
	here.SysfsRoot, here.DevRoot = w.sysfsRoot, w.devRoot
	a := harness.Got(guest.Here(ctx, here))
	ends = append(ends, a.Close)
	a.Observe = w.calls.observe
	connect := func(ctx context.Context, shell string) (*guest.AgentClient, error) {
		agent, err := guest.Connect(ctx, strings.Fields(shell), config)
		if err == nil {
			agent.Observe = w.calls.observe
		}
		return agent, err
	}
	seed := harness.Got(strconv.ParseUint(w.id, 16, 64))
	var names atomic.Int64
	b = &data.Bench{Controller: csi.NewControllerClient(conn), A: a, Oxide: w.client,
		Hotplug: w.rack.Hotplug, Seed: seed, MayStop: w.cleaner.mayStop,
		Name: func(what string) string {
			return fmt.Sprintf("%s-%s-%d", w.mark, what, names.Add(1))
		}}
	if w.second != nil {
		b.B = harness.Got(connect(ctx, w.secondShell))
		b.B.Name = "instance " + string(w.second.Name)
		ends = append(ends, b.B.Close)
		facts := harness.Got(guest.ReadFacts(ctx, b.B, guest.Nothing{}))
		if facts.InstanceID != w.second.Id {
			return nil, end, fmt.Errorf("--second-shell reaches instance %s, expected %s (%s)",
				facts.InstanceID, w.second.Name, w.second.Id)
		}
	}
	if w.helper != nil && w.guestShell != "" {
		b.Helper = &data.Helper{InstanceID: w.helper.Id,
			Connect: func(ctx context.Context) (*guest.AgentClient, error) {
				return connect(ctx, w.guestShell)
			}}
		w.cleaner.started = b.Helper
	}
	return b, end, nil
}

type amount struct {
	objects int
	gib     int64
}

func (a amount) String() string {
	return fmt.Sprintf("%d disks and snapshots of %d GiB", a.objects, a.gib)
}

const (
	partRules = "rules"
	partData  = "data"
)

var partNames = []string{partRules, "ext4", "xfs", "btrfs", "block", partData}

var parts = map[string]struct {
	// need is the peak of objects and GiB while the part runs on the simulator, including the objects
	// that the rule checks share until the run ends. A test compares it with the peak of a run.
	need amount
	// requests is the number of the part's requests to the rack. own is the time that the part takes
	// on a simulated rack, which answers almost at once.
	requests int
	own      time.Duration
	// tools are the programs that the part needs on this machine.
	tools []string
}{
	partRules: {amount{14, 14}, 1250, 7 * time.Second, nil},
	"ext4": {amount{14, 14}, 840, 3 * time.Second,
		[]string{"mke2fs", "e2fsck", "resize2fs", "blkid"}},
	"xfs":    {amount{14, 14}, 840, 3 * time.Second, []string{"mkfs.xfs", "blkid"}},
	"btrfs":  {amount{14, 14}, 840, 3 * time.Second, []string{"mkfs.btrfs", "btrfs", "blkid"}},
	"block":  {amount{14, 14}, 840, 3 * time.Second, []string{"blkid"}},
	partData: {amount{9, 18}, 780, 55 * time.Second, nil},
}

// optional is the number of GiB that only the largest checks of partData need.
const optional = 8

// needOf returns the most that the selected parts need at one time, plus the disk that describes
// the run. It subtracts the parameter "lacking" from the GiB that partData needs.
func needOf(selected []string, lacking int64) amount {
	var most amount
	for _, part := range selected {
		need := parts[part].need
		if part == partData {
			need.gib -= lacking
		}
		most = amount{max(most.objects, need.objects), max(most.gib, need.gib)}
	}
	return amount{most.objects + 1, most.gib + 1}
}

type budget struct {
	limit amount

	mu sync.Mutex
	// mu guards the fields below: the objects that exist or are being created, the IDs of deleted
	// objects, and the peak.
	objects []*object
	gone    map[string]bool
	most    amount
}

// object is a disk or snapshot of the run. A request deletes it by its ID or by its name.
type object struct {
	id   string // "" while the object is being created
	name string // "" if the driver chose it
	gib  int64
}

func newBudget(limit amount) *budget { return &budget{limit: limit, gone: map[string]bool{}} }

// begin reserves room for objects. After the creation the caller calls end, and passes whether the
// rack created the objects, and the IDs that the rack returned.
func (b *budget) begin(objects ...*object) (end func(made bool, ids ...string), err error) {
	asked := sum(objects)
	b.mu.Lock()
	defer b.mu.Unlock()
	now := sum(b.objects)
	if asked.objects > 0 && (now.objects+asked.objects > b.limit.objects ||
		now.gib+asked.gib > b.limit.gib) {
		return nil, fmt.Errorf("the budget is %s, and the run has %s: %s more are not made; raise "+
			"--budget, or leave parts out with --only", b.limit, now, asked)
	}
	b.objects = append(b.objects, objects...)
	now = sum(b.objects)
	b.most.objects, b.most.gib = max(b.most.objects, now.objects), max(b.most.gib, now.gib)
	return func(made bool, ids ...string) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for i, id := range ids {
			objects[i].id = id
		}
		b.objects = slices.DeleteFunc(b.objects, func(o *object) bool {
			return slices.Contains(objects, o) && (!made || b.gone[o.id])
		})
	}, nil
}

// deleted releases the room of the object that was deleted by this ID or name. It remembers the ID,
// because the answer to the object's creation may come later.
func (b *budget) deleted(idOrName string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if isUUID(idOrName) {
		b.gone[idOrName] = true
	}
	b.objects = slices.DeleteFunc(b.objects, func(o *object) bool {
		return idOrName != "" && (o.id == idOrName || o.name == idOrName)
	})
}

// identify sets the ID of the object with this name if it has none. It calls the function id
// without the lock, because the function may wait for the rack's answer.
func (b *budget) identify(name string, id func() string) {
	b.mu.Lock()
	i := slices.IndexFunc(b.objects, func(o *object) bool { return o.id == "" && o.name == name })
	b.mu.Unlock()
	if i < 0 {
		return
	}
	known := id()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, o := range b.objects {
		if o.id == "" && o.name == name {
			o.id = known
		}
	}
}

// made() reports whether a disk or snapshot with this ID is or was the run's.
func (b *budget) made(id string) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.gone[id] || slices.ContainsFunc(b.objects, func(o *object) bool { return o.id == id })
}

func sum(objects []*object) amount {
	all := amount{objects: len(objects)}
	for _, o := range objects {
		all.gib += o.gib
	}
	return all
}

func (b *budget) held() (now, most amount) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return sum(b.objects), b.most
}

func estimate(selected []string, latency time.Duration) time.Duration {
	var all time.Duration
	for _, part := range selected {
		all += parts[part].own + time.Duration(parts[part].requests)*latency
	}
	return all
}

type progress struct {
	out     io.Writer
	latency time.Duration
	began   time.Time
	// expected is the estimate for the whole run. spent is the estimate for the parts that are done.
	expected, spent time.Duration
	// part is the running part, or "". It has partAll checks or specs, of which partDone are done.
	part              string
	partDone, partAll int
}

func (p *progress) enter(part string, all int) {
	p.leave()
	p.part, p.partDone, p.partAll = part, 0, all
	fmt.Fprintf(p.out, "\n%s\n", part)
}

func (p *progress) leave() {
	if p.part != "" {
		p.spent += estimate([]string{p.part}, p.latency)
	}
	p.part = ""
}

func (p *progress) done(status, name, reason string) {
	p.partDone++
	line := fmt.Sprintf("  %3d/%-3d  %-14s %s", p.partDone, p.partAll, status, name)
	if runes := []rune(line); len(runes) > 120 {
		line = string(runes[:119]) + "…"
	}
	fmt.Fprintf(p.out, "%s  [%s left]\n", line, round(p.left()))
	if reason != "" {
		fmt.Fprintf(p.out, "                          %s\n", reason)
	}
}

// left estimates the remaining time. It multiplies the estimate for the remaining work by the ratio
// of the time that the finished work has taken to the estimate for the finished work.
func (p *progress) left() time.Duration {
	behind := p.spent
	if p.partAll > 0 {
		behind += time.Duration(float64(estimate([]string{p.part}, p.latency)) *
			float64(p.partDone) / float64(p.partAll))
	}
	left := p.expected - behind
	if behind < time.Second {
		return left
	}
	return max(0, time.Duration(float64(left)*float64(time.Since(p.began))/float64(behind)))
}

func round(d time.Duration) string {
	if d < time.Minute {
		return d.Round(time.Second).String()
	}
	return fmt.Sprintf("%d min", int((d + 30*time.Second).Minutes()))
}

// maxNameLength is the limit that CSI sets. csi-sanity uses names of this length.
const maxNameLength = 128

// withMark puts the mark before the name in each request to create a volume or snapshot, because
// csi-sanity uses the same names in each run, and for each kind of access. After the run was
// interrupted, withMark refuses these requests.
func withMark(run context.Context, mark string) grpc.UnaryClientInterceptor {
	return func(ctx context.Context, method string, req, reply any, conn *grpc.ClientConn,
		invoke grpc.UnaryInvoker, options ...grpc.CallOption) error {
		// The request is copied, because csi-sanity sends some requests again.
		switch asked := req.(type) {
		case *csi.CreateVolumeRequest:
			marked := proto.Clone(asked).(*csi.CreateVolumeRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		case *csi.CreateSnapshotRequest:
			marked := proto.Clone(asked).(*csi.CreateSnapshotRequest)
			marked.Name = markedName(mark, asked.GetName())
			req = marked
		default:
			return invoke(ctx, method, req, reply, conn, options...)
		}
		if run.Err() != nil {
			return status.Error(codes.Canceled, "the run was interrupted")
		}
		return invoke(ctx, method, req, reply, conn, options...)
	}
}

// markedName returns the name with the mark before it. An empty name stays empty, because
// csi-sanity expects an error for it. A long name is cut to the limit and stays unique.
func markedName(mark, name string) string {
	if name == "" {
		return ""
	}
	marked := mark + "-" + name
	if len(marked) <= maxNameLength {
		return marked
	}
	sum := sha256.Sum256([]byte(name))
	tail := "-" + hex.EncodeToString(sum[:4])
	return marked[:maxNameLength-len(tail)] + tail
}
