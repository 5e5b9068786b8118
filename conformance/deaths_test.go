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
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/data"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/guest"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// onlyVariable has the ID of a rule or data check. If it is set, this test binary runs as
// oxide-conformance with only that check. pluginVariable has the path of the driver for this.
const onlyVariable, pluginVariable = "CONFORMANCE_ONLY_CHECKS", "CONFORMANCE_PLUGIN"

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
		one := slices.DeleteFunc(data.Checks(), func(c data.Check) bool { return c.ID != only })
		for i, c := range one {
			one[i].Run = func(ctx context.Context, b *data.Bench) error {
				b.Blocks = 16 // what is written does not matter
				return c.Run(ctx, b)
			}
		}
		return one
	}
	p := Program{Args: os.Args[1:], Getenv: os.Getenv, Stdout: os.Stdout, Stderr: os.Stderr,
		Self: map[string][]string{"oxide-csi-plugin": {os.Getenv(pluginVariable)}}}
	os.Exit(p.Main(ctx))
}

// creating is a proxy that counts requests which create something. At number at, the run dies.
type creating struct {
	rack     http.Handler
	at       int64
	seen     atomic.Int64
	answered bool // the answer to that request gets through before the run ends
	// made is closed when the rack has carried out that request, and ended when the run has ended.
	made, ended chan struct{}
	// exit is the result of the run's process. reader is the other end of its standard output, or nil.
	exit   error
	reader io.Closer
}

// Of these, bulk-write-start begins an import, which clean has to end before it deletes the disk.
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
		<-c.ended
	}
	w.Header().Set("Content-Type", answer.Header().Get("Content-Type"))
	w.WriteHeader(answer.Code)
	_, _ = w.Write(answer.Body.Bytes()) // the caller may be dead
	if c.answered {
		_ = http.NewResponseController(w).Flush()
		close(c.made)
	}
}

// death describes an early end of a run: how it ends, in which part, in which check (all if only is
// empty), and at which of the requests that create something.
type death struct {
	how, part, only string
	at              int
}

// A killed run removes nothing. The test kills it before or right after it gets the answer to a
// request. In the cases of the variable ends, the run itself cleans up or tries to.
const killed, killedLater = "SIGKILL", "SIGKILL after the answer"

var ends = []string{"SIGINT", "SIGHUP", "nobody reads", "the rack goes away"}

func TestCleanRemovesEverythingOfADeadRun(t *testing.T) {
	t.Parallel()
	p := proof.New(t, "deaths-of-a-run")
	// If nohup started this test, SIGHUP is ignored here, and the programs would inherit that. A
	// signal handler prevents it.
	hangup := make(chan os.Signal, 1)
	signal.Notify(hangup, syscall.SIGHUP)
	defer signal.Stop(hangup)
	racks := [4]*bed{}
	for i := range racks {
		racks[i] = rackOf(t, harness.RackOptions{})
		strangers(t, racks[i], "1a2b3c4d")
	}
	// A run without checks counts the requests before the first check.
	none := death{how: killed, part: partRules, only: "none"}
	before, _ := dieAndClean(t, racks[0], none)
	none.at = 1
	// xfs and btrfs are left out, because their specs are those of ext4.
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
	// series describes runs that die: one in each of the ways, at each step-th request from death.at
	// to last.
	type series struct {
		death
		step, last int
		ways       []string
	}
	var all []series
	hows := ends
	if !p.Long() {
		hows = []string{ends[p.Seed%uint64(len(ends))]}
	}
	for i, how := range hows {
		at := 1 + p.Rand().IntN(30)
		all = append(all, series{death{part: []string{partRules, "ext4", partData}[i%3], at: at}, 1, at,
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
			one.ways = append(one.ways, "SIGINT") // each check removes what it has made
		}
		all = append(all, one)
	}
	var requests, died, left atomic.Int64
	over := func() bool { return died.Load() > 0 && p.Over() } // one run dies even in a short soak
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

// begin starts a run that dies at a request. If d.only is set, it starts this test binary.
func begin(t *testing.T, rack *bed, p *program, d death) *creating {
	t.Helper()
	to := got(url.Parse(rack.URL))(t)
	transport := got(harness.Transport(rack.CA))(t)
	c := &creating{at: int64(d.at), answered: d.how != killed, made: make(chan struct{}),
		ended: make(chan struct{}), rack: &httputil.ReverseProxy{Transport: transport,
			// Cut the connection if the caller is dead or the rack is away.
			ErrorHandler: func(http.ResponseWriter, *http.Request, error) { panic(http.ErrAbortHandler) },
			Rewrite:      func(r *httputil.ProxyRequest) { r.SetURL(to) }}}
	proxy := httptest.NewServer(c)
	t.Cleanup(proxy.Close)
	p.Args = append(p.Args, "run", "--yes", "--only", d.part, "--host", proxy.URL)
	if d.only != "" {
		plugin := got(rack.run.Binary(t.Context(), "oxide-csi-plugin"))(t)
		p.Path = got(os.Executable())(t)
		p.Env = append(p.Env, onlyVariable+"="+d.only, pluginVariable+"="+plugin)
	}
	if d.how == "nobody reads" {
		reader, writer, err := os.Pipe()
		csitest.Must(t, err)
		defer writer.Close()
		p.Stdout, c.reader = writer, reader
	}
	csitest.Must(t, p.Start())
	go func() {
		c.exit = p.Wait()
		close(c.ended)
	}()
	return c
}

// asOthersHave returns the environment of a run on a shared rack: without an admin listener, with
// TMPDIR for the directories of agents, and without some of the variables OXIDE_CONFORMANCE_*.
func asOthersHave(rack *bed, without ...string) map[string]string {
	env := set("TMPDIR", rack.Dir, "OXIDE_CONFORMANCE_SIMULATOR_ADMIN", "")
	for _, name := range without {
		env["OXIDE_CONFORMANCE_"+name] = ""
	}
	return env
}

// dieAndClean ends a run early, cleans up, and checks that the rack is as before. It returns the
// number of requests that create something, and whether the run died before its regular end.
func dieAndClean(t *testing.T, rack *bed, d death) (int, bool) {
	t.Helper()
	check := balance(t, rack)
	p := prepare(t, rack, asOthersHave(rack))
	c := begin(t, rack, p, d)
	select {
	case <-c.ended:
		if code := p.ProcessState.ExitCode(); code != ExitConforms && code != ExitUsage {
			t.Errorf("%+v: the run ended by itself: %v", d, c.exit) // 2: nothing was tested
		}
		check()
		return int(c.seen.Load()), false
	case <-c.made:
	}
	want, err := "exit status 130", error(nil)
	switch d.how {
	case killed, killedLater:
		want, err = "signal: killed", p.Process.Kill()
	case "SIGINT":
		err = p.Process.Signal(syscall.SIGINT)
	case "SIGHUP":
		// At a hangup the program gets two signals: the kernel's, and the shell's.
		err = errors.Join(p.Process.Signal(syscall.SIGHUP), p.Process.Signal(syscall.SIGHUP))
	case "nobody reads":
		err = c.reader.Close()
	default:
		want = "exit status 2"
		rack.Kill()
	}
	csitest.Must(t, err)
	<-c.ended
	if got := fmt.Sprint(c.exit); got != want {
		t.Errorf("the run ended with %q, want %q", got, want)
	}
	if !rack.Running() {
		csitest.Must(t, rack.Start(t.Context()))
	}
	// The driver of a killed run may still carry out a call. Only then can clean remove its files.
	err = harness.Await(t.Context(), harness.StopTimeout, func() error {
		if want != "exit status 130" {
			prepare(t, rack, asOthersHave(rack), "clean", "--yes").exit(t, ExitConforms)
		}
		left, err := filepath.Glob(filepath.Join(rack.Dir, "oxide-[cg][ou]*")) // conformance, guest
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
