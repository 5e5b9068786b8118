package guest

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/oxidecomputer/oxide-csi-plugin/internal/csitest"
	"github.com/oxidecomputer/oxide-csi-plugin/loopdev/namespace"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == Verb {
		os.Exit(Main(context.Background()))
	}
	namespace.Main(m)
}

func TestKillDoesNotWaitForAnInstanceThatIsDown(t *testing.T) {
	// This command outlives its agent, as ssh does until it notices that the instance is down.
	g := csitest.Got(Connect(t.Context(), []string{"sh", "-c",
		`sh -c "$0"; case $0 in *" agent;"*) sleep 1000; esac`}, Config{}))(t)
	killed := make(chan struct{})
	go func() {
		defer close(killed)
		g.Kill()
	}()
	select {
	case <-killed:
	case <-time.After(20 * time.Second):
		t.Error("Kill has not returned after 20 s")
	}
}

func TestConnectReportsWhyACommandDoesNotReachTheInstance(t *testing.T) {
	for _, c := range []struct {
		command []string
		says    string
	}{
		{nil, "expected a command such as ssh b"},
		{[]string{"sh", "-c", "echo no route >&2; exit 255; #"}, "no route"},
		{[]string{"sh", "-c", "cat >/dev/null; echo hello; #"}, "expected the name of a directory"},
	} {
		csitest.Says(t, csitest.Err(Connect(t.Context(), c.command, Config{})), c.says)
	}
}

// The files and directories have this program's names but may be somebody else's. The test hangs if
// RemoveOwn or Sweep opens a FIFO.
func TestOnlyADirectoryWithTheProgramsMarkIsRemoved(t *testing.T) {
	dir := func(path string) error { return os.Mkdir(path, 0o700) }
	marked := func(path string) error { return errors.Join(dir(path), MarkOwn(path, "agent")) }
	for name, create := range map[string]func(path string) error{
		"a file":   func(path string) error { return os.WriteFile(path, []byte("x"), 0o600) },
		"a FIFO":   func(path string) error { return unix.Mkfifo(path, 0o666) },
		"a folder": dir,
		"a folder with files": func(path string) error {
			return errors.Join(dir(path), os.WriteFile(filepath.Join(path, "x"), nil, 0o600))
		},
		"a link to a proven folder": func(path string) error {
			target := filepath.Join(t.TempDir(), "target")
			return errors.Join(marked(target), os.Symlink(target, path))
		},
		"a marked folder of another user": func(path string) error {
			return errors.Join(marked(path), os.Chown(path, 65534, 65534))
		},
		"a mark of another user": func(path string) error {
			return errors.Join(marked(path), os.Chown(filepath.Join(path, markFile), 65534, 65534))
		},
		"a folder in which all may write": func(path string) error {
			return errors.Join(marked(path), os.Chmod(path, 0o777))
		},
		"a mark for something else": func(path string) error {
			return errors.Join(dir(path), MarkOwn(path, "photos"))
		},
		"a FIFO for a mark": func(path string) error {
			return errors.Join(dir(path), unix.Mkfifo(filepath.Join(path, markFile), 0o600))
		},
	} {
		t.Run(name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			path := filepath.Join(tmp, dirPrefix+"photos")
			csitest.Must(t, create(path))
			before := namesBelow(t, tmp)
			if err := RemoveOwn(path, "agent"); !errors.Is(err, ErrNotOwn) {
				t.Errorf("expected a refusal; found %v", err)
			}
			Sweep()
			if after := namesBelow(t, tmp); !slices.Equal(before, after) {
				t.Errorf("there were %q; now there are %q", before, after)
			}
			if _, err := ReadFile(path); err == nil && name != "a file" {
				t.Error("it was read as a regular file")
			}
		})
	}
	path := filepath.Join(t.TempDir(), "own")
	csitest.Must(t, marked(path))
	csitest.Must(t, os.MkdirAll(filepath.Join(path, "a", "b"), 0o700))
	csitest.Must(t, os.Symlink(filepath.Dir(path), filepath.Join(path, "link")))
	csitest.Must(t, RemoveOwn(path, "agent"))
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a proven folder is still there: %v", err)
	}
}

func namesBelow(t *testing.T, dir string) []string {
	t.Helper()
	var names []string
	csitest.Must(t, filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		names = append(names, strings.TrimPrefix(path, dir))
		return err
	}))
	return names
}

func TestSweepKeepsADirectoryWhileAProgramOfItsAgentRuns(t *testing.T) {
	t.Setenv("TMPDIR", t.TempDir())
	d := csitest.Got(newDirectory())(t)
	program := exec.Command("cat")
	program.ExtraFiles = []*os.File{d.lock}
	stdin, err := program.StdinPipe()
	csitest.Must(t, errors.Join(err, program.Start()))
	// When an agent ends, the kernel does the same: it closes the lock and unmounts the tmpfs.
	csitest.Must(t, errors.Join(d.lock.Close(), unix.Unmount(d.path, unix.MNT_DETACH)))
	Sweep()
	if _, err := os.Stat(d.path); err != nil {
		t.Errorf("while a program of the agent lives: %v", err)
	}
	csitest.Must(t, errors.Join(stdin.Close(), program.Wait()))
	Sweep()
	if _, err := os.Stat(d.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("after the program has ended the directory should be gone: %v", err)
	}
}
