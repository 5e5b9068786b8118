//go:build linux

package rules

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/uuid"
	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

func TestEveryRuleIsCompleteAndHasAUniqueID(t *testing.T) {
	seen := map[string]bool{}
	for _, rule := range All() {
		switch {
		case !regexp.MustCompile(`^A\d\d$`).MatchString(rule.ID) || seen[rule.ID]:
			t.Errorf("rule %q: its ID is malformed, or given twice", rule.ID)
		case rule.Says == "" || rule.Why == "" || rule.Source == "" || len(rule.Calls) == 0:
			t.Errorf("%s lacks what it says, why, its source, or its operations and its check", rule.ID)
		}
		seen[rule.ID] = true
	}
	if rows := strings.Count(assumptions, "\n| A"); rows != len(seen) || len(table) != rows {
		t.Errorf("ASSUMPTIONS.md has %d rules, of which %d were read; %d have checks", rows, len(seen),
			len(table))
	}
}

func TestTheSimulatorCitesExactlyTheListedRules(t *testing.T) {
	cited := map[string]bool{}
	files := csitest.Got(filepath.Glob("../../simulator/*.go"))(t)
	for _, file := range append(files, csitest.Got(filepath.Glob("../../simulator/*/*.go"))(t)...) {
		if strings.HasSuffix(file, "_test.go") || strings.Contains(file, "/broken/") {
			continue
		}
		text := csitest.Got(os.ReadFile(file))(t)
		for _, id := range regexp.MustCompile(`\bA\d\d\b`).FindAllString(string(text), -1) {
			cited[id] = true
		}
	}
	for _, rule := range All() {
		if !cited[rule.ID] {
			t.Errorf("the simulator does not cite %s: it does not imitate the rule, "+
				"or does not say where", rule.ID)
		}
		delete(cited, rule.ID)
	}
	for id := range cited {
		t.Errorf("the simulator cites %s, which is no rule", id)
	}
}

// marks counts the runs, so that each run gives its objects other names: a run on a broken rack may
// leave objects that would disturb the next run.
var marks atomic.Int64

// configOf configures the checks as if they ran in the rack's first instance.
func configOf(rack *harness.Rack, hotplug bool) Config {
	here := rack.Instance("")
	return Config{Host: rack.URL, Token: rack.Token, Project: rack.Project, CAFile: rack.CA,
		Mark: fmt.Sprintf("t%d", marks.Add(1)), Description: "made by a test", Hotplug: hotplug,
		Admin: &rack.Admin,
		Here:  &GuestFiles{ID: here.ID, Sys: os.DirFS(filepath.Join(here.Guest, "sys"))}}
}

// startRack starts a rack. In "make proofs", the rack has the race detector only if options has
// Args, which only TestAHealthyRackKeepsEveryRule sets.
func startRack(t *testing.T, options harness.RackOptions) *harness.Rack {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = len(options.Args) == 0
	// Some rules need an object of another project, or an image.
	options.Args = append(options.Args, "--project", "other", "--image", "silos=1048576",
		"--image", "sanity/projects=1073741824")
	rack := csitest.Got(run.StartRack(t.Context(), options))(t)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	return rack
}

func TestAHealthyRackKeepsEveryRule(t *testing.T) {
	t.Parallel()
	const requirements = "OF-1 OF-2 OF-3 OF-4 OF-5 OF-6 OF-7 OF-8 OF-9 OF-10 OF-11 OF-12 OF-13 " +
		"OF-14 OF-15 B-51 a rack "
	for name, hotplug := range map[string]adminapi.Hotplug{"with hot-plug": adminapi.HotplugFull,
		"that only attaches": adminapi.HotplugAttachOnly, "without": adminapi.HotplugNone} {
		t.Run(requirements+name, func(t *testing.T) {
			t.Parallel()
			cold := hotplug != adminapi.HotplugFull
			// A check must not rely on a fast rack, so this rack has delays.
			rack := startRack(t, harness.RackOptions{Hotplug: hotplug,
				Args: []string{"--instance-delay", "100ms", "--device-delay", "50ms"}})
			if cold { // give the instance a boot disk
				ctx, instance := t.Context(), rack.Instance("").ID
				disk := csitest.Got(rack.CreateDisk(ctx, rack.Project, "boot-disk-of-an-instance", GiB))(t)
				csitest.Must(t, rack.StopInstance(ctx, instance))
				csitest.Must(t, rack.AttachDisk(ctx, disk.Id, instance))
				csitest.Must(t, rack.StartInstance(ctx, instance))
			}
			r := csitest.Got(Open(configOf(rack, !cold)))(t)
			r.AttachOnly = hotplug == adminapi.HotplugAttachOnly
			before := csitest.Got(rack.Ledger(t.Context()))(t)
			count := map[Status]int{}
			for _, rule := range All() {
				result := r.Run(t.Context(), rule)
				count[result.Status]++
				switch {
				case result.Status == failed, result.Status == blocked && !cold:
					t.Errorf("%s %s: %s", rule.ID, result.Status, result.Reason)
				case result.Status == notTested:
					t.Errorf("%s is not tested on a simulated rack: %s", rule.ID, result.Reason)
				case result.Status == passed && len(result.Extent) == 0:
					t.Errorf("%s does not state how far it looked", rule.ID)
				case len(result.Extent.Partly()) > 0:
					t.Errorf("%s looked at less than there is: %s", rule.ID, result.Extent.Partly())
				case result.Tries > 1:
					t.Errorf("%s took %d tries", rule.ID, result.Tries)
				}
				t.Logf("%s %s in %.1fs, %d requests", rule.ID, result.Status, result.Seconds,
					len(result.Exchanges))
			}
			if err := errors.Join(r.Close(t.Context()), rack.Balance(t.Context(), before)); err != nil {
				t.Errorf("the checks have left something: %s", err)
			}
			csitest.Must(t, proof.Print(proof.Line("rules", "rack", fmt.Sprintf("%q", name), "rules",
				len(All()), "passed", count[passed], "blocked", count[blocked])))
		})
	}
}

func TestARestartedRackCompletesTheStartOfAnInstance(t *testing.T) {
	t.Parallel()
	ctx, rack := t.Context(), startRack(t, harness.RackOptions{})
	instance := rack.Instance("").ID
	csitest.Must(t, rack.StopInstance(ctx, instance))
	csitest.Must(t, rack.Admin.Switch(ctx, map[string]any{"instance_delay": "1h"}))
	csitest.Got(rack.Client.InstanceStart(ctx,
		oxide.InstanceStartParams{Instance: oxide.NameOrId(instance)}))(t)
	rack.Kill()
	csitest.Must(t, rack.Start(ctx))
	if i := csitest.Got(rack.Client.InstanceView(ctx, oxide.InstanceViewParams{
		Instance: oxide.NameOrId(instance)}))(t); i.RunState != oxide.InstanceStateRunning {
		t.Errorf("it is %s, want running", i.RunState)
	}
}

func onRacks[T any](t *testing.T, cases []T, try func(*harness.Rack, T) error) {
	t.Helper()
	var racks [3]*harness.Rack
	for i := range racks {
		racks[i] = startRack(t, harness.RackOptions{})
	}
	csitest.Must(t, harness.Share(len(racks), cases, func(worker int, cases <-chan T) (err error) {
		for c := range cases {
			err = errors.Join(err, try(racks[worker], c))
		}
		return err
	}))
}

func TestEachMutationMakesTheCheckOfItsRuleFail(t *testing.T) {
	t.Parallel()
	mutations, err := startRack(t, harness.RackOptions{}).Admin.Mutations(t.Context())
	csitest.Must(t, err)
	names, rules := map[string]bool{}, map[string]Rule{}
	for _, m := range mutations {
		if names[m.Name] || m.Says == "" || m.Rule == "" {
			t.Errorf("a mutation with a name that another one has, or without words: %+v", m)
		}
		names[m.Name] = true
	}
	for _, rule := range All() {
		rules[rule.ID] = rule
		if !slices.ContainsFunc(mutations, func(m adminapi.Mutation) bool { return m.Rule == rule.ID }) {
			t.Errorf("nothing breaks %s: the simulator has no mutation for it", rule.ID)
		}
	}
	all := slices.DeleteFunc(mutations, func(m adminapi.Mutation) bool {
		return rules[m.Rule].Check == nil // it damages data, and breaks no rule
	})
	all = short.Some(t, len(all)/4, all)
	var noticed atomic.Int64
	onRacks(t, all, func(rack *harness.Rack, broken adminapi.Mutation) error {
		ctx := t.Context()
		// Open the rack again, so that this check shares no object with the one before.
		r, err := Open(configOf(rack, true))
		if err = errors.Join(err, rack.Admin.Mutate(ctx, broken.Name)); err != nil {
			return fmt.Errorf("%s: %w", broken.Name, err)
		}
		r.pause = time.Millisecond // a retry cannot pass, so do not wait for it
		result := r.Run(ctx, rules[broken.Rule])
		if err := errors.Join(rack.Admin.Mend(ctx), r.Close(ctx)); err != nil {
			return fmt.Errorf("%s: %w", broken.Name, err)
		}
		if result.Status == failed {
			noticed.Add(1)
			t.Logf("%s: %s", broken.Name, result.Reason)
		} else {
			t.Errorf("%s: %s: the check of %s says %s %s", broken.Name, broken.Says, broken.Rule,
				result.Status, result.Reason)
		}
		return nil
	})
	csitest.Must(t, proof.Print(proof.Line("broken-rules", "mutations", len(all), "noticed",
		noticed.Load())))
}

// answering opens a rack that answers every request with this body, and with the statuses of the
// script in turn. It repeats the last status; 0 means no answer.
func answering(t *testing.T, body string, script ...int) *TestedRack {
	t.Helper()
	var asked atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		status := script[min(int(asked.Add(1)), len(script))-1]
		if status == 0 {
			panic(http.ErrAbortHandler)
		}
		w.Header().Set("Location", "https://elsewhere"+r.URL.Path)
		w.WriteHeader(status)
		_, _ = w.Write([]byte(body))
	}))
	t.Cleanup(server.Close)
	r := csitest.Got(Open(Config{Host: server.URL, Token: "oxide-token-secret", Project: "p",
		Mark: "m"}))(t)
	r.recorder.patience = time.Second
	return r
}

func TestTheStatusOfACheckFollowsFromFindingsAndAnswers(t *testing.T) {
	t.Parallel()
	const id, undecided = "9a1c43ee-2c7c-4a4b-8d4d-6f6f1c3d2b10", notTested + " and undecided"
	const body = `{"status":"ok","id":"` + id + `","name":"mine","items":[{"name":"mine"}],` +
		`"request_id":"1","message":"volume repair lock"}`
	rule := func(calls string, check func(*Check)) Rule {
		return Rule{ID: "A00", Calls: strings.Fields(calls), Check: check}
	}
	ping := func(c *Check) { asked(c.Client.Ping(c.ctx))(c, "ping").must() }
	ends := func(end func(*Check)) Rule {
		return rule("ping", func(c *Check) { ping(c); end(c) })
	}
	read, change := rule("ping", ping), rule("instance_start", func(c *Check) { c.start(id).must() })
	locked := rule("snapshot_create", func(c *Check) { c.snapshot(id).must() })
	ofTheLock := locked
	ofTheLock.ID = "A39"
	look := func(which string) Rule {
		return rule("disk_view", func(c *Check) {
			cleanUps := 0
			c.cleanup(func(ctx context.Context) error {
				if cleanUps++; cleanUps > 1 {
					t.Errorf("read %s: its clean-up is repeated", which)
				}
				_, err := c.readDisk(ctx, which)
				return err
			})
			c.look(which)
		})
	}
	simulated := func(end func(*Check)) Rule {
		return rule("", func(c *Check) {
			c.Admin = &adminapi.Client{}
			c.arrange("a failed instance")
			end(c)
		})
	}
	// QEMU pads serials with spaces, so A56 is not tested on a rack whose guests run in QEMU.
	padding := table[slices.IndexFunc(table, func(row tested) bool { return row.id == "A56" })]
	qemu := rule(padding.calls, func(c *Check) {
		c.Here = &GuestFiles{ID: id, Sys: fstest.MapFS{
			"block/nvme0n1/device/serial": {Data: []byte("mine                \n")},
			"block/nvme0n1/device/model":  {Data: []byte("QEMU NVMe Ctrl            \n")}}}
		padding.check(c)
	})
	fine, unclean, other := []int{200}, "remove what the check made: ", "the rack shows another object"
	for name, test := range map[string]struct {
		rule   Rule
		script []int
		want   Status
		tries  int
		says   string // a part of the reason, or the extent
	}{
		"called its operation": {read, fine, passed, 1, ""},
		"called nothing":       {rule("ping", func(*Check) {}), fine, failed, 1, "no answer to ping"},
		"called another":       {rule("disk_view", ping), fine, failed, 1, "no answer to disk_view"},
		"found a difference":   {ends(func(c *Check) { c.errorf("no") }), fine, failed, 1, "no"},
		"panicked": {ends(func(*Check) { _ = *(*oxide.Disk)(nil) }), fine, failed, 1,
			"could not go on"},
		"was not tested": {ends(func(c *Check) { c.notTested("why") }), fine, notTested, 1, "why"},
		"was blocked":    {ends(func(c *Check) { c.blocked("why") }), fine, blocked, 1, "why"},
		"was blocked after a difference": {ends(func(c *Check) { c.errorf("no"); c.blocked("why") }),
			fine, failed, 1, "no"},

		"a situation on a real rack": {ends(func(c *Check) {
			if c.arrange("a failed instance") {
				c.errorf("a real rack's instance fails at will")
			}
		}), fine, passed, 1, "[ping: 1 kinds of answers (200) a failed instance: not tested (it " +
			"cannot be brought about from outside)]"},
		"a situation on a simulated rack": {simulated(func(*Check) {}), fine, passed, 1,
			"[a failed instance: 1 of 1 situations]"},
		"ended in a situation": {simulated(func(c *Check) { c.fatalf("no") }), fine, failed, 1,
			"[a failed instance: not tested (the check ended before)]"},

		"a read that is refused":                          {read, []int{404}, failed, 1, ""},
		"a read that fails":                               {read, []int{500}, failed, 2, ""},
		"a read that fails once":                          {read, []int{500, 200}, passed, 2, ""},
		"a change that fails once":                        {change, []int{500, 200, 202}, passed, 2, ""},
		"a read that was limited is sent again":           {read, []int{429, 429, 200}, passed, 1, ""},
		"a read without an answer is sent again":          {read, []int{0, 502, 503, 200}, passed, 1, ""},
		"a change that was limited is sent again":         {change, []int{429, 202}, passed, 1, ""},
		"a change without an answer is not sent again":    {change, []int{0, 200, 202}, passed, 2, ""},
		"a change that a proxy refused is not sent again": {change, []int{502, 200, 202}, passed, 2, ""},
		"a rack that limits everything":                   {read, []int{429}, undecided, 1, ""},
		"a rack that never answers":                       {read, []int{0}, undecided, 1, ""},
		"a rack that redirects":                           {read, []int{308}, undecided, 1, ""},
		"a silo with too little quota":                    {change, []int{507, 200}, undecided, 1, ""},
		"a wrong answer between answers of a busy rack":   {read, []int{429, 404}, failed, 1, ""},
		"a wrong answer after a missing one":              {change, []int{0, 200, 404}, failed, 2, ""},
		"a proxy that answers 503":                        {read, []int{503}, undecided, 1, ""},
		"a change that fails, and leaves an object behind": {rule("instance_start", func(c *Check) {
			c.cleanup(func(ctx context.Context) error { return c.removeDisk(ctx, id) })
			c.start(id).must()
		}), []int{502, 400, 400, 200}, undecided, 1, unclean},

		"a disk whose region is replaced": {locked, []int{409}, undecided, 1,
			"replace a region of the disk"},
		"the rule about such a disk": {ofTheLock, []int{409}, failed, 1, ""},
		"a guest in QEMU":            {qemu, fine, notTested, 1, "QEMU's, which no rack has"},

		"a read by name":                {look("mine"), fine, passed, 1, ""},
		"a read that shows another ID":  {look(uuid.NewString()), fine, failed, 1, other},
		"a read that shows another one": {look("yours"), fine, failed, 1, other},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := answering(t, body, test.script...).Run(t.Context(), test.rule)
			if got.Undecided {
				got.Status += " and undecided"
			}
			if found := fmt.Sprint(got.Reason, got.Extent); got.Status != test.want ||
				got.Tries != test.tries || !strings.Contains(found, test.says) {
				t.Errorf("got %s after %d tries: %s; want %s after %d: %s", got.Status, got.Tries, found,
					test.want, test.tries, test.says)
			}
		})
	}
}

func TestAListThatStillHasADeletedObjectIsReported(t *testing.T) {
	a, b := listed{ID: "1", Name: "a"}, listed{ID: "2", Name: "b"}
	right := reading{order: "name_ascending", limit: 2, pages: [][]listed{{a}}, gone: []string{b.ID}}
	wrong := right
	wrong.pages = [][]listed{{a, b}}
	none := func(string) bool { return false }
	if found := judgeReadings([]reading{right}, nil, time.Time{}, none); len(found) > 0 {
		t.Errorf("a list in order: %q", found)
	}
	if found := judgeReadings([]reading{wrong}, nil, time.Time{}, none); len(found) != 1 ||
		!strings.Contains(found[0], "it has b, which was deleted before") {
		t.Errorf("a list with b, which is deleted: %q", found)
	}
}

func TestRetryAfterReturnsTheTimeThatTheRackAsksFor(t *testing.T) {
	for text, want := range map[string]time.Duration{"3": 3 * time.Second, "": 0, "-1": 0, "soon": 0} {
		got := retryAfter(&http.Response{Header: http.Header{"Retry-After": {text}}})
		if got != want {
			t.Errorf("Retry-After %q: waits %s, want %s", text, got, want)
		}
	}
}

func TestARecordedAnswerDoesNotContainTheToken(t *testing.T) {
	r := answering(t, strings.Repeat(" ", answerExcerpt-5)+"oxide-token-secret", 400)
	_, _ = r.Client.Ping(t.Context())
	for _, e := range r.Exchanges() {
		if strings.Contains(e.Answer, "oxide-token-") || len(e.Answer) > answerExcerpt {
			t.Errorf("kept %d bytes: …%q", len(e.Answer), e.Answer[len(e.Answer)-20:])
		}
	}
}

// If an answer is lost, the trial must not conclude that the rack refused the request, or that the
// rack answered with an error and recorded the attach (A17).
func TestTheHotPlugTrialRepeatsARequestWithoutAnAnswer(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		hotplug            adminapi.Hotplug
		operation          string
		phase              adminapi.Phase
		detaches, attaches bool
	}{
		{adminapi.HotplugFull, "instance_disk_detach", adminapi.Before, true, false},
		{adminapi.HotplugNone, "instance_disk_detach", adminapi.After, false, false},
		{adminapi.HotplugAttachOnly, "instance_disk_attach", adminapi.After, false, true},
	} {
		t.Run(fmt.Sprint(test.operation, " with hot-plug ", test.hotplug), func(t *testing.T) {
			t.Parallel()
			rack := startRack(t, harness.RackOptions{Hotplug: test.hotplug})
			csitest.Got(rack.Admin.AddFault(t.Context(), adminapi.Fault{Operation: test.operation,
				Phase: test.phase, Times: 1, Cut: true}))(t)
			r := csitest.Got(Open(configOf(rack, test.detaches)))(t)
			trial, result := r.TryHotplug(t.Context())
			if trial.Detaches != test.detaches || trial.Attaches != test.attaches ||
				test.attaches != (len(trial.Says) == 1) || result.Status != passed || result.Tries != 2 {
				t.Errorf("got %+v after %d tries: %s %s", trial, result.Tries, result.Status, result.Reason)
			}
		})
	}
}
