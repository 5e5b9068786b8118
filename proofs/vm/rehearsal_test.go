//go:build linux

package vm_test

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/docs"
	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/harness/proof"
	"github.com/oxidecomputer/oxide-csi-plugin/simulator/adminapi"
)

const (
	// stepTime limits the time of one block of the page's commands. A conformance run takes longest.
	stepTime = 40 * time.Minute
	// gateway is the address at which a guest reaches the operator's machine.
	gateway = "10.0.2.2"
)

// The test runs the commands of docs/conformance.md as an operator does: on the operator's machine
// and in the first of a rack's three instances, which are virtual machines. The variable
// REHEARSAL_PARTS is the conformance run's value of --only.
func TestTheCommandsOfTheConformancePageWorkInARehearsal(t *testing.T) {
	if os.Getenv("OXIDE_REHEARSAL") == "" {
		t.Skip("make rehearsal runs it, and needs half an hour without KVM")
	}
	key := hostKey(t)
	work := t.TempDir()
	for _, c := range []struct {
		hotplug             adminapi.Hotplug
		figure, release     string
		verdict, says       string
		attachments, status int
	}{
		{adminapi.HotplugNone, "no", "v21", "blocked", "BLOCKED BY THE RACK", 0, 3},
		{adminapi.HotplugFull, "yes", "v22", "conforms", "CONFORMS", 1, 0},
	} {
		t.Run("hotplug="+c.figure, func(t *testing.T) {
			began := time.Now()
			o := newOperator(t, work, key, c.release, c.hotplug)
			o.here(t, o.block("make build"))
			if out, status := o.onA(t, o.block("preflight")); status != 0 {
				t.Fatalf("the preflight ended with %d:\n%s", status, out)
			}
			run, parts := o.block("conformance run"), cmp.Or(os.Getenv("REHEARSAL_PARTS"), "all")
			killed := run.Text
			if parts != "all" {
				run.Text = strings.Replace(run.Text, " run ", " run --only "+parts+" ", 1)
			}
			out, status := o.onA(t, run)
			t.Logf("%s", out)
			if status != c.status || !strings.Contains(out, c.says) {
				t.Errorf("the run ended with %d and not with %d and %q", status, c.status, c.says)
			}
			o.kill(t, killed, c.attachments)
			if out, status := o.onA(t, o.block("conformance clean")); status != 0 {
				t.Errorf("the clean ended with %d:\n%s", status, out)
			}
			if left := o.state(t); len(left.Disks)+len(left.Snapshots) > 0 || len(left.Instances) != 3 {
				t.Errorf("after the clean there are %d disks, %d snapshots and %d instances",
					len(left.Disks), len(left.Snapshots), len(left.Instances))
			}
			o.here(t, o.block("scp -r"))
			var report struct{ Verdict string }
			text, err := os.ReadFile(filepath.Join(work, c.release, "report.json"))
			must(t, errors.Join(err, json.Unmarshal(text, &report)))
			if report.Verdict != c.verdict {
				t.Errorf("the report's verdict is %q, not %q", report.Verdict, c.verdict)
			}
			err = proof.Print(proof.Line("rehearsal", "hotplug", c.figure, "parts", parts,
				"verdict", report.Verdict, "minutes", fmt.Sprintf("%.1f", time.Since(began).Minutes())))
			if err != nil {
				t.Error(err)
			}
			if c.release == "v22" {
				o.release = "" // the command names both releases
				o.here(t, o.block("conformance diff"))
			}
		})
	}
}

type operator struct {
	rack *harness.Rack
	// work is the working directory, and env the environment of the operator's machine.
	work string
	env  []string
	// release, if set, replaces the release v21 in the page's commands.
	release string
	// block returns the page's first block of commands with text in it.
	block   func(text string) docs.Block
	exports string
}

// newOperator starts a rack with the running instances "a" and "b" and the stopped instance "h".
// The operator, and root on the instance "a", can log in to all of them by their names.
func newOperator(t *testing.T, work, key, release string, hotplug adminapi.Hotplug) *operator {
	t.Helper()
	rack := harness.Need(harness.RunFor(t).StartRack(t.Context(), harness.RackOptions{Hotplug: hotplug,
		Instances: []string{"a", "b", "h"}, Args: []string{"--guests=vm"}}))(t)
	t.Cleanup(func() { must(t, rack.Stop()) })
	must(t, rack.StopInstance(t.Context(), rack.Instance("h").ID))
	o := &operator{rack: rack, work: work, release: release, block: blocksOf(t)}
	own := t.TempDir()
	var here, onA strings.Builder
	for _, i := range rack.Instances {
		const entry = "Host %s\nHostName %s\nPort %d\nIdentityFile %s\nStrictHostKeyChecking no\n" +
			"UserKnownHostsFile /dev/null\nLogLevel error\n"
		port := relay(t, rack, i.ID)
		fmt.Fprintf(&here, entry, i.Name, "127.0.0.1", port, key)
		fmt.Fprintf(&onA, entry, i.Name, gateway, port, "~/.ssh/id")
	}
	root := harness.Need(filepath.Abs("../.."))(t)
	ssh := "exec /usr/bin/%s -F " + filepath.Join(own, "here") + " \"$@\"\n"
	for name, text := range map[string]string{"here": here.String(), "on-a": onA.String(),
		"ssh": fmt.Sprintf("#!/bin/sh\n"+ssh, "ssh"), "scp": fmt.Sprintf("#!/bin/sh\n"+ssh, "scp"),
		"make": "#!/bin/sh\nexec /usr/bin/make -s -C " + root + " \"$@\" BIN=" + work + "/bin\n"} {
		must(t, os.WriteFile(filepath.Join(own, name), []byte(text), 0o700))
	}
	o.env = append(harness.Environ(), "PATH="+own+":"+os.Getenv("PATH"))
	must(t, harness.Await(t.Context(), bootTime, func() error {
		return o.command(t.Context(), "ssh root@a true && ssh root@b true").Run()
	}))
	o.here(t, docs.Block{Text: fmt.Sprintf("scp -q %s root@a:.ssh/id\nscp -q %s/on-a "+
		"root@a:.ssh/config", key, own)})
	exports, _, _ := strings.Cut(o.block("preflight").Text, "\n")
	if !strings.HasPrefix(exports, "export ") {
		t.Fatalf("the preflight begins with %q and not with the variables", exports)
	}
	o.exports = strings.NewReplacer("https://silo.sys.example.com",
		strings.Replace(rack.URL, "127.0.0.1", gateway, 1), "=csi", "="+rack.Project,
		"=…", "="+rack.Token).Replace(exports)
	return o
}

func blocksOf(t *testing.T) func(text string) docs.Block {
	t.Helper()
	blocks := harness.Need(harness.Need(docs.Read("../..", "docs/conformance.md"))(t).Blocks())(t)
	blocks = append(docs.RunBy(docs.Rehearsal, blocks), docs.RunBy(docs.RehearsalOn, blocks)...)
	if len(blocks) != 6 {
		t.Fatalf("the page has %d blocks for the rehearsal, which runs 6", len(blocks))
	}
	return func(text string) docs.Block {
		for _, b := range blocks {
			if strings.Contains(b.Text, text) {
				return b
			}
		}
		t.Fatalf("the page has no block with %q for the rehearsal", text)
		return docs.Block{}
	}
}

// relay returns a port of loopback that forwards to the sshd of an instance. The port of the sshd
// changes with every start of the instance.
func relay(t *testing.T, rack *harness.Rack, id string) (port int) {
	t.Helper()
	l := harness.Need((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	var relaying sync.WaitGroup
	t.Cleanup(relaying.Wait)
	t.Cleanup(func() { _ = l.Close() })
	relaying.Go(func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			relaying.Go(func() {
				defer near.Close()
				at := node{Instance: harness.Instance{ID: id}, rack: rack}
				address, err := at.sshd(context.WithoutCancel(t.Context()))
				if err != nil {
					return
				}
				far, err := new(net.Dialer).DialContext(t.Context(), "tcp", address)
				if err != nil {
					return
				}
				relaying.Go(func() {
					_, _ = io.Copy(far, near)
					_ = far.(*net.TCPConn).CloseWrite()
				})
				_, _ = io.Copy(near, far)
				_ = far.Close()
			})
		}
	})
	return l.Addr().(*net.TCPAddr).Port
}

func (o *operator) command(ctx context.Context, text string) *exec.Cmd {
	c := exec.CommandContext(ctx, "bash", "-e", "-c", text)
	c.Dir, c.Env = o.work, o.env
	return c
}

func (o *operator) fill(text string) string {
	if o.release == "" {
		return text
	}
	return strings.ReplaceAll(text, "v21", o.release)
}

func (o *operator) here(t *testing.T, b docs.Block) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stepTime)
	defer cancel()
	if out, err := o.command(ctx, o.fill(b.Text)).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", b.Text, err, out)
	}
}

// onA runs the commands of a block at a terminal of the instance "a", and answers their question
// with yes. It returns what the terminal shows.
func (o *operator) onA(t *testing.T, b docs.Block) (out string, status int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), stepTime)
	defer cancel()
	text := o.fill(b.Text)
	if _, rest, found := strings.Cut(text, "\n"); found && strings.HasPrefix(text, "export ") {
		text = rest
	}
	c := o.command(ctx, `exec ssh -tt root@a "$COMMANDS"`)
	c.Env = append(c.Env, "COMMANDS="+o.exports+"\n"+text)
	// Standard input is a pipe, so that it stays open after the answer.
	keyboard, hand, err := os.Pipe()
	if err != nil {
		t.Error(err)
		return "", -1
	}
	defer keyboard.Close()
	defer hand.Close()
	_, err = io.WriteString(hand, "yes\n")
	var seen bytes.Buffer
	c.Stdin, c.Stdout, c.Stderr = keyboard, &seen, &seen
	err = errors.Join(err, c.Run())
	var ended *exec.ExitError
	if err != nil && (!errors.As(err, &ended) || ctx.Err() != nil) {
		t.Errorf("%s: %v\n%s", text, err, seen.String())
		return "", -1
	}
	if !strings.Contains(seen.String(), b.Prints) {
		t.Errorf("%s does not print %q:\n%s", text, b.Prints, seen.String())
	}
	return seen.String(), c.ProcessState.ExitCode()
}

// kill starts a conformance run of the data checks. It kills the run when the rack has a disk of
// the run and at least the given number of attachments.
func (o *operator) kill(t *testing.T, command string, attachments int) {
	t.Helper()
	command = strings.Replace(command, "--report v21", "--only data", 1)
	killed := make(chan string, 1)
	go func() {
		out, status := o.onA(t, docs.Block{Text: command})
		killed <- fmt.Sprintf("the run that was killed ended with %d:\n%s", status, out)
	}()
	err := harness.Await(t.Context(), stepTime, func() error {
		state, err := o.rack.Admin.State(t.Context())
		if err == nil && (len(state.Disks) == 0 || len(state.Attachments) < attachments) {
			err = errors.New("the run has not begun")
		}
		if err == nil {
			// The program has started itself in a mount namespace, as /proc/self/exe, so its name is exe.
			err = o.command(t.Context(), "ssh root@a pkill -9 -x exe").Run()
		}
		select {
		case out := <-killed:
			t.Log(out)
			return nil
		default:
			return errors.Join(err, errors.New("the run still runs"))
		}
	})
	must(t, err)
	if left := o.state(t); len(left.Disks) == 0 {
		t.Error("the run that was killed has left nothing")
	}
}

func (o *operator) state(t *testing.T) adminapi.State {
	t.Helper()
	return harness.Need(o.rack.Admin.State(t.Context()))(t)
}
