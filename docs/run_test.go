//go:build linux

package docs

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/internal/short"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

const pageTimeout = 10 * time.Minute

// programs lists the programs that the commands find in PATH. link() adds helm to PATH.
var programs = []string{"oxide-csi-plugin", "oxide-simulator"}

var compiles = regexp.MustCompile(`\bgo (build|run|test)\b`)

func TestTheCommandsInThePagesWork(t *testing.T) {
	pages := try(Pages(root))(t)
	run := harness.RunFor(t)
	path := filepath.Join(run.Dir, "path")
	for _, page := range pages {
		if !page.WithCommands() {
			continue
		}
		blocks, err := page.Blocks()
		if err != nil {
			t.Error(err)
		}
		if blocks = RunBy(Here, blocks); len(blocks) == 0 {
			continue
		}
		t.Run(page.Path, func(t *testing.T) {
			if slices.ContainsFunc(blocks, func(b Block) bool { return compiles.MatchString(b.Text) }) {
				short.Skip(t, 1)
			}
			link(t, run, path)
			dir := try(os.MkdirTemp(run.Dir, "page-"))(t) // kept after a failed test
			rack := try(run.StartRack(t.Context(), harness.RackOptions{}))(t)
			defer func() { must(t, rack.Stop()) }()
			// With the Makefile's flags, a page's `go build` reuses the packages that make has compiled.
			session := Session{Root: root, Dir: dir, Env: append(harness.Environ(),
				"CGO_ENABLED=0", "GOFLAGS="+strings.TrimSpace(os.Getenv("GOFLAGS")+" -trimpath"),
				"PATH="+path+":"+os.Getenv("PATH"), "OXIDE_HOST="+rack.URL,
				"OXIDE_TOKEN="+rack.Token, "OXIDE_PROJECT="+rack.Project, "OXIDE_CLUSTER_ID=docs")}
			ctx, cancel := context.WithTimeout(t.Context(), pageTimeout)
			defer cancel()
			if err := session.Run(ctx, blocks); err != nil {
				t.Errorf("%s: %v", page.Path, err)
			}
			if err := nothingLeft(dir); err != nil {
				t.Errorf("%s: %v", page.Path, err)
			}
		})
	}
}

func link(t *testing.T, run *harness.Run, path string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o755))
	helm := filepath.Join(filepath.Dir(os.Getenv("OXIDE_CSI_PLUGIN")), "helm")
	_, err := os.Stat(helm)
	if err != nil {
		out, err := exec.CommandContext(t.Context(), "env", "CGO_ENABLED=0", "GOFLAGS=-trimpath",
			"go", "tool", "-modfile=../tools/go.mod", "-n", "helm").Output()
		if err != nil {
			t.Fatalf("build the tool helm: %v", err)
		}
		helm = strings.TrimSpace(string(out))
	}
	binaries := map[string]string{"helm": helm}
	for _, program := range programs {
		binaries[program] = try(run.Binary(t.Context(), program))(t)
	}
	for program, binary := range binaries {
		err := os.Symlink(binary, filepath.Join(path, program))
		if err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
}

// nothingLeft detaches the loop devices of files below a directory. It returns an error if it finds
// such a device, or a mount below the directory.
func nothingLeft(dir string) error {
	left, err := harness.KernelLedger(dir)
	released, detachErr := loopdev.DetachBelow(context.Background(), dir)
	if len(left)+len(released) > 0 {
		err = fmt.Errorf("its commands left %q and %d loop devices", left.More(nil), len(released))
	}
	return errors.Join(err, detachErr)
}

func TestTheCommandsForAClusterAreValidShell(t *testing.T) {
	for _, path := range slices.Concat(ByHelm, OnCluster, OnColdRack) {
		page := try(Read(root, path))(t)
		blocks := try(page.Blocks())(t)
		for _, b := range RunBy(Cluster, blocks) {
			check := exec.CommandContext(t.Context(), "bash", "-n")
			check.Stdin = strings.NewReader(b.Text)
			if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%s: %v: %s", b.At, err, out)
			}
		}
	}
}

func TestAFailedSessionOfCodeBlocksReportsTheCause(t *testing.T) {
	for name, c := range map[string]struct {
		blocks []Block
		want   []string
	}{
		"a command fails": {[]Block{{At: "p.md:1", Text: "a=found"}, {At: "p.md:5",
			Text: "echo $a; cat /nowhere; echo not reached"}}, []string{"== p.md:5", "/nowhere", "found"}},
		"a text is missing": {[]Block{{At: "p.md:1", Text: "echo other", Prints: "wanted"}},
			[]string{"p.md:1", `to print "wanted"`, "other"}},
		"a part of a pipe fails": {[]Block{{At: "p.md:1", Text: "false | true"}}, []string{"p.md:1"}},
		"a process is left": {[]Block{{At: "p.md:1", Text: "sleep 600 &"}},
			[]string{"leaves processes"}},
	} {
		t.Run(name, func(t *testing.T) {
			err := Session{Root: root, Dir: t.TempDir(), Env: os.Environ()}.Run(t.Context(), c.blocks)
			if err == nil {
				t.Fatal("the session succeeded")
			}
			for _, want := range c.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("the error %q lacks %q", err, want)
				}
			}
			if strings.Contains(err.Error(), "not reached\n") {
				t.Errorf("the session went on after a failure: %v", err)
			}
		})
	}
}

var nobody = &syscall.Credential{Uid: 65534, Gid: 65534}

// TestCommandsPrintTheErrorOfASimulatorThatCannotStart runs the first blocks of two pages as a user
// without rights, with a port in use, or without oxide-simulator. If the simulator does not start,
// the commands have to end, and to print the error.
func TestCommandsPrintTheErrorOfASimulatorThatCannotStart(t *testing.T) {
	run := harness.RunFor(t)
	taken := try((&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0"))(t)
	defer taken.Close()
	for _, c := range []struct {
		name, page string
		blocks     int // the number of the page's first blocks that are run
		user       *syscall.Credential
		// simulator is the text of a bash script in place of the program oxide-simulator. In the text,
		// SIMULATOR stands for the path of the real program.
		simulator string
		says      string
		fails     bool
	}{
		{"as nobody, without devices", "docs/howto/simulator.md", 3, nobody, `exec SIMULATOR "$@"`,
			`"state":"detached"`, false},
		{"as nobody, with devices", "docs/howto/csi-sanity.md", 1, nobody, `exec SIMULATOR "$@"`,
			"loop devices need root", true},
		{"with the port taken", "docs/howto/simulator.md", 2, nil,
			`exec SIMULATOR "$@" --listen ` + taken.Addr().String(), "address already in use", true},
		{"with the port taken, before the driver starts", "docs/howto/csi-sanity.md", 1, nil,
			`exec SIMULATOR "$@" --listen ` + taken.Addr().String(), "address already in use", true},
		{"without the program", "docs/howto/simulator.md", 2, nil, "",
			"oxide-simulator: command not found", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := try(os.MkdirTemp("", "newcomer-"))(t) // every user may write in it
			must(t, os.Chmod(dir, 0o777))
			t.Cleanup(func() { must(t, errors.Join(nothingLeft(dir), os.RemoveAll(dir))) })
			session := Session{Root: root, Dir: dir, User: c.user}
			bin := filepath.Join(session.Dir, "bin")
			must(t, os.Mkdir(bin, 0o755))
			session.Env = []string{"HOME=" + session.Dir,
				"PATH=" + bin + ":/usr/bin:/bin:/usr/sbin:/sbin"}
			for _, program := range programs {
				must(t, exec.CommandContext(t.Context(), "install", "-m", "755",
					try(run.Binary(t.Context(), program))(t), filepath.Join(bin, "true-"+program)).Run())
			}
			// `go build` takes minutes, so a script with the name "go" copies the programs instead.
			script := func(name, text string) {
				text = strings.ReplaceAll("#!/bin/bash\n"+text+"\n", "SIMULATOR",
					filepath.Join(bin, "true-oxide-simulator"))
				must(t, os.WriteFile(filepath.Join(bin, name), []byte(text), 0o755))
			}
			script("go", `case $1 in
build) cp "${0%/*}/oxide-simulator" "$3"
	cp "${0%/*}/true-oxide-csi-plugin" "$3/oxide-csi-plugin";;
*) exec sleep 600;;
esac`)
			if c.simulator != "" {
				script("oxide-simulator", c.simulator)
			}
			page := try(Read(root, c.page))(t)
			blocks := try(page.Blocks())(t)
			blocks = RunBy(Here, blocks)[:c.blocks]
			// Continue after a failure, as in a terminal. After the last block, kill what still runs.
			blocks[0].Text = "set +e\n" + blocks[0].Text
			blocks[len(blocks)-1].Text += "\nkill $RACK $DRIVER; wait"
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			err := session.Run(ctx, blocks)
			if ctx.Err() != nil {
				t.Fatalf("%s does not end: %v", c.page, err)
			}
			var said strings.Builder
			for i := range blocks {
				said.Write(try(os.ReadFile(session.output(i)))(t))
			}
			if (err != nil) != c.fails || !strings.Contains(said.String(), c.says) {
				t.Errorf("%s ended with %v and without %q in\n%s", c.page, err, c.says, &said)
			}
		})
	}
}
