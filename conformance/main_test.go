//go:build linux

package conformance

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide.go/oxide"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/rules"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
)

const runTimeout = 10 * time.Minute

// canary is a token that no rack accepts, and that no program may print.
const canary = "oxide-token-canary-5c1f"

// bed is a simulated rack and the harness.Run that started it.
type bed struct {
	*harness.Rack
	run *harness.Run
}

// rackOf starts a simulated rack with TLS, the running instances a and b, and the stopped instance
// helper. Its programs are built without the race detector: the test of a whole run on a rack with
// hot-plug uses the detector, and covers nearly the same code.
func rackOf(t *testing.T, options harness.RackOptions) *bed {
	t.Helper()
	run := harness.RunFor(t)
	run.Plain = true
	return rackIn(t, run, options)
}

func rackIn(t *testing.T, run *harness.Run, options harness.RackOptions) *bed {
	t.Helper()
	options.TLS = true
	options.Instances = append([]string{"a", "b", "helper"}, options.Instances...)
	// Some rules need an object of another project, or an image.
	options.Args = append(options.Args, "--project", "other", "--image", "silos=1048576",
		"--image", "sanity/projects=1073741824")
	rack := csitest.Got(run.StartRack(t.Context(), options))(t)
	t.Cleanup(func() { csitest.Must(t, rack.Stop()) })
	csitest.Must(t, rack.StopInstance(t.Context(), rack.Instance("helper").ID))
	return &bed{rack, run}
}

// inside returns a command that runs a script in an instance, as ssh does on a real rack.
func inside(rack *bed, instance string) string {
	guest := rack.Instance(instance).Guest
	return fmt.Sprintf("env OXIDE_SYSFS_ROOT=%s/sys OXIDE_DEV_ROOT=%s/dev sh -c", guest, guest)
}

func environment(rack *bed) map[string]string {
	guest := rack.Instance("a").Guest
	return map[string]string{
		"OXIDE_HOST": rack.URL, "OXIDE_TOKEN": rack.Token, "OXIDE_PROJECT": rack.Project,
		"OXIDE_CA_FILE":                     rack.CA,
		"OXIDE_SYSFS_ROOT":                  filepath.Join(guest, "sys"),
		"OXIDE_DEV_ROOT":                    filepath.Join(guest, "dev"),
		"OXIDE_CONFORMANCE_SIMULATOR_ADMIN": rack.Admin.URL,
		"OXIDE_CONFORMANCE_SECOND":          "b",
		"OXIDE_CONFORMANCE_SECOND_SHELL":    inside(rack, "b"),
		"OXIDE_CONFORMANCE_HELPER":          "helper",
		"OXIDE_CONFORMANCE_GUEST_SHELL":     inside(rack, "helper"),
		"OXIDE_SANITY_DIR":                  rack.Dir,
	}
}

type program struct {
	*exec.Cmd
	out, errs bytes.Buffer
	// folder has the report, which must not contain the token.
	folder, token string
}

func prepare(t *testing.T, rack *bed, env map[string]string, args ...string) *program {
	t.Helper()
	path := csitest.Got(rack.run.Binary(t.Context(), "oxide-conformance"))(t)
	p := &program{Cmd: exec.Command(path, args...), token: rack.Token,
		folder: filepath.Join(t.TempDir(), "report")}
	all := environment(rack)
	all["OXIDE_CONFORMANCE_REPORT"] = p.folder
	maps.Copy(all, env)
	p.Env = harness.Environ()
	for key, value := range all {
		if value != "" {
			p.Env = append(p.Env, key+"="+value)
		}
	}
	p.Stdout, p.Stderr = &p.out, &p.errs
	p.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("%v printed\n%s%s", p.Args, tail(p.out.String()), p.errs.String())
		}
	})
	return p
}

func tail(text string) string { return text[max(0, len(text)-8<<10):] }

func (p *program) exit(t *testing.T, want int) {
	t.Helper()
	csitest.Must(t, p.Start())
	p.await(t, want)
}

func (p *program) await(t *testing.T, want int) {
	t.Helper()
	end := time.AfterFunc(runTimeout, func() { _ = p.Process.Signal(syscall.SIGQUIT) })
	defer end.Stop()
	err := p.Wait()
	if _, exited := errors.AsType[*exec.ExitError](err); err != nil && !exited {
		t.Fatal(err)
	}
	if got := p.ProcessState.ExitCode(); got != want {
		t.Errorf("%v ended with %d, want %d", p.Args[1:], got, want)
	}
}

func (p *program) report(t *testing.T) *report.Report {
	t.Helper()
	r := csitest.Got(report.Read(p.folder))(t)
	for _, file := range csitest.Got(os.ReadDir(p.folder))(t) {
		text := csitest.Got(os.ReadFile(filepath.Join(p.folder, file.Name())))(t)
		if strings.Contains(string(text), p.token) {
			t.Errorf("%s has the token", file.Name())
		}
	}
	if strings.Contains(p.out.String()+p.errs.String(), p.token) {
		t.Error("the program has printed the token")
	}
	return r
}

// balance returns a function that checks that the rack has the same objects as before, unchanged.
func balance(t *testing.T, rack *bed) func() {
	t.Helper()
	before := csitest.Got(rack.Ledger(t.Context()))(t)
	return func() {
		t.Helper()
		if err := rack.Balance(t.Context(), before); err != nil {
			t.Errorf("the rack is not as before: %s", err)
		}
		now, err := rack.Ledger(t.Context())
		for _, gone := range before.More(now) {
			if kind, _, _ := strings.Cut(gone, " "); slices.Contains([]string{"disk", "snapshot", "image",
				"attachment"}, kind) {
				err = errors.Join(err, errors.New(gone))
			}
		}
		if err != nil {
			t.Errorf("of others there was, and is no more: %s", err)
		}
	}
}

// A command that exits with ExitUsage must write exactly one line to standard error.
func TestRefusedCommandsSayWhyAndCreateNothing(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{Args: []string{"--token-ttl", "240h"}})
	other := rackOf(t, harness.RackOptions{})
	before := csitest.Got(other.Admin.Requests(t.Context(), 0))(t)
	usual := csitest.Got(rack.Admin.Switches(t.Context()))(t)
	const gib, room = harness.GiB, "|the run has at most 15 GiB at one time"
	proxy := httputil.NewSingleHostReverseProxy(csitest.Got(url.Parse(rack.URL))(t))
	proxy.Transport = csitest.Got(harness.Transport(rack.CA))(t)
	proxy.ModifyResponse = func(r *http.Response) error {
		r.Header.Del("X-Request-Id")
		return nil
	}
	withoutID := httptest.NewServer(proxy)
	defer withoutID.Close()
	for name, test := range map[string]struct {
		switched map[string]any // switches of the rack: role or quota_bytes
		env      map[string]string
		args     string
		passes   bool
		// Expected texts, separated by |: "says" for standard error, "shows" for standard output.
		says, shows string
	}{
		"a rack in order": {args: "preflight", passes: true, shows: "pass  host |pass  simulator |" +
			"pass  certificate |pass  api-version |warn  token's expiry |pass  role |pass  quota |" +
			"pass  this instance |pass  second instance |pass  helper |pass  tools |pass  kernel |" +
			"skip  hot-plug |pass  latency |takes about "},
		"a viewer": {switched: map[string]any{"role": "viewer"}, args: "preflight",
			shows: "fail  role |limited-collaborator"},
		"a silo without room for the rules": {switched: map[string]any{"quota_bytes": 14*gib + 1<<20},
			args: "preflight --only rules", shows: "fail  quota " + room},
		"a silo with room for the rules": {switched: map[string]any{"quota_bytes": 15*gib + 1<<20},
			args: "preflight --only rules", passes: true, shows: "pass  quota " + room},
		"a proxy that removes the request ID": {env: vars{"OXIDE_HOST": withoutID.URL,
			"OXIDE_CA_FILE": ""}, args: "run --yes", shows: "fail  host |x-request-id"},
		"another rack's admin listener": {env: vars{"OXIDE_CONFORMANCE_SIMULATOR_ADMIN": other.Admin.URL},
			args: "run --yes", shows: "fail  simulator "},
		"no such verb":              {args: "purge", says: `"purge"|preflight, run, clean, diff`},
		"no such flag":              {args: "run --fast", says: "fast"},
		"no such part":              {args: "run --only zfs", says: `"zfs"|rules, ext4, xfs`},
		"nothing selected":          {args: "run --only ,", says: "nothing|rules, ext4, xfs"},
		"an argument too many":      {args: "run all", says: `"all"`},
		"a budget without numbers":  {args: "run --budget lots", says: "20,40"},
		"a budget too small":        {args: "run --yes --only ext4 --budget 3,3", says: "fail"},
		"one report":                {args: "diff one", says: "two reports"},
		"an argument after version": {args: "version 2", says: `"2"`},
		"missing reports":           {args: "diff /nowhere /nowhere", says: "/nowhere"},
		"an invalid run ID": {env: vars{"OXIDE_CA_FILE": "main.go"}, args: "clean --run mine",
			says: "8 hexadecimal digits"},
		"no rack": {env: vars{"OXIDE_HOST": "", "OXIDE_PROJECT": ""}, args: "run",
			says: "OXIDE_HOST, OXIDE_PROJECT"},
		"no answer to the question": {args: "run --only rules", says: "--yes"},
		"an unknown token":          {env: vars{"OXIDE_TOKEN": canary}, args: "preflight", says: "fail"},
		"an unknown certificate":    {env: vars{"OXIDE_CA_FILE": ""}, args: "preflight", says: "fail"},
		"an unknown project":        {env: vars{"OXIDE_PROJECT": "x"}, args: "preflight", says: "fail"},
		"no instance of the rack": {env: vars{"OXIDE_SYSFS_ROOT": "/nowhere"}, args: "preflight",
			says: "fail"},
	} {
		t.Run(name, func(t *testing.T) {
			switches := map[string]any{"role": usual.Role, "quota_bytes": usual.QuotaBytes}
			maps.Copy(switches, test.switched)
			exit := ExitUsage
			if test.passes {
				exit = ExitConforms
			}
			csitest.Must(t, rack.Admin.Switch(t.Context(), switches))
			p := prepare(t, rack, test.env, strings.Fields(test.args)...)
			p.exit(t, exit)
			out, errs := p.out.String(), p.errs.String()
			if !test.passes && (!strings.HasPrefix(errs, "oxide-conformance: ") ||
				strings.Count(errs, "\n") != 1) {
				t.Errorf("expected one line on standard error; found %q", errs)
			}
			if strings.Contains(out+errs, canary) {
				t.Error("it prints the token")
			}
			for _, want := range [][2]string{{errs, test.says}, {out, test.shows}} {
				for word := range strings.SplitSeq(want[1], "|") {
					if !strings.Contains(want[0], word) {
						t.Errorf("it does not say %q: %s", word, want[0])
					}
				}
			}
		})
	}
	for _, r := range csitest.Got(rack.Admin.Requests(t.Context(), 0))(t) {
		if r.Method != http.MethodGet && r.Status < 300 && r.Operation != "instance_stop" { // by rackOf
			t.Errorf("a program has made something: %+v", r)
		}
	}
	if after := csitest.Got(other.Admin.Requests(t.Context(), 0))(t); len(after) != len(before) {
		t.Errorf("%d requests were sent to the other rack", len(after)-len(before))
	}
}

func TestHelpListsEveryVerbAndSetting(t *testing.T) {
	questions, words := [][]string{{"help"}, {"--help"}, {"-h"}}, []string{}
	for verb := range verbs {
		questions = append(questions, []string{verb, "--help"}, []string{verb, "-h"})
		words = append(words, "oxide-conformance "+verb)
	}
	for _, s := range (&settings{}).all() {
		words = append(words, s.flag, s.env)
	}
	for _, args := range questions {
		var out, errs strings.Builder
		p := Program{Args: args, Getenv: func(string) string { return "" }, Stdout: &out, Stderr: &errs}
		if status := p.Main(t.Context()); status != ExitConforms || errs.Len() > 0 {
			t.Errorf("%s: %d, %s", args, status, errs.String())
		}
		for _, word := range words {
			if !strings.Contains(out.String(), word) {
				t.Errorf("%s: the help does not have %s", args, word)
			}
		}
	}
}

func answering(status int) http.RoundTripper {
	return legal.RoundTrip(func(r *http.Request) (*http.Response, error) {
		return legal.Answer(r, status, ""), nil
	})
}

func (b budgeted) send(t *testing.T, method, path, body string) bool {
	t.Helper()
	answer, err := b.RoundTrip(csitest.Got(http.NewRequestWithContext(t.Context(), method,
		"https://rack/v1/"+path, strings.NewReader(body)))(t))
	if err != nil && !errors.Is(err, rules.ErrNotSent) {
		t.Fatal(err)
	}
	if err == nil {
		_ = answer.Body.Close()
	}
	return err == nil
}

func TestTheDisksOfAnInstanceCountAgainstTheBudget(t *testing.T) {
	for limit, want := range map[amount]bool{{3, 4}: true, {2, 4}: false, {3, 3}: false} {
		b := budgeted{budget: newBudget(limit), next: answering(http.StatusCreated)}
		sent := b.send(t, http.MethodPost, "instances?project=p", `{"name":"i","size":1,
			"boot_disk":{"type":"create","name":"b","size":2147483648},"disks":[
			{"type":"create","name":"c","size":1073741824},{"type":"attach","name":"d"},
			{"type":"create","name":"e","size":1073741824}]}`) // b.run is "": no mark is needed
		if now, _ := b.budget.held(); sent != want || sent && now != limit {
			t.Errorf("%s: sent: %v, the budget has %s", limit, sent, now)
		}
		b.budget.deleted("b")
		if now, _ := b.budget.held(); sent && now != (amount{2, 2}) {
			t.Errorf("without the boot disk the budget has %s", now)
		}
	}
}

func TestDeletionReleasesRoomInTheBudget(t *testing.T) {
	const id = "9a1c43ee-2c7c-4a4b-8d4d-6f6f1c3d2b10"
	for name, test := range map[string]struct {
		path   string
		status int
		// created is the creation's HTTP status. If early is set, the deletion precedes the answer to it.
		created int
		early   bool
		left    int
	}{
		"by its ID":                      {id, 204, 201, false, 0},
		"by its name":                    {"made", 204, 201, false, 0},
		"again, after a lost answer":     {id, 404, 201, false, 0},
		"by its ID, before the answer":   {id, 204, 201, true, 0},
		"by its name, before the answer": {"made", 204, 201, true, 0},
		"never made":                     {"other", 404, 400, false, 0},
		"another one":                    {"other", 204, 201, false, 1},
		"refused":                        {id, 400, 201, false, 1},
		"a busy rack's":                  {id, 503, 201, false, 1},
	} {
		b := budgeted{budget: newBudget(amount{1, 1})}
		b.next = legal.RoundTrip(func(r *http.Request) (*http.Response, error) {
			if r.Method == http.MethodDelete {
				return legal.Answer(r, test.status, ""), nil
			}
			if test.early {
				b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
			}
			return legal.Answer(r, test.created, `{"id":"`+id+`"}`), nil
		})
		b.send(t, http.MethodPost, "snapshots", `{"name":"made"}`)
		if !test.early {
			b.send(t, http.MethodDelete, "snapshots/"+test.path, "")
		}
		if now, _ := b.budget.held(); now.objects != test.left {
			t.Errorf("%s: the budget has %s, not %d objects", name, now, test.left)
		}
	}
}

func TestNothingIsCreatedWithoutTheMarkOfTheRun(t *testing.T) {
	const ours, others = "1a2b3c4d", "5e6f7a8b"
	text := func(run string) string { return fmt.Sprintf("%q", mark{Run: run}.description()) }
	for path, test := range map[string]string{
		"disks":     `{"name":"d","description":%s,"size":-1}`,
		"snapshots": `{"name":"d","description":%s}`,
		"images":    `{"name":"d","description":%s,"os":1} and more`,
		"instances": `{"name":"d","description":%s,"disks":[{"type":"create","name":"x",` +
			`"description":` + text(ours) + `}]}`,
		"instances?with=disk": `{"name":"d","description":` + text(ours) + `,"disks":[{"type":"create",` +
			`"name":"x","description":%s}]}`,
	} {
		for description, want := range map[string]bool{text(ours): true, text(others): false,
			`"made by hand"`: false, `null`: false,
			strings.Replace(text(ours), "}", `,\"pad\":\"ééé\"}`, 1): true,
			strings.Replace(text(ours), "}", "}ééé", 1):              false} {
			b := budgeted{budget: newBudget(amount{9, 9}), run: ours,
				next: answering(http.StatusBadRequest)}
			sent := b.send(t, http.MethodPost, path, fmt.Sprintf(test, description))
			if sent != want {
				t.Errorf("%s with the description %s: sent: %t", path, description, sent)
			}
		}
	}
}

type vars = map[string]string

func shellOf(t *testing.T, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "shell")
	csitest.Must(t, os.WriteFile(path, []byte("#!/bin/sh\n"+text), 0o700))
	return path
}

func TestAHangingShellDoesNotDelayAnInterrupt(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	const hangs = 15 * time.Second
	began := time.Now()
	// After the shell is killed, its child process "sleep" keeps the output open.
	shell := shellOf(t, fmt.Sprintf("sleep %d & wait", hangs/time.Second))
	got := askShell(ctx, "--second-shell", shell, &oxide.Instance{Name: "b"})
	if took := time.Since(began); got.Status != report.Fail || took > hangs/2 {
		t.Errorf("%s after %s", got.Status, took)
	}
}

func TestAShellDoesNotGetTheToken(t *testing.T) {
	t.Setenv("OXIDE_TOKEN", "oxide-token-of-the-rack")
	shell := shellOf(t, `echo 0; echo "$OXIDE_TOKEN"`)
	got := askShell(t.Context(), "--second-shell", shell, &oxide.Instance{Name: "b", Id: "b"})
	if got.Status != report.Fail || !strings.Contains(got.Found, `found ["0"]`) {
		t.Errorf("the shell says %s: %s", got.Status, got.Found)
	}
}

func TestARunReportsThatAShellReachesTheWrongInstance(t *testing.T) {
	t.Parallel()
	rack := rackOf(t, harness.RackOptions{})
	p := prepare(t, rack, vars{"OXIDE_CONFORMANCE_SECOND_SHELL": shellOf(t, fmt.Sprintf(
		"case $1 in *agent*) exec %s \"$1\";; esac\nexec %s \"$1\"\n", inside(rack, "a"),
		inside(rack, "b")))}, "run", "--yes", "--only", partData)
	p.exit(t, ExitUsage)
	if r := p.report(t); !strings.Contains(r.Why, "--second-shell reaches instance") {
		t.Errorf("%s: %s", r.Verdict, r.Why)
	}
}

// update makes TestDemoMovesAVolumeAndCleansUp write the picture.
var update = flag.Bool("update", false, "write docs/life-of-a-volume.png")

func screenshot(t *testing.T, page string) {
	t.Helper()
	png := csitest.Got(filepath.Abs("../docs/life-of-a-volume.png"))(t)
	out, err := exec.CommandContext(t.Context(), "chromium", "--headless", "--no-sandbox",
		"--disable-gpu", "--user-data-dir="+t.TempDir(), "--hide-scrollbars",
		"--window-size=2230,1210", "--screenshot="+png, "file://"+page).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

func TestDemoMovesAVolumeAndCleansUp(t *testing.T) {
	// row matches the console's row about a change that a node's driver recorded.
	row := func(node, change string) string {
		return `<td>` + node + `<td><span title="[^<]*">` + change + `</span>[^\n]*<td>done<td>`
	}
	const claim = `/console/disks/[0-9a-f-]{36}" title="csi-[^"]*">demo/greeting</a>`
	out := &watcher{at: map[string]func(){}}
	for at, want := range map[string]string{
		"\n 4. ": `<h3>a</h3>.*` + claim + `.*<h3>b</h3>.*` + row("a", "Published") + ".*" +
			row("a", "Mounted") + ".*" + row("a", "Formatted") + ".*" + row("a", "ProvenBlank"),
		"\n 7. ": `id="shelf" .*` + claim + `.*id="quota".*` + row("a", "Unmounted"),
		"\n10. ": `<h3>b</h3>.*` + claim + `.*id="shelf".*` + row("b", "Mounted") + ".*" +
			row("a", "Unmounted"),
	} {
		out.at[at] = func() {
			address := regexp.MustCompile(`http://127\.0\.0\.1:\d+/\n`).Find(out.Bytes())
			var page []byte
			if harness.Await(t.Context(), harness.StartTimeout, func() (err error) {
				if page, err = get(t.Context(), string(bytes.TrimSpace(address))); err == nil &&
					!regexp.MustCompile("(?s)"+want).Match(page) {
					err = errors.New("not yet")
				}
				return err
			}) != nil {
				t.Errorf("after %q the console does not show %q: %s", at, want, page)
			}
		}
	}
	t.Setenv(pictureFile, filepath.Join(t.TempDir(), "life.html"))
	if err := Demo(t.Context(), strings.NewReader("\n"), out, nil); err != nil {
		t.Fatalf("Demo: %v\n%s", err, out)
	}
	shown := out.String()
	for _, want := range []string{
		`shows itself in a browser at\n +http://127\.0\.0\.1:\d+/\n`,
		`rack  POST /v1/disks\S* → 201`,
		`rack  POST /v1/instances/\S+/disks/attach\S* → 202`,
		`NodeStageVolume on a: .*\n +mounted: `,
		`"Hello from instance a\..*" into `,
		`rack  POST /v1/instances/\S+/disks/detach\S* → 202`,
		`"Hello from instance a\..*" from `,
		`rack  GET /v1/disks/\S+ → 200 .*\n +rack  DELETE /v1/disks/\S+ → 204`,
		`The ledger balances`,
	} {
		if !regexp.MustCompile(want).MatchString(shown) {
			t.Errorf("the demo does not show %q", want)
		}
	}
	if len(out.at) > 0 {
		t.Errorf("the demo does not print %d of the texts at which the console is read", len(out.at))
	}
	if waits := strings.Count(shown, "Press Enter"); waits != 2 {
		t.Errorf("the demo waits %d times, want for the one line and the end of the input", waits)
	}
	if requests := strings.Count(shown, "      rack  "); requests != 15 {
		t.Errorf("the demo shows %d requests to the rack, want 15", requests)
	}
	page := csitest.Got(os.ReadFile(os.Getenv(pictureFile)))(t)
	for _, want := range []string{"DeleteVolume: the disk is gone", "driver 3: node b",
		"instance_disk_attach", "Formatted", "every promise was kept"} {
		if !bytes.Contains(page, []byte(want)) {
			t.Errorf("the picture does not show %q", want)
		}
	}
	if *update {
		screenshot(t, os.Getenv(pictureFile))
	}
	if t.Failed() {
		t.Log(shown)
	}
}

// watcher is the demo's output. When a key of the map "at" is first printed, it calls at[key].
type watcher struct {
	bytes.Buffer
	at map[string]func()
}

func (w *watcher) Write(p []byte) (int, error) {
	n, err := w.Buffer.Write(p)
	for text, do := range w.at {
		if bytes.Contains(p, []byte(text)) {
			delete(w.at, text)
			do()
		}
	}
	return n, err
}

func get(ctx context.Context, url string) (_ []byte, err error) {
	defer harness.Catch(&err)
	req := harness.Got(http.NewRequestWithContext(ctx, http.MethodGet, url, nil))
	req.Header.Set("Accept", "text/html")
	req.Close = true // an idle connection would count as a leak of the demo
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return io.ReadAll(resp.Body)
}

func TestAnInterruptedDemoLeavesNoMountsDevicesOrFiles(t *testing.T) {
	dir := csitest.Got(os.MkdirTemp("", "demo-"))(t) // t.TempDir's path is too long for sockets
	t.Cleanup(func() { os.RemoveAll(dir) })
	t.Setenv("OXIDE_SANITY_DIR", dir)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	out := &watcher{at: map[string]func(){"The workload writes": cancel}}
	if err := Demo(ctx, nil, out, nil); !errors.Is(err, context.Canceled) {
		t.Fatalf("Demo = %v, want the interrupt\n%s", err, out)
	}
	ledger := csitest.Got(harness.KernelLedger(dir))(t)
	if left := ledger.More(nil); len(left) > 0 {
		t.Errorf("left after an interrupt: %q", left)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%s holds %v, %v", dir, entries, err)
	}
}
