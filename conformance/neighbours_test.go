//go:build linux

package conformance

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/oxidecomputer/oxide-csi-plugin/conformance/legal"
	"github.com/oxidecomputer/oxide-csi-plugin/conformance/report"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
)

// A run of the program works beside disks that look like its own, somebody whose objects change, a
// run that was killed, one that lives, one elsewhere, one of which nothing tells where it ran, a
// colleague who cleans up all the time, and programs of others with this program's name. It is a
// run of the rules: csi-sanity counts the volumes of everybody.
func TestARunConformsAmongOthersAndTouchesNothingOfTheirs(t *testing.T) {
	t.Parallel()
	run := plainRun(t)
	rack := rackOf(t, run, harness.RackOptions{})
	actors := strangers(t, rack, "1a2b3c4d")
	nothingOfRuns, now := balance(t.Context(), t, rack), time.Now()
	made(t, rack, "elsewhere", mark{Run: "22222222", Host: "elsewhere", Began: &now}.description())
	lost := made(t, rack, "unknown", mark{Run: "33333333"}.description())
	env, check := asOthersHave(rack), balance(t.Context(), t, rack)
	alone := asOthersHave(rack, "SECOND", "SECOND_SHELL", "HELPER", "GUEST_SHELL")
	dead := prepare(t, run, rack, alone)
	c := begin(t, run, rack, dead, death{how: killed, part: "ext4", at: 20})
	<-c.made
	csitest.Must(t, dead.Process.Kill())
	<-c.ended
	id := regexp.MustCompile(`Run ([0-9a-f]{8}) of`).FindStringSubmatch(dead.out.String())[1]
	programs := []*exec.Cmd{stranger(t, 65534, "--endpoint=unix:/x/"+workDir(id)+"/csi.sock"),
		stranger(t, 0, "run", "--yes")}
	ctx, stop := context.WithCancel(t.Context())
	others := make(chan error, 1)
	go func() { others <- legal.Strangers(ctx, rack) }()

	living := prepare(t, run, rack, alone, "run", "--yes", "--only", partRules)
	p := prepare(t, run, rack, env, "run", "--yes", "--only", partRules)
	csitest.Must(t, errors.Join(living.Start(), p.Start()))
	ended := make(chan struct{})
	go func() {
		p.await(t, ExitConforms)
		living.await(t, ExitConforms)
		close(ended)
	}()
	clean := func(want int, args ...string) string {
		colleague := prepare(t, run, rack, env, append([]string{"clean", "--yes"}, args...)...)
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
	for _, cmd := range programs {
		_ = cmd.Stdin.(*os.File).Close() // ends it
		if err := cmd.Wait(); fmt.Sprint(err) != "exit status 1" {
			t.Errorf("touched: %q: %v", cmd.Args, err)
		}
	}
	check()
	for _, want := range []string{"it still runs, as process", "this is not elsewhere",
		"clean --run 22222222", "without the disk that describes it", "clean --run 33333333"} {
		if !strings.Contains(said, want) {
			t.Errorf("clean does not say %q", want)
		}
	}
	// An operator who names a run of another machine knows that it is dead. One who detached its disk
	// by hand may continue.
	csitest.Must(t, rack.AttachDisk(t.Context(), lost, rack.Instance("b").ID))
	clean(ExitFails, "--run", "33333333")
	csitest.Must(t, rack.DetachDisk(t.Context(), lost, rack.Instance("b").ID))
	clean(ExitConforms, "--run", "33333333")
	clean(ExitConforms, "--run", "22222222")
	nothingOfRuns()
	if !t.Failed() { // otherwise something on the rack is not as it was
		figure(t, "neighbours-of-a-run", "actors", actors+len(programs)+6, "touched", 0)
	}
}

// stranger starts a process of a user with this program's name. It ends with its input.
func stranger(t *testing.T, user uint32, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh")
	cmd.Args = append([]string{"oxide-conformance", "-c", "read x"}, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	reader, writer, err := os.Pipe()
	csitest.Must(t, err)
	cmd.Stdin = reader
	csitest.Must(t, errors.Join(cmd.Start(), reader.Close()))
	cmd.Stdin = writer
	return cmd
}

// sampledKinds is the number of alterations that are tried outside of the long form. The tests of
// conformance/rules try every alteration.
const sampledKinds = 3

// TestNoRunBlamesALegalRack checks as on a real rack, without an admin listener.
func TestNoRunBlamesALegalRack(t *testing.T) {
	short.Skip(t, sampledKinds)
	t.Parallel()
	p := proof.New(t, "legal-runs")
	kinds := legal.Kinds()
	p.Rand().Shuffle(len(kinds), func(i, j int) { kinds[i], kinds[j] = kinds[j], kinds[i] })
	args := []string{"run", "--yes"}
	if !p.Long() {
		kinds, args = kinds[:sampledKinds], append(args, "--only", partRules)
	}
	run := plainRun(t)
	const nothingMade report.Verdict = "none" // of a preflight that refused the run
	var mu sync.Mutex
	// mu guards the counts.
	runs, alarms, verdicts := 0, 0, map[report.Verdict]int{}
	for round := uint64(0); round == 0 || p.Long() && !p.Over(); round++ {
		var group errgroup.Group
		group.SetLimit(4) // the runs wait most of the time
		for i, kind := range kinds {
			rack := rackOf(t, run, harness.RackOptions{})
			seed := p.Seed + round*uint64(len(kinds)) + uint64(i)
			group.Go(func() error {
				return legal.Try(t.Context(), rack, kind, seed, func(host string) error {
					env := asOthersHave(rack, "SECOND", "SECOND_SHELL", "HELPER", "GUEST_SHELL")
					env["OXIDE_HOST"], env["OXIDE_CA_FILE"] = host, ""
					program := prepare(t, run, rack, env, args...)
					_ = program.Run() // the report has the result
					mu.Lock()
					defer mu.Unlock()
					runs++
					verdict := nothingMade
					if r, err := report.Read(program.folder); err == nil {
						verdict = r.Verdict
					} else if program.ProcessState.ExitCode() != ExitUsage ||
						!strings.Contains(program.errs.String(), "nothing was made") {
						verdict = report.DoesNotConform // a run without a report is an error on any rack
					}
					verdicts[verdict]++
					if verdict == report.DoesNotConform {
						alarms++
						t.Errorf("%s (%s): %s", kind.Name, kind.Says, tail(program.out.String()))
					}
					p.Say("%s: %s: %s", kind.Name, program.ProcessState, verdict)
					return nil
				})
			})
		}
		csitest.Must(t, group.Wait())
	}
	p.Figure("kinds", len(kinds), "runs", runs, "conforms", verdicts[report.Conforms], "incomplete",
		verdicts[report.Incomplete], "nothing_made", verdicts[nothingMade], "false_alarms", alarms)
}
