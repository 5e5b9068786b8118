//go:build linux

package docs

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/oxidecomputer/oxide-csi-plugin/harness"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev"
)

// pageTimeout is how long the commands of one page may take.
const pageTimeout = 10 * time.Minute

// programs lists the programs on the PATH of the commands, besides the helm of the tools' module.
var programs = []string{"oxide-csi-plugin", "oxide-simulator"}

func TestTheCommandsInThePagesWork(t *testing.T) {
	pages, err := Pages(root)
	if err != nil {
		t.Fatal(err)
	}
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
			link(t, run, path)
			rack, err := run.StartRack(t.Context(), harness.RackOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := rack.Stop(); err != nil {
					t.Error(err)
				}
			}()
			session := Session{Root: root, Dir: directory(t, run), Env: append(harness.Environ(),
				"PATH="+path+":"+os.Getenv("PATH"), "OXIDE_HOST="+rack.URL,
				"OXIDE_TOKEN="+rack.Token, "OXIDE_PROJECT="+rack.Project, "OXIDE_CLUSTER_ID=docs")}
			ctx, cancel := context.WithTimeout(t.Context(), pageTimeout)
			defer cancel()
			if err := session.Run(ctx, blocks); err != nil {
				t.Errorf("%s: %v", page.Path, err)
			}
			if err := nothingLeft(session.Dir); err != nil {
				t.Errorf("%s: %v", page.Path, err)
			}
		})
	}
}

// link puts links to the programs into a directory, once.
func link(t *testing.T, run *harness.Run, path string) {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	helm, err := exec.CommandContext(t.Context(), "go", "tool", "-modfile=../tools/go.mod", "-n",
		"helm").Output()
	if err != nil {
		t.Fatalf("build the tool helm: %v", err)
	}
	binaries := map[string]string{"helm": strings.TrimSpace(string(helm))}
	for _, program := range programs {
		if binaries[program], err = run.Binary(t.Context(), program); err != nil {
			t.Fatal(err)
		}
	}
	for program, binary := range binaries {
		err := os.Symlink(binary, filepath.Join(path, program))
		if err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
	}
}

// directory creates a directory in the run's, which is kept after a failed test.
func directory(t *testing.T, run *harness.Run) string {
	t.Helper()
	dir, err := os.MkdirTemp(run.Dir, "page-")
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// nothingLeft returns an error if a loop device or a mount below a directory is left. It detaches
// the loop devices.
func nothingLeft(dir string) error {
	released, err := loopdev.DetachBelow(context.Background(), dir)
	if err != nil {
		return err
	}
	if len(released) > 0 {
		return fmt.Errorf("its commands left %d loop devices", len(released))
	}
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, " "+dir) {
			return fmt.Errorf("its commands left a mount: %s", line)
		}
	}
	return nil
}

func TestTheCommandsForAClusterAreValidShell(t *testing.T) {
	for _, path := range slices.Concat(ByHelm, OnCluster) {
		page, err := Read(root, path)
		if err != nil {
			t.Fatal(err)
		}
		blocks, err := page.Blocks()
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range RunBy(Cluster, blocks) {
			check := exec.CommandContext(t.Context(), "bash", "-n")
			check.Stdin = strings.NewReader(b.Text)
			if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%s: %v: %s", b.At, err, out)
			}
		}
	}
}

func TestTheErrorOfAFailedSessionNamesTheBlock(t *testing.T) {
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

func TestTheBlocksOfAPageAreOneSession(t *testing.T) {
	dir := t.TempDir()
	err := Session{Root: root, Dir: dir, Env: os.Environ()}.Run(t.Context(), []Block{
		{Text: "T=$(mktemp -d)\nsleep 600 &"}, {Text: "echo $T", Prints: dir}, {Text: "kill %1; wait"}})
	if err != nil {
		t.Error(err)
	}
}
