//go:build linux

package conformance

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

// strangers creates disks that look like those of a run, and attaches one of them to instance a.
func strangers(t *testing.T, rack *harness.Rack, run string) {
	t.Helper()
	for i, s := range []struct{ name, description string }{
		{"oxide-conformance-" + run, "made by hand"},
		{"conf-" + run + "-00001", ""},
		{"conf-" + run + "-run", "oxide-conformance"},
		{"conformance", "oxide-conformance " + run},
		{"csi-0123456789abcdef", `csi.oxide.computer {"name":"oxide-conformance-` + run + `"}`},
		{"csi-123456789abcdef0", `csi.oxide.computer {"name":"x","cluster":"oxide-conformance"}`},
		{"csi-23456789abcdef01",
			`csi.oxide.computer {"name":"x","cluster":"oxide-conformance-` + run + `-2"}`},
	} {
		id := made(t, rack, s.name, s.description)
		if i > 0 {
			continue
		}
		if err := rack.AttachDisk(t.Context(), id, rack.Instance("a").ID); err != nil {
			t.Fatal(err)
		}
	}
}

// made creates a disk with a description, which may be a run's mark, and returns its ID.
func made(t *testing.T, rack *harness.Rack, name, description string) string {
	t.Helper()
	disk, err := rack.Client.DiskCreate(t.Context(), oxide.DiskCreateParams{
		Project: oxide.NameOrId(rack.Project),
		Body: &oxide.DiskCreate{Name: oxide.Name(name), Description: description,
			Size: oxide.ByteCount(harness.GiB), DiskBackend: harness.BlankBackend()}})
	if err != nil {
		t.Fatal(err)
	}
	return disk.Id
}

// halfImported creates a disk whose import is open, and an image, with a run's mark.
func halfImported(t *testing.T, rack *harness.Rack, description string) {
	t.Helper()
	project := oxide.NameOrId(rack.Project)
	_, err := rack.Client.DiskCreate(t.Context(), oxide.DiskCreateParams{Project: project,
		Body: &oxide.DiskCreate{Name: "importing", Description: description,
			Size: oxide.ByteCount(harness.GiB), DiskBackend: rules.From(
				&oxide.DiskSourceImportingBlocks{BlockSize: 512})}})
	if err == nil {
		err = rack.Client.DiskBulkWriteImportStart(t.Context(),
			oxide.DiskBulkWriteImportStartParams{Disk: "importing", Project: project})
	}
	if err != nil {
		t.Fatal(err)
	}
	source := made(t, rack, "imaged", description)
	snapshot, err := rack.Client.SnapshotCreate(t.Context(), oxide.SnapshotCreateParams{
		Project: project, Body: &oxide.SnapshotCreate{Name: "imaged", Description: description,
			Disk: oxide.NameOrId(source)}})
	if err == nil {
		_, err = rack.Client.ImageCreate(t.Context(), oxide.ImageCreateParams{Project: project,
			Body: &oxide.ImageCreate{Name: "imaged", Description: description, Os: "x", Version: "1",
				Source: oxide.ImageSource{Value: &oxide.ImageSourceSnapshot{Id: snapshot.Id}}}})
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestCleanRemovesOnlyTheObjectsOfDeadRuns(t *testing.T) {
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	strangers(t, rack, "1a2b3c4d")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	check := balance(t.Context(), t, rack)
	living := mark{Run: "11111111", Host: host, PID: os.Getpid(), Boot: bootID(), Began: &now,
		Start: startTime(os.Getpid())}
	ids := []string{
		made(t, rack, "conf-11111111-run", living.description()),
		made(t, rack, "conf-22222222-run",
			mark{Run: "22222222", Host: "elsewhere", Began: &now}.description()),
	}
	// This dead run has lost the disk that describes it, and its disk is attached to an instance
	// that no mark names.
	lost := made(t, rack, "conf-33333333-00007", mark{Run: "33333333"}.description())
	if err := rack.AttachDisk(t.Context(), lost, rack.Instance("b").ID); err != nil {
		t.Fatal(err)
	}

	halfImported(t, rack, mark{Run: "33333333"}.description())

	p := prepare(t, run, rack, nil, "clean", "--yes")
	p.exit(t, ExitConforms)

	for _, want := range []string{"it still runs, as process", "this is not elsewhere",
		"clean --run 22222222", "without the disk that describes it", "clean --run 33333333"} {
		if !strings.Contains(p.out.String(), want) {
			t.Errorf("clean does not say %q", want)
		}
	}
	for _, id := range append(ids, lost) {
		if _, err := rack.Client.DiskView(t.Context(),
			oxide.DiskViewParams{Disk: oxide.NameOrId(id)}); err != nil {
			t.Errorf("clean has removed disk %s: %v", id, err)
		}
	}
	prepare(t, run, rack, nil, "clean", "--yes", "--run", "33333333").exit(t, ExitFails)
	// An operator who names a run of another machine knows that it is dead. An operator who detached
	// its disks by hand may continue.
	prepare(t, run, rack, nil, "clean", "--yes", "--run", "22222222").exit(t, ExitConforms)
	if err := rack.DetachDisk(t.Context(), lost, rack.Instance("b").ID); err != nil {
		t.Fatal(err)
	}
	prepare(t, run, rack, nil, "clean", "--yes", "--run", "33333333").exit(t, ExitConforms)
	if err := rack.DeleteDisk(t.Context(), ids[0]); err != nil {
		t.Error(err)
	}
	check()
}

func TestARunCountsAsDeadOnlyIfThisMachineCanKnowIt(t *testing.T) {
	now := time.Now()
	boot, namespace, _ := strings.Cut(bootID(), " ")
	host, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
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
		"a run that lives, whatever its file's name":  {bootID(), own, startTime(own), "a", false},
		"a run whose process ID another process has":  {boot + " " + namespace, own, "1", "a", true},
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

func TestCleanNamesTheInstancesThatADeadRunLeftInAnotherState(t *testing.T) {
	const running, stopped = oxide.InstanceStateRunning, oxide.InstanceStateStopped
	r := deadRun{mark: mark{Instances: []string{"here", "second", "helper"}, Helper: "helper"}}
	for name, want := range map[string][2]oxide.InstanceState{
		"": {running, stopped}, "second helper": {stopped, running}} {
		notes := r.notAsBefore([]oxide.Instance{{Id: "here", RunState: running},
			{Id: "second", Name: "second", RunState: want[0]}, {Id: "other", RunState: stopped},
			{Id: "helper", Name: "helper", RunState: want[1]}})
		if len(notes) != len(strings.Fields(name)) {
			t.Errorf("expected notes on %q; found %q", name, notes)
		}
	}
}

// deaths are the ways in which a run ends early. dying are the parts in which it ends, each for a
// run of its own; the long form also ends runs of all of them, and the short form ends a run of the
// rules.
var (
	deaths = []string{"SIGKILL", "SIGINT", "SIGHUP", "nobody reads", "the rack goes away"}
	dying  = []string{partData, "ext4", partRules}
)

func TestCleanRemovesTheRemainsOfARunThatEndsAtAnyMoment(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "clean-after-death")
	// A program that starts with SIGHUP ignored, as under nohup, ignores it. The programs here must
	// not ignore it.
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	run := plainRun(t)
	only := dying
	if p.Long() {
		only = append(slices.Clone(dying), strings.Join(dying, ","))
	} else if testing.Short() {
		only = []string{partRules}
	}
	var trials, clean atomic.Int64
	for round := 0; round == 0 || p.Long() && !p.Over() && trials.Load() < 50; round++ {
		t.Run(fmt.Sprintf("round %d", round), func(t *testing.T) {
			for i, death := range short.Some(t, 1, deaths) {
				parts, random := only[(round*len(deaths)+i)%len(only)], rand.New(rand.NewPCG(p.Seed,
					p.Rand().Uint64()))
				t.Run(death+" in "+parts, func(t *testing.T) {
					t.Parallel()
					moment := dieAndClean(t, run, death, parts, random)
					trials.Add(1)
					if !t.Failed() {
						clean.Add(1)
					}
					p.Say("%s in %s at request %d", death, parts, moment)
				})
			}
		})
		if t.Failed() {
			break
		}
	}
	p.Figure("moments", trials.Load(), "clean", clean.Load())
}

// dieAndClean ends a run of some parts on a rack of its own at a random request, cleans up, and
// demands that the rack is as before. It returns the number of the request.
func dieAndClean(t *testing.T, run *harness.Run, death, parts string, random *rand.Rand) int {
	t.Helper()
	rack := rackOf(t, run, harness.RackOptions{})
	strangers(t, rack, "1a2b3c4d")
	check := balance(t.Context(), t, rack)
	requests := 0
	for part := range strings.SplitSeq(parts, ",") {
		requests += costs[part].requests
	}
	for {
		moment := preflightRequests + random.IntN(requests)
		if !die(t, run, rack, death, parts, moment) && !t.Failed() {
			continue // the run had ended before
		}
		check()
		if t.Failed() {
			t.Fatalf("after %s at request %d of %s", death, moment, parts)
		}
		return moment
	}
}

// preflightRequests is about the number of requests before a run creates something.
const preflightRequests = 20

// die runs the program until the rack has received the given number of requests, ends the
// program, and cleans up. It returns false if the run had ended before.
func die(t *testing.T, run *harness.Run, rack *harness.Rack, death, parts string, moment int,
) bool {
	t.Helper()
	env := set("TMPDIR", rack.Dir) // the agents' directories
	p := prepare(t, run, rack, env, "run", "--yes", "--only", parts)
	first := lastRequest(t, rack, 0)
	reader, writer, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	if p.Stdout = writer; death != "nobody reads" {
		p.Stdout = &p.out
	}
	if err := errors.Join(p.Start(), writer.Close()); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	var exit error
	go func() {
		defer close(ended)
		exit = p.Wait()
	}()
	// Asking more often would take more of the machine than the run itself.
	ask := time.NewTicker(25 * time.Millisecond)
	defer ask.Stop()
	for last := first; last-first < moment; last = lastRequest(t, rack, last) {
		select {
		case <-ended:
			if exit != nil {
				t.Errorf("the run ended by itself: %v", exit)
			}
			return false
		case <-ask.C:
		}
	}
	want := cmp.Or(map[string]string{"SIGKILL": "signal: killed",
		"the rack goes away": "exit status 2"}[death], "exit status 130")
	switch death {
	case "SIGKILL":
		err = p.Process.Kill()
	case "SIGINT":
		err = p.Process.Signal(syscall.SIGINT)
	case "SIGHUP":
		// The shell passes on the signal that the kernel has sent already.
		err = errors.Join(p.Process.Signal(syscall.SIGHUP), p.Process.Signal(syscall.SIGHUP))
	case "nobody reads":
		err = reader.Close()
	default:
		rack.Kill()
	}
	if err != nil {
		t.Fatal(err)
	}
	asked := 0
	if rack.Running() {
		asked = lastRequest(t, rack, first)
	}
	<-ended
	over := exit == nil // the run had its verdict already
	if rack.Running() {
		over = over && lastRequest(t, rack, asked) == asked
	} else if err := rack.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	if over {
		return false
	}
	if got := fmt.Sprint(exit); got != want {
		t.Errorf("after %s the run ended with %q, want %q", death, got, want)
	}
	nothingLeft := func() error {
		for _, pattern := range []string{"oxide-conformance-*", "oxide-guest-*"} {
			if left, err := filepath.Glob(filepath.Join(rack.Dir, pattern)); err != nil || len(left) > 0 {
				return errors.Join(fmt.Errorf("after %s there are %q", death, left), err)
			}
		}
		return nil
	}
	if want == "exit status 130" {
		err = nothingLeft()
	} else {
		// The driver of a killed run may still end a call. What it uses is cleaned up when it has ended.
		err = harness.Await(t.Context(), harness.StopTimeout, func() error {
			prepare(t, run, rack, env, "clean", "--yes").exit(t, ExitConforms)
			return nothingLeft()
		})
	}
	if err != nil {
		t.Error(err)
	}
	return true
}

// lastRequest returns the number of the rack's last request. The caller gives a number that the
// log has reached.
func lastRequest(t *testing.T, rack *harness.Rack, known int) int {
	t.Helper()
	requests, err := rack.Admin.Requests(t.Context(), known)
	if err != nil {
		t.Fatal(err)
	}
	if len(requests) == 0 {
		return known
	}
	return requests[len(requests)-1].Seq
}

func TestASecondInterruptEndsARunWhoseRackBlocksTheCleanUp(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	check := balance(t.Context(), t, rack)
	p := prepare(t, run, rack, nil, "run", "--yes", "--only", "rules")
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	await := func(what string, ask func() bool) {
		t.Helper()
		if err := harness.Await(t.Context(), runTimeout, func() error {
			if !ask() {
				return errors.New(what)
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	}
	await("no request", func() bool { return lastRequest(t, rack, 0) > 100 })
	if _, err := rack.Admin.AddFault(t.Context(), adminapi.Fault{Phase: adminapi.Instead,
		Response: &adminapi.Response{Status: 503, ErrorCode: "ServiceNotAvailable",
			Message: "Service Unavailable"}}); err != nil {
		t.Fatal(err)
	}
	if err := p.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	asked := lastRequest(t, rack, 0)
	await("it does not try to sweep", func() bool { return lastRequest(t, rack, 0) > asked+2 })
	if err := p.Process.Signal(syscall.SIGINT); err != nil {
		t.Fatal(err)
	}
	p.await(t, ExitInterrupted)
	if !strings.Contains(p.errs.String(), "oxide-conformance clean") {
		t.Errorf("it does not say what to do: %s", p.errs.String())
	}
	if err := rack.Admin.ClearFaults(t.Context()); err != nil {
		t.Fatal(err)
	}
	prepare(t, run, rack, nil, "clean", "--yes").exit(t, ExitConforms)
	check()
}
