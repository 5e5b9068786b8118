//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"
	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// strangers creates disks whose names and descriptions look like those of a run, and attaches one
// of them to instance a.
func strangers(t *testing.T, rack *bed, run string) {
	t.Helper()
	descriptions := []string{"made by hand", "", "oxide-conformance", "oxide-conformance-" + run,
		"oxide-conformance " + run, `oxide-conformance {"run":"` + run, `oxide-conformance {"run":"my"}`,
		`my oxide-conformance {"run":"` + run + `"}`, `csi.oxide.computer {"name":"x"}`,
		`csi.oxide.computer {"name":"oxide-conformance-` + run + `","cluster":"c"}`}
	for _, cluster := range []string{"", "-" + run + "0", "-" + run + "-2", "-1A2B3C4D"} {
		descriptions = append(descriptions,
			`csi.oxide.computer {"name":"x","cluster":"oxide-conformance`+cluster+`"}`)
	}
	for i, description := range descriptions {
		name := fmt.Sprintf("conf-%s-%05d", run, i)
		if i == 1 {
			name = "sanity" // which csi-sanity uses, too
		}
		if id := made(t, rack, name, description); i == 0 {
			csitest.Must(t, rack.AttachDisk(t.Context(), id, rack.Instance("a").ID))
		}
	}
}

// made() creates a disk with a description, such as a run's mark, and returns the disk's ID.
func made(t *testing.T, rack *bed, name, description string) string {
	t.Helper()
	return csitest.Got(rack.Client.DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: description,
			Size: oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()}}))(t).Id
}

func TestARunCountsAsDeadOnlyIfItsProcessIsKnownToBeGone(t *testing.T) {
	now := time.Now()
	boot, namespace, _ := strings.Cut(bootID(), " ")
	host := csitest.Got(os.Hostname())(t)
	const nobody = 1 << 30
	own := os.Getpid()
	for name, test := range map[string]struct {
		boot     string
		pid      int
		start    string
		instance string
		dead     bool
	}{
		"a run whose process is gone":                 {boot + " " + namespace, nobody, "1", "a", true},
		"a run whose process lives":                   {bootID(), own, startTime(own), "a", false},
		"a run whose process ID was given to another": {boot + " " + namespace, own, "1", "a", true},
		"a run in a container of this machine":        {boot + " pid:[1]", nobody, "1", "a", false},
		"a run on this machine before its last boot":  {"before " + namespace, nobody, "1", "a", true},
		"a run on another machine with the same name": {"other " + namespace, nobody, "1", "b", false},
	} {
		r := deadRun{id: "11111111", mark: mark{Run: "11111111", Host: host, Boot: test.boot,
			PID: test.pid, Start: test.start, Began: &now, Instances: []string{test.instance, "c"}}}
		if why := r.alive("a"); (why == "") != test.dead {
			t.Errorf("%s: %q", name, why)
		}
	}
}

func TestCleanListsInstancesThatADeadRunStoppedOrStarted(t *testing.T) {
	const running, stopped = oxide.InstanceStateRunning, oxide.InstanceStateStopped
	r := deadRun{mark: mark{Instances: []string{"here", "second", "helper"}, Helper: "helper"}}
	for name, want := range map[string][2]oxide.InstanceState{
		"": {running, stopped}, "second helper": {stopped, running}} {
		notes := r.notAsBefore(inventory{{id: "here", state: string(running)},
			{id: "second", name: "second", state: string(want[0])}, {id: "other", state: string(stopped)},
			{id: "helper", name: "helper", state: string(want[1])}})
		if len(notes) != len(strings.Fields(name)) {
			t.Errorf("expected notes on %q; found %q", name, notes)
		}
	}
}

// jobOn returns the job of a run on a rack, before its preflight.
func jobOn(t *testing.T, rack *bed) *job {
	t.Helper()
	return csitest.Got(openJob(&Program{Stdout: io.Discard}, &settings{host: rack.URL,
		token: rack.Token, project: rack.Project, caFile: rack.CA, budget: amount{20, 40}}))(t)
}

func TestARunMayStopNoInstanceThatOthersUse(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{Hotplug: adminapi.HotplugNone})
	now, helper := time.Now(), rack.Instance("helper").ID
	instance := csitest.Got(rack.Client.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(helper)}))(t)
	w := jobOn(t, rack)
	csitest.Must(t, w.cleaner.meet(t.Context(), instance))
	expect := func(instance, says string) { // an error has one line; IsGone is false
		t.Helper()
		err := w.cleaner.mayStop(t.Context(), instance)
		if (err == nil) != (says == "") || err != nil && !strings.Contains(err.Error(), says) ||
			strings.Contains(fmt.Sprint(err), "\n") || rules.IsGone(err) {
			t.Errorf("expected %q; found %v", says, err)
		}
	}
	expect(helper, "")
	for description, says := range map[string]string{
		mark{Run: w.id}.description():       "", // its own disk
		mark{Run: "1a2b3c4d"}.description(): "1a2b3c4d",
		driverWord + `{"cluster":"c"}`:      "of a cluster",
		"mine, and new":                     "not the run's",
	} {
		id := made(t, rack, "disk", description)
		csitest.Must(t, rack.AttachDisk(t.Context(), id, helper))
		expect(helper, says)
		csitest.Must(t, rack.DetachDisk(t.Context(), id, helper))
		csitest.Must(t, rack.DeleteDisk(t.Context(), id))
	}
	made(t, rack, "run", mark{Run: "1a2b3c4d", Host: "elsewhere", Began: &now,
		Instances: []string{rack.Instance("b").ID}}.description())
	expect(rack.Instance("b").ID, "1a2b3c4d on elsewhere uses it")
	expect("nobody", "instance nobody: HTTP 404")
	w.project.name = "other"
	expect(helper, "not in the project")
}

func TestDetachingADiskStopsOnlyTheRunsOwnHelper(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{Hotplug: adminapi.HotplugNone})
	helper := rack.Instance("helper").ID
	w := jobOn(t, rack)
	disk := made(t, rack, "own", mark{Run: w.id}.description())
	csitest.Must(t, rack.AttachDisk(t.Context(), disk, helper))
	csitest.Must(t, rack.StartInstance(t.Context(), helper))
	run := deadRun{id: w.id, mark: mark{Helper: helper, Instances: []string{helper}}}
	remove := func() error {
		now := csitest.Got(w.project.look(t.Context(), disk))(t)
		return w.cleaner.removeDisk(t.Context(), run, *now)
	}
	w.cleaner.started = &data.Helper{InstanceID: helper, Started: true}
	fault := refusing("instance_disk_detach", 400, "InvalidRequest", "no")
	fault.Times = 1
	csitest.Got(rack.Admin.AddFault(t.Context(), fault))(t)
	refused := remove()
	w.cleaner.started = nil
	unknown := remove()
	run.id, w.cleaner.dead = "1a2b3c4d", map[string]bool{w.id: true}
	unnamed := remove()
	instance := csitest.Got(rack.Client.InstanceView(t.Context(),
		oxide.InstanceViewParams{Instance: oxide.NameOrId(helper)}))(t)
	if refused == nil || unknown == nil || unnamed == nil ||
		instance.RunState != oxide.InstanceStateRunning {
		t.Fatalf("expected three refusals and a running helper; found %v, %v, %v, %s", refused, unknown,
			unnamed, instance.RunState)
	}
	w.cleaner.helper = "helper"
	csitest.Must(t, remove())
}

// The rack also has disks that look like the run's own, a user who changes objects, and four other
// runs: a killed one, a live one, one of another machine, and one without the disk that describes
// it. A colleague runs clean all the time, and other users' processes have this program's name. The
// run checks only the rules, because csi-sanity counts the volumes of everybody.
func TestRunConformsOnASharedRackAndChangesNothingOfOtherUsers(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{Instances: []string{"c"}})
	strangers(t, rack, "1a2b3c4d")
	nothingOfRuns, now := balance(t, rack), time.Now()
	made(t, rack, "elsewhere", mark{Run: "22222222", Host: "elsewhere", Began: &now}.description())
	lost := made(t, rack, "unknown", mark{Run: "33333333"}.description())
	env, check := asOthersHave(rack), balance(t, rack)
	alone := asOthersHave(rack, "SECOND", "SECOND_SHELL", "HELPER", "GUEST_SHELL")
	dead := prepare(t, rack, alone)
	c := begin(t, rack, dead, death{how: killed, part: "ext4", at: 20})
	<-c.made
	csitest.Must(t, dead.Process.Kill())
	<-c.ended
	id := regexp.MustCompile(`Run ([0-9a-f]{8}) of`).FindStringSubmatch(dead.out.String())[1]
	programs := []func() error{stranger(t, 65534, "--endpoint=unix:/x/"+workDir(id)+"/csi.sock"),
		stranger(t, 0, "run", "--yes")}
	ctx, stop := context.WithCancel(t.Context())
	others := make(chan error, 1)
	go func() { others <- legal.Strangers(ctx, rack.Rack) }()

	from(rack, "c", alone)
	living := prepare(t, rack, alone, "run", "--yes", "--only", partRules)
	p := prepare(t, rack, env, "run", "--yes", "--only", partRules)
	csitest.Must(t, errors.Join(living.Start(), p.Start()))
	ended := make(chan struct{})
	go func() {
		p.await(t, ExitConforms)
		living.await(t, ExitConforms)
		close(ended)
	}()
	clean := func(want int, args ...string) string {
		colleague := prepare(t, rack, env, append([]string{"clean", "--yes"}, args...)...)
		colleague.exit(t, want)
		return colleague.out.String()
	}
	said := ""
	for over := false; !over; said += clean(ExitConforms) {
		select {
		case <-ended:
			over = true
		default:
		}
	}
	stop()
	if err := <-others; err != nil {
		t.Errorf("touched: %v", err)
	}
	for i, end := range programs {
		if err := end(); fmt.Sprint(err) != "exit status 1" {
			t.Errorf("touched: program %d: %v", i, err)
		}
	}
	check()
	for _, want := range []string{"it still runs, as process", "this is not elsewhere",
		"clean --run 22222222", "without the disk that describes it", "clean --run 33333333"} {
		if !strings.Contains(said, want) {
			t.Errorf("clean does not say %q", want)
		}
	}
	// With --run, clean removes a run of another machine, because the operator knows that it is dead.
	// It fails while a disk of the run is attached to an instance that the run does not name.
	csitest.Must(t, rack.AttachDisk(t.Context(), lost, rack.Instance("b").ID))
	clean(ExitFails, "--run", "33333333")
	csitest.Must(t, rack.DetachDisk(t.Context(), lost, rack.Instance("b").ID))
	clean(ExitConforms, "--run", "33333333")
	clean(ExitConforms, "--run", "22222222")
	nothingOfRuns()
}

// stranger starts a user's process under this program's name. The returned function closes the
// process's input, which ends the process, and returns how it ended.
func stranger(t *testing.T, user uint32, args ...string) (end func() error) {
	t.Helper()
	cmd := exec.Command("/bin/sh")
	cmd.Args = append([]string{"oxide-conformance", "-c", "read x"}, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	input := csitest.Got(cmd.StdinPipe())(t)
	csitest.Must(t, cmd.Start())
	return func() error {
		_ = input.Close()
		return cmd.Wait()
	}
}

// A proxy alters the rack's answers (legal.Kinds). The runs use no admin listener, because a real
// rack has none. Without -short, some also run csi-sanity on one filesystem or on block volumes.
func TestNoRunFailsOnAHealthyRackWithUnusualAnswers(t *testing.T) {
	t.Parallel()
	kinds := short.Some(t, 2, legal.Kinds)
	p := proof.New(t, "legal-runs")
	const nothingMade report.Verdict = "none" // the preflight refused the run
	var mu sync.Mutex
	// mu guards the counts.
	runs, withSanity, alarms, verdicts := 0, 0, 0, map[report.Verdict]int{}
	for seed := range p.Rounds() {
		var group errgroup.Group
		group.SetLimit(4) // the runs wait most of the time
		for i, kind := range kinds {
			rack := rackOf(t, harness.RackOptions{})
			only, draw := partRules, seed+uint64(i)
			// With the kind "limited", csi-sanity takes many minutes.
			sanity := !p.Short() && (kind.Others() || draw%4 == 0 && (p.Long() || kind.Name != "limited"))
			if sanity {
				only += "," + []string{"ext4", "xfs", "btrfs", "block"}[draw/4%4]
			}
			var started atomic.Int32
			group.Go(func() error {
				return legal.Try(t.Context(), rack.Rack, kind, draw, func(host string) error {
					env := asOthersHave(rack, "SECOND", "SECOND_SHELL", "HELPER", "GUEST_SHELL")
					env["OXIDE_HOST"], env["OXIDE_CA_FILE"] = host, ""
					if started.Add(1) > 1 && draw%2 == 0 {
						from(rack, "b", env)
					}
					program := prepare(t, rack, env, "run", "--yes", "--only", only)
					_ = program.Run() // the report has the result
					mu.Lock()
					defer mu.Unlock()
					runs++
					if sanity {
						withSanity++
					}
					verdict := nothingMade
					if r, err := report.Read(program.folder); err == nil {
						verdict = r.Verdict
						if sanity && verdict == report.Conforms && slices.ContainsFunc(r.Results,
							func(result report.Result) bool {
								return result.Status == report.NotTested && result.Group != partRules
							}) {
							t.Errorf("%s: a spec is not tested, but the verdict is %s", kind.Name, verdict)
						}
					} else if program.ProcessState.ExitCode() != ExitUsage ||
						!strings.Contains(program.errs.String(), "nothing was made") {
						verdict = report.DoesNotConform // a run without a report is an error on any rack
					}
					verdicts[verdict]++
					if verdict == report.DoesNotConform || verdict == report.BlockedByRack {
						alarms++
						t.Errorf("%s (%s): %s", kind.Name, kind.Says, tail(program.out.String()))
					}
					p.Say("%s: %s: %s: %s", kind.Name, only, program.ProcessState, verdict)
					return nil
				})
			})
		}
		csitest.Must(t, group.Wait())
	}
	p.Figure("kinds", len(kinds), "runs", runs, "with_csi_sanity", withSanity, "conforms",
		verdicts[report.Conforms], "incomplete", verdicts[report.Incomplete], "nothing_made",
		verdicts[nothingMade], "false_alarms", alarms)
}

// If the environment variable onlyVariable has IDs of checks, this binary is oxide-conformance with
// these checks only. The variable pluginVariable then has the driver's path, and the variable
// timeoutVariable may have the time limit of a data check.
const onlyVariable, pluginVariable, timeoutVariable = "CONFORMANCE_ONLY_CHECKS",
	"CONFORMANCE_PLUGIN", "CONFORMANCE_CHECK_TIMEOUT"

func TestMain(m *testing.M) {
	only, is := os.LookupEnv(onlyVariable)
	agent := len(os.Args) == 2 && os.Args[1] == guest.Verb
	if !is && !agent {
		os.Exit(m.Run())
	}
	ctx, _ := signal.NotifyContext(context.Background(), os.Interrupt) // until the process ends
	if agent {
		os.Exit(guest.Main(ctx))
	}
	allRules = func() []rules.Rule {
		return slices.DeleteFunc(rules.All(), func(r rules.Rule) bool { return r.ID != only })
	}
	allChecks = func() []data.Check {
		some := slices.DeleteFunc(data.Checks(), func(c data.Check) bool {
			return !strings.Contains(only, c.ID)
		})
		for i, c := range some {
			some[i].Run = func(ctx context.Context, b *data.Bench) error {
				b.Blocks = 16 // few, because the content does not matter
				b.CheckTimeout, _ = time.ParseDuration(os.Getenv(timeoutVariable))
				return c.Run(ctx, b)
			}
		}
		return some
	}
	p := Program{Args: os.Args[1:], Getenv: os.Getenv, Stdout: os.Stdout, Stderr: os.Stderr,
		Self: map[string][]string{"oxide-csi-plugin": {os.Getenv(pluginVariable)}}}
	os.Exit(p.Main(ctx))
}

// creating is a proxy that ends the run at the at-th request that creates something.
type creating struct {
	rack     http.Handler
	at       int64
	seen     atomic.Int64
	answered bool          // the run gets the answer to that request before it dies
	late     time.Duration // if answered is false, delays the answer, but no longer than the run lives
	// made is closed after the at-th request was carried out, and ended after the end of the run.
	made, ended chan struct{}
	// exit is the result of the run's process. reader is the read end of its standard output, or nil.
	exit   error
	reader io.Closer
}

// creates matches the paths of creations. A bulk-write-start creates an import, which clean ends.
var creates = regexp.MustCompile(
	`^/v1/(disks|snapshots|images|instances)(/[^/]+/bulk-write-start)?$`).MatchString

func (c *creating) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost || !creates(r.URL.Path) || c.seen.Add(1) != c.at {
		c.rack.ServeHTTP(w, r)
		return
	}
	answer := httptest.NewRecorder()
	c.rack.ServeHTTP(answer, r)
	if !c.answered {
		close(c.made)
		select {
		case <-c.ended:
		case <-time.After(c.late):
		}
	}
	w.Header().Set("Content-Type", answer.Header().Get("Content-Type"))
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes()) // the caller may be dead
	if c.answered {
		_ = http.NewResponseController(w).Flush()
		close(c.made)
	}
}

// death describes an early end of a run that consists of one part and, unless only is "", of one
// check. at is the number of the request, among those that create something, at which it ends.
type death struct {
	how, part, only string
	at              int
}

// These are ways to end a run. A run that ends by killed or killedLater removes none of its
// objects. In all other ways, including those in ends, the run at least tries to remove them. With
// twice, the rack refuses all requests, so that the second SIGINT interrupts the removal.
const (
	killed, killedLater = "SIGKILL", "SIGKILL after the answer"
	twice, lateAnswer   = "SIGINT twice", "SIGINT seconds before the answer"
)

var ends = []string{"SIGINT", "SIGHUP", "nobody reads", "the rack goes away", lateAnswer}

func TestCleanRemovesEverythingOfADeadRun(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "deaths-of-a-run")
	// Under nohup this test would ignore SIGHUP, and so would its child processes. The test handles
	// the signal, so that they get the default action.
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	racks := [4]*bed{}
	for i := range racks {
		racks[i] = rackOf(t, harness.RackOptions{})
		strangers(t, racks[i], "1a2b3c4d")
	}
	// This run has no checks, so it counts the creating requests that precede the first check.
	none := death{how: killed, part: partRules, only: "none"}
	before, _ := dieAndClean(t, racks[0], none)
	none.at = 1
	// xfs and btrfs are left out, because they have the same specs as ext4.
	units := []death{none, {part: "ext4", at: before + 1}, {part: "block", at: before + 1}}
	for _, c := range data.Checks() {
		units = append(units, death{part: partData, only: c.ID, at: before + 1})
	}
	for _, r := range rules.All() {
		units = append(units, death{part: partRules, only: r.ID, at: before + 1})
	}
	p.Rand().Shuffle(len(units), func(i, j int) { units[i], units[j] = units[j], units[i] })
	if !p.Long() {
		units = units[:len(units)/10]
	}
	// series ends runs at request number death.at, and then at every step-th request up to number
	// last. At each of these requests it uses one of the ways or, in the long form, all.
	type series struct {
		death
		step, last int
		ways       []string
	}
	// In a run of the part ext4 alone, the role check sends creating request 1, csi-sanity number 10.
	all := []series{{death{part: "ext4", at: 10}, 1, 10, []string{twice}}}
	hows := ends
	if !p.Long() {
		hows = []string{ends[p.Seed%uint64(len(ends))]}
	}
	for i, how := range hows {
		at, part := 1+p.Rand().IntN(30), (uint64(i)+p.Seed/uint64(len(ends)))%3
		all = append(all, series{death{part: []string{partRules, "ext4", partData}[part], at: at}, 1, at,
			[]string{how}})
	}
	for _, d := range short.Some(t, 2, units) {
		one := series{d, 1, math.MaxInt, []string{killed, killedLater}}
		if testing.Short() {
			one.last = d.at
		} else if !p.Long() { // a check can have thirty requests, and a run needs half a minute
			one.step = 1 + p.Rand().IntN(4)
			one.last = d.at + 5*one.step
		}
		if d.part == partData {
			one.ways = append(one.ways, "SIGINT") // each data check has its own cleanup
		}
		all = append(all, one)
	}
	var requests, died, left atomic.Int64
	over := func() bool { return died.Load() > 0 && p.Over() } // even a short soak has one death
	csitest.Must(t, harness.Share(len(racks), all, func(worker int, all <-chan series) error {
		for d := range all {
			if over() {
				continue
			}
			if !t.Run(fmt.Sprintf("%s %s %s", d.part, d.only, d.ways), func(t *testing.T) {
				for ; d.at <= d.last && !over(); d.at += d.step {
					some := d.ways
					if !p.Long() { // only a soak tries all ways at each request
						some = d.ways[(d.at/d.step+int(p.Seed))%len(d.ways):][:1]
					}
					for _, d.how = range some {
						if _, is := dieAndClean(t, racks[worker], d.death); !is {
							return
						}
						died.Add(1)
					}
					requests.Add(1)
				}
			}) {
				left.Add(1)
			}
		}
		return nil
	}))
	p.Figure("requests", requests.Load(), "died", died.Load(), "left", left.Load())
}

// begin starts p, a run that is to die as d says. If d.only is set, p runs this binary (TestMain).
func begin(t *testing.T, rack *bed, p *program, d death) *creating {
	t.Helper()
	to := csitest.Got(url.Parse(rack.URL))(t)
	transport := csitest.Got(harness.Transport(rack.CA))(t)
	c := &creating{at: int64(d.at), answered: d.how != killed && d.how != lateAnswer,
		late: runTimeout, made: make(chan struct{}), ended: make(chan struct{}),
		rack: &httputil.ReverseProxy{Transport: transport,
			// Cut the connection if the caller has ended or the rack does not answer.
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
			Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(to) }}}
	proxy := httptest.NewServer(c)
	t.Cleanup(proxy.Close)
	p.Args = append(p.Args, "run", "--yes", "--only", d.part, "--host", proxy.URL)
	if d.only != "" {
		plugin := csitest.Got(rack.run.Binary(t.Context(), "oxide-csi-plugin"))(t)
		p.Path = csitest.Got(os.Executable())(t)
		p.Env = append(p.Env, onlyVariable+"="+d.only, pluginVariable+"="+plugin)
	}
	if d.how == lateAnswer {
		c.late = 3 * time.Second
	}
	if d.how == "nobody reads" {
		p.Stdout = nil
		c.reader = csitest.Got(p.StdoutPipe())(t)
	}
	csitest.Must(t, p.Start())
	go func() {
		c.exit = p.Wait()
		close(c.ended)
	}()
	return c
}

// asOthersHave returns the environment of a run without an admin listener, as on a shared rack. It
// sets TMPDIR for the agents' directories, and clears OXIDE_CONFORMANCE_X for each given X.
func asOthersHave(rack *bed, without ...string) map[string]string {
	env := vars{"TMPDIR": rack.Dir, "OXIDE_CONFORMANCE_SIMULATOR_ADMIN": ""}
	for _, name := range without {
		env["OXIDE_CONFORMANCE_"+name] = ""
	}
	return env
}

// from() changes env, so that the run works in the named instance.
func from(rack *bed, instance string, env map[string]string) {
	guest := rack.Instance(instance).Guest
	env["OXIDE_SYSFS_ROOT"], env["OXIDE_DEV_ROOT"] = guest+"/sys", guest+"/dev"
}

func TestRunWaitsForAnotherRunInTheSameInstance(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
	run := func() *job {
		w := jobOn(t, rack)
		w.sysfsRoot = rack.Instance("a").Guest + "/sys"
		return w
	}
	release := csitest.Got(run().claimInstance(t.Context()))(t)
	ctx, interrupt := context.WithCancel(t.Context())
	waits := run()
	waits.Stdout = interruptOn{interrupt}
	if _, err := waits.claimInstance(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("expected that the second run waits until it is interrupted; found %v", err)
	}
	waits.Stdout = interruptOn{release}
	csitest.Got(waits.claimInstance(t.Context()))(t)()
}

// interruptOn is an io.Writer that calls its function for each write.
type interruptOn struct{ call func() }

func (i interruptOn) Write(p []byte) (int, error) {
	i.call()
	return len(p), nil
}

// dieAndClean starts a run, removes its working directory, ends it as d says, runs clean if
// necessary, and checks that the rack is as before. It returns how many requests created something,
// and whether the run died before its regular end.
func dieAndClean(t *testing.T, rack *bed, d death) (int, bool) {
	t.Helper()
	check := balance(t, rack)
	p := prepare(t, rack, asOthersHave(rack))
	p.Dir = filepath.Join(t.TempDir(), "removed during the run")
	csitest.Must(t, os.Mkdir(p.Dir, 0o700))
	c := begin(t, rack, p, d)
	csitest.Must(t, os.Remove(p.Dir))
	select {
	case <-c.ended:
		if code := p.ProcessState.ExitCode(); code != ExitConforms && code != ExitUsage {
			t.Errorf("%+v: the run ended by itself: %v", d, c.exit) // ExitUsage: nothing was tested
		}
		check()
		return int(c.seen.Load()), false
	case <-c.made:
	}
	want, err := "exit status 130", error(nil)
	switch d.how {
	case killed, killedLater:
		want, err = "signal: killed", p.Process.Kill()
	case "SIGINT", lateAnswer:
		err = p.Process.Signal(syscall.SIGINT)
	case "SIGHUP":
		// At a hangup the program gets two signals: the kernel's, and the shell's.
		err = errors.Join(p.Process.Signal(syscall.SIGHUP), p.Process.Signal(syscall.SIGHUP))
	case "nobody reads":
		err = c.reader.Close()
	case twice:
		csitest.Got(rack.Admin.AddFault(t.Context(),
			refusing("", 503, "ServiceNotAvailable", "Service Unavailable")))(t)
		err = errors.Join(p.Process.Signal(syscall.SIGINT),
			harness.Await(t.Context(), runTimeout, func() error {
				faults, err := rack.Admin.Faults(t.Context())
				if err == nil && faults[0].Fired <= 2 && p.Process.Signal(syscall.Signal(0)) == nil {
					err = errors.New("it does not try to sweep")
				}
				return err
			}), p.Process.Signal(syscall.SIGINT)) // an error if the run has already ended
	default:
		want = "exit status 2"
		rack.Kill()
	}
	csitest.Must(t, err)
	<-c.ended
	if got := fmt.Sprint(c.exit); got != want || d.how == twice &&
		!strings.Contains(p.errs.String(), "remove them with oxide-conformance clean") {
		t.Errorf("the run ended with %q, want %q; it printed %s", got, want, p.errs.String())
	}
	if !rack.Running() {
		csitest.Must(t, rack.Start(t.Context()))
	}
	csitest.Must(t, rack.Admin.ClearFaults(t.Context()))
	// Repeat clean, because it skips an agent's directory while a driver in a call has it locked.
	err = harness.Await(t.Context(), harness.StopTimeout, func() error {
		if want != "exit status 130" || d.how == twice {
			prepare(t, rack, asOthersHave(rack), "clean", "--yes").exit(t, ExitConforms)
		}
		left, err := filepath.Glob(filepath.Join(rack.Dir, "oxide-[cg][ou]*")) // conformance*, guest*
		if len(left) > 0 {
			err = fmt.Errorf("there are %s", strings.Join(left, ", "))
		}
		return err
	})
	if check(); err != nil || t.Failed() {
		t.Fatalf("%+v: %v", d, err)
	}
	return int(c.seen.Load()), true
}
